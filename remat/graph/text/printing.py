"""Write graphs as text: a header, one line per node, and the outputs."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from remat.errors import ProblemError
from remat.files import write_file
from remat.graph.capture.source import module_path
from remat.graph.joint import JointGraph, Role, output_node, role_of
from remat.graph.memory.storages import fake_mode_of, leaves_of
from remat.graph.ops import attribute_of
from remat.graph.text.annotations import (
    PARTS,
    number_regions,
    write_comment,
    write_marks,
)
from remat.graph.text.literals import ArgumentWriter, write_opaque
from remat.graph.text.sizes import Symbol, symbols_of, write_symbol
from remat.graph.text.syntax import check_size, quoted, written_call
from remat.graph.text.values import ValueWriter

#: Version of the text form; a text of another version is refused.
VERSION = 1

_WIDTH = 100

#: Fields of `JointGraph` that the header of a text states, each with an example that `_has_form` of the parser
#: compares with the value in a text.
FIELDS: Mapping[str, Any] = {
    "lower": "inductor",
    "num_fwd_outputs": 0,
    "static_inputs": [0],
    "received": [(0, 0, 0)],
    "shared": [(0, 0, 0)],
    "returned": [0],
    "runs": 1,
    "places": [0],
    "dropped": [0],
    "turns": [(0, [(0, 0, 0)], [(0, 0, 0)], [0], [0])],
}
#: Name of the call that declares a placeholder, such as ``primal``, by role.
ROLES = {role: role.name.lower() for role in Role}
#: Suffix of files that hold a joint graph.
SUFFIX = ".joint"


def print_joint(joint: JointGraph, *, modules: bool = False) -> str:
    """Return a joint graph as text, which `parse_joint` reads.

    The text holds all data that planning uses, with one exception. The text names the modules of nodes, which
    policies by module need, only if ``modules`` is set. The text leaves out guards on symbols, and the numbers of
    constants with more than 64 elements. The text keeps only the innermost user line of each stack trace.

    Raises:
        ProblemError: something in the graph has no text form. The message names the node.
    """
    fields = {key: getattr(joint, key) for key in FIELDS}
    # The header leaves out empty tuples, so a graph that runs once has no field ``runs``.
    fields["runs"] = joint.runs if joint.runs > 1 else ()
    fields["turns"] = tuple(map(tuple, joint.turns))
    return _print("joint", joint.name, joint.graph_module, fields, modules)


def print_graph(module: fx.GraphModule, name: str = "graph") -> str:
    """Return any graph of operators, such as a forward graph, as text, which `parse_graph` reads.

    Raises:
        ProblemError: something in the graph has no text form. The message names the node.
    """
    return _print("graph", name, module, {})


def write_joint(path: str | os.PathLike[str], joint: JointGraph) -> None:
    """Write a joint graph to a file as text, atomically.

    Raises:
        ProblemError: the graph has no text form, or its text exceeds the size that can be read.
        RematError: the file cannot be written.
    """
    text = print_joint(joint)
    check_size(text)
    write_file(path, text, "joint graph")


def _print(
    kind: str,
    name: str,
    module: fx.GraphModule,
    fields: dict[str, Any],
    modules: bool = False,
) -> str:
    """Return the text of a graph with its header."""
    values = [v for n in module.graph.nodes for v in leaves_of(n.meta.get("val"))]
    devices = Counter(str(v.device) for v in values if isinstance(v, torch.Tensor))
    device = devices.most_common(1)[0][0] if devices else "cpu"
    literals = ArgumentWriter()
    writer = ValueWriter(literals, torch.device(device), kind)
    printer = _Printer(module, literals, writer, modules)
    body = printer.lines(fields.get("num_fwd_outputs"))
    environment = getattr(fake_mode_of(values), "shape_env", None)
    symbols = symbols_of(literals.symbols, environment)
    head = _header(kind, name, device, fields, symbols)
    return "\n".join([*head, "", *body, ""])


class _Printer:
    """Writes the lines of one graph; each subgraph is written by another `_Printer`."""

    def __init__(
        self,
        module: fx.GraphModule,
        literals: ArgumentWriter,
        values: ValueWriter,
        modules: bool = False,
    ) -> None:
        self._module = module
        self._literals = literals
        self._values = values
        self._modules = modules
        self._path = ""
        self._regions = number_regions(module.graph.nodes)
        self._part: str | None = None
        self._fetched: set[str] = set()

    def lines(self, num_fwd_outputs: int | None) -> list[str]:
        """Return all lines of the graph below the header."""
        joint = num_fwd_outputs is not None
        lines: list[str] = []
        for node in self._module.graph.nodes:
            if node.op == "output":
                continue
            part = node.meta.get("partitioner_tag")
            if part != self._part:
                lines.append(self._new_part(node, part))
            if self._modules and self._path != module_path(node):
                self._path = module_path(node)
                lines.append(f"module({quoted(self._path)})")
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
        """Return the lines that declare an attribute before its first use: a subgraph, constant or other object."""
        if target in self._fetched:
            return []
        self._fetched.add(target)
        value = attribute_of(self._module, target)
        if isinstance(value, fx.GraphModule):
            inner = _Printer(value, self._literals, self._values.nested(target))
            body = (f"    {line}" if line else "" for line in inner.lines(None))
            return ["", f"with subgraph({quoted(target)}):", *body, ""]
        if isinstance(value, torch.Tensor):
            return [f"constant({quoted(target)}, {self._values.constant(value)})"]
        return [f"attribute({quoted(target)}, {write_opaque(value)})"]

    def _node(self, node: fx.Node, *, joint: bool) -> str:
        text = ", ".join([self._call(node, joint), *write_marks(node, self._regions)])
        kind = f": {self._values.write(node)}" if "val" in node.meta else ""
        comment = write_comment(node)
        return f"{node.name}{kind} = {text}{f'  # {comment}' if comment else ''}"

    def _call(self, node: fx.Node, joint: bool) -> str:
        if node.op == "placeholder":
            if node.args:
                raise ProblemError("it has a default value; expected a placeholder without")
            desc = node.meta.get("desc")
            parts = [] if desc is None else [self._literals.write(desc)]
            if node.target != node.name:
                parts.append(f"target={quoted(str(node.target))}")
            return written_call(ROLES[role_of(node)] if joint else "placeholder", parts)
        if node.op == "get_attr":
            return f"get_attr({quoted(str(node.target))})"
        if node.op != "call_function":
            raise ProblemError(
                f"it is a {node.op} of '{node.target}'; expected only placeholders, get_attr and "
                "calls of functions"
            )
        if node.target is operator.getitem and not node.kwargs and len(node.args) == 2:
            container, key = node.args
            if isinstance(container, fx.Node) and type(key) is int:
                return f"{container.name}[{key}]"
        return self._literals.call(node.target, node.args, dict(node.kwargs))

    def _outputs(self, num_fwd_outputs: int | None) -> list[str]:
        """Return the lines of a graph's return statement: one per output, or a single line without descriptors."""
        out = output_node(self._module.graph)
        (returned,) = out.args
        descs = leaves_of(out.meta.get("desc"))
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
            rest = "" if desc is None else f", {self._literals.write(desc)}"
            lines.append(f"    {name}({self._literals.write(value)}{rest}),")
        return [*lines, closing]


def _header(
    kind: str, name: str, device: str, fields: Mapping[str, Any], symbols: Iterable[Symbol]
) -> list[str]:
    """Return the lines of a graph text's header, including the declarations of symbols."""
    parts = [quoted(name), f"version={VERSION}", f"device={quoted(device)}"]
    for key, value in fields.items():
        if isinstance(value, str):
            parts.append(f"{key}={quoted(value)}")
        elif value != ():
            parts.append(f"{key}={list(value) if isinstance(value, tuple) else value}")
    lines = _call(kind, parts)
    declared = [f"{s.name}={write_symbol(s)}" for s in symbols]
    return lines + (_call("symbols", declared) if declared else [])


def _call(name: str, parts: list[str]) -> list[str]:
    """Return the lines of a call: one line if the call fits, otherwise one per argument."""
    line = f"{name}({', '.join(parts)})"
    if len(line) <= _WIDTH:
        return [line]
    return [f"{name}(", *(f"    {part}," for part in parts), ")"]
