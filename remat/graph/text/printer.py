"""A graph as text: a head, then one line for each node, then what it returns."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat.errors import ProblemError
from remat.graph.joint import JointGraph, Role, output_node, role_of
from remat.graph.text.attributes import write_numbers
from remat.graph.text.descriptors import write_descriptor
from remat.graph.text.header import Header, symbols_of, write_header
from remat.graph.text.literals import Writer
from remat.graph.text.marks import PARTS, number_regions, write_comment, write_marks
from remat.graph.text.opaque import write_opaque
from remat.graph.text.syntax import quoted
from remat.graph.text.targets import write_target
from remat.graph.text.value_writer import ValueWriter
from remat.torch_compat import pytree

#: What placeholders of a joint graph are called.
ROLES = {
    Role.PRIMAL: "primal",
    Role.TANGENT: "tangent",
    Role.FORWARD_SEED: "forward_seed",
    Role.BACKWARD_SEED: "backward_seed",
    Role.BACKWARD_STATE: "backward_state",
}


def print_joint(joint: JointGraph, *, sources: bool = True) -> str:
    """A joint graph as text, which `parse_joint` reads back.

    Everything that planning looks at is in it. What is left out: numbers of constants with more than
    64 elements, all but the innermost user's line of stack traces, and what ShapeEnv knows about
    symbols beyond hints and ranges.

    Args:
        joint: the joint graph.
        sources: end lines with where the user's code made the node.

    Raises:
        ProblemError: something in the graph has no text form; the message names the node.
    """
    fields = {
        "lower": joint.lower,
        "num_fwd_outputs": joint.num_fwd_outputs,
        "static_inputs": joint.static_inputs,
        "received": joint.received,
    }
    return _print("joint", joint.name, joint.graph_module, fields, sources)


def print_graph(module: fx.GraphModule, name: str = "graph", *, sources: bool = True) -> str:
    """Any graph of operators as text: a half of a plan, for instance; `parse_graph` reads it back.

    Raises:
        ProblemError: as with `print_joint`.
    """
    return _print("graph", name, module, {}, sources)


def _print(
    kind: str, name: str, module: fx.GraphModule, fields: dict[str, Any], sources: bool
) -> str:
    values = [v for n in module.graph.nodes for v in pytree.tree_leaves(n.meta.get("val"))]
    devices = Counter(str(v.device) for v in values if isinstance(v, torch.Tensor))
    device = devices.most_common(1)[0][0] if devices else "cpu"
    literals = Writer()
    printer = _Printer(module, literals, ValueWriter(literals, torch.device(device), kind), sources)
    body = printer.lines(fields.get("num_fwd_outputs"))
    symbols = symbols_of(literals.symbols, _environment(values))
    head = write_header(Header(kind=kind, name=name, device=device, fields=fields), symbols)
    return "\n".join([*head, "", *body, ""])


def _environment(values: Sequence[Any]) -> ShapeEnv | None:
    """The environment that the symbols of a graph belong to."""
    for value in values:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.shape_env  # type: ignore[no-any-return]
    modes = (getattr(v, "fake_mode", None) for v in values)
    return next((m.shape_env for m in modes if m is not None and m.shape_env is not None), None)


class _Printer:
    """Writes one graph; subgraphs have printers of their own."""

    def __init__(
        self, module: fx.GraphModule, literals: Writer, values: ValueWriter, sources: bool
    ) -> None:
        self._module = module
        self._literals = literals
        self._values = values
        self._sources = sources
        self._regions = number_regions(module.graph.nodes)
        self._part: str | None = None
        self._fetched: set[str] = set()

    def lines(self, num_fwd_outputs: int | None) -> list[str]:
        """All lines of the graph: nodes, each attribute before it is fetched, outputs."""
        joint = num_fwd_outputs is not None
        lines: list[str] = []
        for node in self._module.graph.nodes:
            if node.op == "output":
                continue
            part = node.meta.get("partitioner_tag")
            if part != self._part:
                lines.append(self._new_part(node, part))
            try:
                if node.op == "get_attr":
                    lines += self._attribute(str(node.target))
                lines.append(self._node(node, joint=joint))
            except ProblemError as error:
                raise ProblemError(f"'{node.name}' cannot be written as text: {error}") from error
        return lines + self._outputs(num_fwd_outputs)

    def _new_part(self, node: fx.Node, part: Any) -> str:
        if part is not None and part not in PARTS:
            raise ProblemError(
                f"'{node.name}' has the partitioner tag {part!r}; expected one of {', '.join(PARTS)}"
            )
        self._part = part
        return f'part("{part}")' if part is not None else "part(None)"

    def _attribute(self, target: str) -> list[str]:
        """A subgraph or constant that a node fetches, where it is fetched first."""
        if target in self._fetched:
            return []
        self._fetched.add(target)
        value: Any = self._module
        for name in target.split("."):
            value = getattr(value, name, None)
        if isinstance(value, fx.GraphModule):
            inner = _Printer(value, self._literals, self._values.nested(target), self._sources)
            body = (f"    {line}" if line else "" for line in inner.lines(None))
            return ["", f"with subgraph({quoted(target)}):", *body, ""]
        if isinstance(value, torch.Tensor):
            return [self._constant(target, value)]
        return [f"attribute({quoted(target)}, {write_opaque(value)})"]

    def _constant(self, target: str, value: torch.Tensor) -> str:
        numbers = write_numbers(value, self._literals)
        kind = self._values.constant(value)
        return f"constant({quoted(target)}, {kind}{f', {numbers}' if numbers else ''})"

    def _node(self, node: fx.Node, *, joint: bool) -> str:
        call = _CALLS.get(node.op)
        if call is None:
            raise ProblemError(
                f"it is a {node.op} of '{node.target}'; expected only placeholders, get_attr and "
                "calls of functions"
            )
        text = ", ".join([call(self, node, joint), *write_marks(node, self._regions)])
        kind = f": {self._values.write(node)}" if "val" in node.meta else ""
        comment = write_comment(node) if self._sources else ""
        return f"{node.name}{kind} = {text}{f'  # {comment}' if comment else ''}"

    def _placeholder(self, node: fx.Node, joint: bool) -> str:
        if node.args:
            raise ProblemError("it has a default value; expected a placeholder without")
        desc = node.meta.get("desc")
        parts = [] if desc is None else [write_descriptor(desc)]
        if node.target != node.name:
            parts.append(f"target={quoted(str(node.target))}")
        return f"{ROLES[role_of(node)] if joint else 'placeholder'}({', '.join(parts)})"

    def _get_attr(self, node: fx.Node, joint: bool) -> str:
        return f"get_attr({quoted(str(node.target))})"

    def _call(self, node: fx.Node, joint: bool) -> str:
        if node.target is operator.getitem and not node.kwargs and len(node.args) == 2:
            whole, key = node.args
            if isinstance(whole, fx.Node) and type(key) is int:
                return f"{whole.name}[{key}]"
        return self._literals.call(write_target(node.target), node.args, dict(node.kwargs))

    def _outputs(self, num_fwd_outputs: int | None) -> list[str]:
        """What the graph returns: one line for each output that has a descriptor or a half."""
        out = output_node(self._module.graph)
        (returned,) = out.args
        descs = pytree.arg_tree_leaves(out.meta.get("desc"))
        described = any(d is not None for d in descs)
        flat = isinstance(returned, (list, tuple)) and not any(
            isinstance(v, (list, tuple, dict)) for v in returned
        )
        if not flat or not (described or num_fwd_outputs is not None):
            return [f"return {self._literals.write(returned)}"]
        values = list(returned)  # type: ignore[arg-type]
        if not described:
            descs = [None] * len(values)
        if len(descs) != len(values):
            raise ProblemError(
                f"{len(values)} outputs have {len(descs)} descriptors; expected one for each"
            )
        opening, closing = "[]" if isinstance(returned, list) else "()"
        lines = [f"return {opening}"]
        for k, (value, desc) in enumerate(zip(values, descs, strict=True)):
            name = "output"
            if num_fwd_outputs is not None:
                name = "forward" if k < num_fwd_outputs else "backward"
            behind = "" if desc is None else f", {write_descriptor(desc)}"
            lines.append(f"    {name}({self._literals.write(value)}{behind}),")
        return [*lines, closing]


_CALLS: dict[str, Callable[[_Printer, fx.Node, bool], str]] = {
    "placeholder": _Printer._placeholder,
    "get_attr": _Printer._get_attr,
    "call_function": _Printer._call,
}
