"""Graphs as text and back: a head, then one line for each node, then what the graph returns.

A text is read by walking its syntax tree; nothing in it is run.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.joint import JointGraph, Role, Turn, make_module, output_node, role_of
from remat.graph.structure import attribute_of
from remat.graph.text.annotations import (
    PARTS,
    number_regions,
    read_comment,
    read_descriptor,
    read_mark,
    write_comment,
    write_descriptor,
    write_marks,
)
from remat.graph.text.attributes import check_name, read_constant, write_numbers
from remat.graph.text.expressions import Expressions
from remat.graph.text.fakes import Fakes
from remat.graph.text.header import read_header, read_symbols, symbols_of, write_header
from remat.graph.text.literals import (
    SYMBOLIC,
    ArgumentReader,
    ArgumentWriter,
    read_opaque,
    write_opaque,
)
from remat.graph.text.syntax import (
    IDENTIFIER,
    MAX_NAME,
    MAX_NODES,
    Source,
    arguments,
    call_name,
    quoted,
    written_call,
)
from remat.graph.text.targets import write_target
from remat.graph.text.values import ValueReader, ValueWriter
from remat.torch_compat import pytree

#: What placeholders of a joint graph are called.
_ROLES = {role: role.name.lower() for role in Role}


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
        "shared": joint.shared,
        "returned": joint.returned,
        "runs": joint.runs if joint.runs > 1 else (),
        "turns": tuple(map(tuple, joint.turns)),
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
    literals = ArgumentWriter()
    printer = _Printer(module, literals, ValueWriter(literals, torch.device(device), kind), sources)
    body = printer.lines(fields.get("num_fwd_outputs"))
    symbols = symbols_of(literals.symbols, _environment(values))
    head = write_header(kind, name, device, fields, symbols)
    return "\n".join([*head, "", *body, ""])


def _environment(values: Sequence[Any]) -> ShapeEnv | None:
    """The environment that the symbols of a graph belong to."""
    for value in values:
        if isinstance(value, SYMBOLIC):
            return value.node.shape_env  # type: ignore[no-any-return]
    modes = (getattr(v, "fake_mode", None) for v in values)
    return next((m.shape_env for m in modes if m is not None and m.shape_env is not None), None)


class _Printer:
    """Writes one graph; subgraphs have printers of their own."""

    def __init__(
        self, module: fx.GraphModule, literals: ArgumentWriter, values: ValueWriter, sources: bool
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
        value = attribute_of(self._module, target)
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
        text = ", ".join([self._call(node, joint), *write_marks(node, self._regions)])
        kind = f": {self._values.write(node)}" if "val" in node.meta else ""
        comment = write_comment(node) if self._sources else ""
        return f"{node.name}{kind} = {text}{f'  # {comment}' if comment else ''}"

    def _call(self, node: fx.Node, joint: bool) -> str:
        if node.op == "placeholder":
            if node.args:
                raise ProblemError("it has a default value; expected a placeholder without")
            desc = node.meta.get("desc")
            parts = [] if desc is None else [write_descriptor(desc)]
            if node.target != node.name:
                parts.append(f"target={quoted(str(node.target))}")
            return written_call(_ROLES[role_of(node)] if joint else "placeholder", parts)
        if node.op == "get_attr":
            return f"get_attr({quoted(str(node.target))})"
        if node.op != "call_function":
            raise ProblemError(
                f"it is a {node.op} of '{node.target}'; expected only placeholders, get_attr and "
                "calls of functions"
            )
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


def parse_joint(text: str) -> JointGraph:
    """The joint graph that `print_joint` wrote; its fingerprint is that of the original.

    Values are fake tensors under a mode of their own, whatever their size; symbols get the hints and
    ranges that the text gives. The module takes flat arguments: primals, then tangents.

    Raises:
        ProblemError: the text is no joint graph, cut off, too large, or has something in it that is
            not known; the message says where, what was found, and what was expected.
    """
    name, fields, module = _parse(text, "joint")
    fields["turns"] = tuple(Turn(*turn) for turn in fields.get("turns", ()))
    return JointGraph(graph_module=module, name=name, **fields)


def parse_graph(text: str) -> fx.GraphModule:
    """The graph that `print_graph` wrote, with fake values as `parse_joint` makes them.

    Raises:
        ProblemError: as with `parse_joint`.
    """
    return _parse(text, "graph")[2]


def _parse(text: str, kind: str) -> tuple[str, dict[str, Any], fx.GraphModule]:
    source = Source(text)
    first, second, *_ = *source.body, None, None
    name, device, fields = read_header(source, first, kind)
    declared = read_symbols(source, second)
    fakes = Fakes(declared or ())
    values = ValueReader(source, fakes, Expressions(source, fakes.symbols), device, kind)
    parser = _Parser(source, values, forward_outputs=fields.get("num_fwd_outputs"))
    # A graph may be read while another is compiled: fake values are made here, not by a mode.
    with torch_compat.disable_current_modes():
        return name, fields, parser.module(source.body[1 if declared is None else 2 :])


class _Parser:
    """Reads one graph; subgraphs have parsers of their own.

    Args:
        source: the text.
        values: reads the values of this graph's nodes.
        forward_outputs: how many outputs of a joint graph are forward's; None for other graphs.
        left: how many nodes may still come, shared with subgraphs.
    """

    def __init__(
        self,
        source: Source,
        values: ValueReader,
        *,
        forward_outputs: int | None = None,
        left: list[int] | None = None,
    ) -> None:
        self._source = source
        self._values = values
        self._forward_outputs = forward_outputs
        self._roles = ["placeholder"] if forward_outputs is None else list(_ROLES.values())
        self._left = [MAX_NODES] if left is None else left
        self._literals = ArgumentReader(source, self._node_of, self._values.symbolic)
        self._graph = fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._attributes: dict[str, Any] = {}
        self._part: str | None = None

    def module(self, statements: Sequence[ast.stmt]) -> fx.GraphModule:
        """The graph of a sequence of statements, the last of which is a return."""
        last = statements[-1] if statements else None
        if not isinstance(last, ast.Return) or last.value is None:
            raise self._source.error(last, "return …; is the text cut off?", "the end of a graph")
        for statement in statements[:-1]:
            match statement:
                case ast.AnnAssign() | ast.Assign():
                    self._statement(statement)
                case ast.With():
                    self._subgraph(statement)
                case ast.Expr(value=ast.Call() as call):
                    self._declaration(call)
                case _:
                    raise self._source.error(
                        statement,
                        "name: type = call(…), part(…), constant(…), attribute(…), or with "
                        "subgraph(…)",
                    )
        self._outputs(last.value)
        return make_module(self._attributes, self._graph)

    def _node_of(self, node: ast.Name) -> fx.Node:
        found = self._nodes.get(node.id)
        if found is None:
            raise self._source.error(node, "a node of a line above", f"the name {node.id[:60]!r}")
        return found

    def _statement(self, statement: ast.AnnAssign | ast.Assign) -> None:
        """One node: its name, type, call, marks and comment."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        target = targets[0]
        if len(targets) > 1 or not isinstance(target, ast.Name) or statement.value is None:
            raise self._source.error(statement, "name: type = call(…)")
        if not IDENTIFIER.fullmatch(target.id) or len(target.id) > MAX_NAME:
            expected = f"at most {MAX_NAME} letters, digits and _"
            raise self._source.error(target, expected, f"the name {target.id[:60]!r}")
        self._left[0] -= 1
        if self._left[0] < 0:
            raise self._source.error(statement, f"at most {MAX_NODES} nodes", "one node more")
        call, marks = statement.value, []
        if isinstance(call, ast.Tuple) and call.elts:
            call, *marks = call.elts
        meta: dict[str, Any] = {}
        node = self._node(target, call, meta)
        if isinstance(statement, ast.AnnAssign):
            meta["val"] = self._values.read(node, statement.annotation)
        for mark in marks:
            read_mark(self._source, mark, meta)
        if self._part is not None:
            meta["partitioner_tag"] = self._part
        meta.update(read_comment(self._source.comment(statement)))
        node.meta = meta
        self._nodes[node.name] = node
        if self._forward_outputs is not None and node.op == "placeholder":
            kind, role = call_name(call), _ROLES[role_of(node)]
            if kind != role:
                expected = f"{role}(…), as AOTAutograd names its inputs"
                raise self._source.error(call, expected, f"'{node.name}' as {kind}(…)")

    def _declaration(self, call: ast.Call) -> None:
        """``part(…)``, ``constant(…)`` and ``attribute(…)``."""
        if (args := arguments(call, "part", 1, 1)) is not None:
            part = args[0].value if isinstance(args[0], ast.Constant) else False
            if part is not None and part not in PARTS:
                raise self._source.error(call, f"one of {', '.join(PARTS)}, None")
            self._part = part
        elif (args := arguments(call, "constant", 2, 3)) is not None:
            name = check_name(self._source, args[0], self._attributes)
            constant = read_constant(self._source, self._values, self._literals, args)
            self._attributes[name] = constant
        elif (args := arguments(call, "attribute", 2, 2)) is not None:
            name = check_name(self._source, args[0], self._attributes)
            self._attributes[name] = read_opaque(self._source, args[1])
        else:
            raise self._source.error(
                call,
                'part("is_forward"), constant("name", type, values), attribute("name", opaque(…)), '
                "or a node as name: type = call(…)",
            )

    def _subgraph(self, statement: ast.With) -> None:
        item = statement.items[0] if len(statement.items) == 1 else None
        call = None if item is None or item.optional_vars is not None else item.context_expr
        args = arguments(call, "subgraph", 1, 1)
        if args is None:
            raise self._source.error(statement, 'with subgraph("name"):', "this block")
        name = check_name(self._source, args[0], self._attributes)
        inner = _Parser(self._source, self._values.nested(name), left=self._left)
        self._attributes[name] = inner.module(statement.body)

    def _node(self, name: ast.Name, call: ast.expr, meta: dict[str, Any]) -> fx.Node:
        """The node that a call stands for; its descriptor goes to ``meta``."""
        if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name):
            whole, key = self._node_of(call.value), self._source.integer(call.slice)
            return self._create(name, "call_function", operator.getitem, (whole, key), {})
        if not isinstance(call, ast.Call):
            raise self._source.error(call, "a call, or an element as x[0]")
        kind = call_name(call)
        if kind in self._roles:
            return self._placeholder(name, call, meta)
        if kind == "get_attr":
            args = arguments(call, "get_attr", 1, 1)
            target = self._source.string(args[0]) if args else ""
            if target not in self._attributes:
                expected = "one that constant(…), attribute(…) or with subgraph(…) above makes"
                raise self._source.error(call, expected, f"the attribute {target[:60]!r}")
            return self._create(name, "get_attr", target, (), {})
        if kind is not None:
            expected = f"{', '.join([*self._roles, 'get_attr'])}, or an operator such as "
            raise self._source.error(call, f"{expected}aten.mm.default", f"{kind[:60]}(…)")
        target = self._literals.target(call.func)
        return self._create(name, "call_function", target, *self._literals.call(call))

    def _placeholder(self, name: ast.Name, call: ast.Call, meta: dict[str, Any]) -> fx.Node:
        if len(call.args) > 1 or any(k.arg != "target" for k in call.keywords):
            raise self._source.error(call, "a descriptor, and target=…")
        if call.args:
            meta["desc"] = read_descriptor(self._source, call.args[0])
        target = self._source.string(call.keywords[0].value) if call.keywords else name.id
        if not IDENTIFIER.fullmatch(target) or len(target) > MAX_NAME:
            raise self._source.error(call, "a name", f"the target {target[:60]!r}")
        return self._create(name, "placeholder", target, (), {})

    def _create(
        self, name: ast.Name, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        node = self._graph.create_node(op, target, name=name.id)
        # Set afterwards: symbolic sizes as arguments are nothing to warn about where they were read.
        if args:
            node.args = args
        if kwargs:
            node.kwargs = kwargs
        if node.name != name.id:
            expected = "one that is neither taken nor reserved"
            raise self._source.error(name, expected, f"the name {name.id!r}")
        return node

    def _outputs(self, value: ast.expr) -> None:
        """``return``: a literal, or one call for each output with its descriptor."""
        count = self._forward_outputs
        kinds = ("output",) if count is None else ("forward", "backward")
        listed = value.elts if isinstance(value, (ast.List, ast.Tuple)) else []
        if not any(call_name(x) in kinds for x in listed):
            self._graph.output(self._literals.read(value))
            return
        values: list[Any] = []
        descs: list[Any] = []
        names: list[str] = []
        for x in listed:
            name = call_name(x) or ""
            args = arguments(x, name, 1, 2)
            if name not in kinds or args is None:
                raise self._source.error(x, f"{' or '.join(kinds)}(node, descriptor)")
            values.append(self._literals.read(args[0]))
            descs.append(read_descriptor(self._source, args[1]) if len(args) == 2 else None)
            names.append(name)
        if count is not None and names != ["forward"] * count + ["backward"] * (len(names) - count):
            got = f"{names.count('forward')} outputs of forward among {len(names)}"
            raise self._source.error(value, f"{count} at the beginning, as the head says", got)
        out = self._graph.output(values if isinstance(value, ast.List) else tuple(values))
        if any(d is not None for d in descs):
            out.meta["desc"] = descs
