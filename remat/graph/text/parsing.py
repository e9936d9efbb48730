"""Parse graphs from text by walking its syntax tree, without executing the text."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.files import as_tuples, read_as
from remat.graph.joint import JointGraph, Turn, make_module, role_of
from remat.graph.text.annotations import PARTS, read_comment, read_mark
from remat.graph.text.literals import ArgumentReader, read_opaque
from remat.graph.text.printing import FIELDS, ROLES, VERSION
from remat.graph.text.sizes import Fakes, read_symbols
from remat.graph.text.syntax import (
    IDENTIFIER,
    MAX_BYTES,
    TOO_DEEP,
    Source,
    arguments,
    call_name,
    is_dotted,
)
from remat.graph.text.values import ValueReader


def parse_joint(text: str) -> JointGraph:
    """Parse a joint graph from the text that `print_joint` wrote.

    The parsed graph has the same fingerprint as the original. The nodes of the parsed graph have fake tensors in a
    new fake mode as values. Symbols have the hints and ranges that the text states. The graph module takes flat
    arguments: primals, then tangents.

    Raises:
        ProblemError: the text is not a joint graph, is cut off or too large, or contains something
            unknown. The message states the position, the text found, and what was expected.
    """
    name, fields, module = _parse(text, "joint")
    fields["turns"] = tuple(Turn(*turn) for turn in fields.get("turns", ()))
    return JointGraph(graph_module=module, name=name, **fields)


def parse_graph(text: str) -> fx.GraphModule:
    """Parse a graph from the text that `print_graph` wrote; the graph's values are fake, in a new fake mode.

    Raises:
        ProblemError: the text is not a graph, is cut off or too large, or contains something
            unknown. The message states the position, the text found, and what was expected.
    """
    return _parse(text, "graph")[2]


def read_joint(path: str | os.PathLike[str]) -> JointGraph:
    """Read a joint graph from a file, without executing anything in the file.

    Raises:
        ProblemError: the file does not exist, or does not hold a joint graph. The message states
            the position in the file and what was expected.
    """
    return read_as("joint graph", path, parse_joint, MAX_BYTES)


def _parse(text: str, kind: str) -> tuple[str, dict[str, Any], fx.GraphModule]:
    """Parse a text, and return the graph's name, the header fields and the graph."""
    source = Source(text)
    first, second, *_ = *source.body, None, None
    name, device, fields = _read_header(source, first, kind)
    declared = read_symbols(source, second)
    values = ValueReader(source, Fakes(declared or ()), device, kind)
    parser = _Parser(source, values, forward_outputs=fields.get("num_fwd_outputs"))
    try:
        # A graph may be read during a compilation, whose fake mode must not convert the new fake values.
        with torch_compat.disable_current_modes():
            return name, fields, parser.module(source.body[1 if declared is None else 2 :])
    # Python's parser allows deeper nesting than the recursive walk over the syntax tree.
    except RecursionError:
        raise ProblemError(TOO_DEEP) from None


class _Parser:
    """Parses one graph; each subgraph is parsed by another `_Parser`."""

    def __init__(
        self,
        source: Source,
        values: ValueReader,
        *,
        forward_outputs: int | None = None,
    ) -> None:
        self._source = source
        self._values = values
        self._forward_outputs = forward_outputs
        self._roles = ["placeholder"] if forward_outputs is None else list(ROLES.values())
        self._literals = ArgumentReader(source, self._node_of, self._values.symbolic)
        self._graph = fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._attributes: dict[str, Any] = {}
        self._part: str | None = None
        self._path = ""

    def module(self, statements: Sequence[ast.stmt]) -> fx.GraphModule:
        """Build a graph module from statements, the last of which must be ``return …``."""
        last = statements[-1] if statements else None
        if not isinstance(last, ast.Return) or last.value is None:
            raise self._source.error(last, "return …; is the text cut off?", "the end of a graph")
        for statement in statements[:-1]:
            self._statement(statement)
        self._outputs(last.value)
        return make_module(self._attributes, self._graph)

    def _node_of(self, node: ast.Name) -> fx.Node:
        """Return the graph node with a name in the text; an earlier line must define the node."""
        known_node = self._nodes.get(node.id)
        if known_node is None:
            raise self._source.error(node, "a node of a line above", f"the name {node.id[:60]!r}")
        return known_node

    def _statement(self, statement: ast.stmt) -> None:
        """Read one statement: a node, or the declaration of a part, a module, an attribute or a subgraph."""
        match statement:
            case ast.AnnAssign(
                target=ast.Name() as name, annotation=kind, value=ast.expr() as value
            ):
                self._line(statement, name, value, kind)
            case ast.Assign(targets=[ast.Name() as name], value=value):
                self._line(statement, name, value)
            case ast.Expr(value=ast.Call(func=ast.Name(id="part"), args=[tag], keywords=[])):
                part = tag.value if isinstance(tag, ast.Constant) else False
                if part is not None and part not in PARTS:
                    raise self._source.error(statement, f"one of {', '.join(PARTS)}, None")
                self._part = part
            case ast.Expr(value=ast.Call(func=ast.Name(id="module"), args=[path], keywords=[])):
                self._path = self._source.string(path)
            case ast.Expr(
                value=ast.Call(
                    func=ast.Name(id="constant"), args=[attribute, *described], keywords=[]
                )
            ) if len(described) in (1, 2):
                target = _check_name(self._source, attribute, self._attributes)
                self._attributes[target] = self._values.constant(*described)
            case ast.Expr(
                value=ast.Call(func=ast.Name(id="attribute"), args=[attribute, held], keywords=[])
            ):
                target = _check_name(self._source, attribute, self._attributes)
                self._attributes[target] = read_opaque(self._source, held)
            case ast.With(
                items=[
                    ast.withitem(
                        context_expr=ast.Call(
                            func=ast.Name(id="subgraph"), args=[attribute], keywords=[]
                        ),
                        optional_vars=None,
                    )
                ]
            ):
                target = _check_name(self._source, attribute, self._attributes)
                inner = _Parser(self._source, self._values.nested(target))
                self._attributes[target] = inner.module(statement.body)
            case _:
                raise self._source.error(
                    statement,
                    'name: type = call(…), part("is_forward"), module("path"), constant("name", type, values), '
                    'attribute("name", opaque(…)), or with subgraph("name"):',
                )

    def _line(
        self,
        statement: ast.stmt,
        target: ast.Name,
        call: ast.expr,
        kind: ast.expr | None = None,
    ) -> None:
        """Read the line of one node (name, type, call, marks, comment), and create the node."""
        if not IDENTIFIER.fullmatch(target.id):
            got = f"the name {target.id[:60]!r}"
            raise self._source.error(target, "letters, digits and _", got)
        marks: list[ast.expr] = []
        if isinstance(call, ast.Tuple) and call.elts:
            call, *marks = call.elts
        meta: dict[str, Any] = {}
        node = self._node(target, call, meta)
        if kind is not None:
            meta["val"] = self._values.read(node, kind)
        for mark in marks:
            read_mark(self._source, mark, meta)
        if self._part is not None:
            meta["partitioner_tag"] = self._part
        meta.update(read_comment(self._source.comment(statement)))
        if self._path:
            stack = [*meta.get("nn_module_stack", {"": ("", "")}).items()]
            stack[-1] = (stack[-1][0], (self._path, stack[-1][1][1]))
            meta["nn_module_stack"] = dict(stack)
        node.meta = meta
        self._nodes[node.name] = node
        if self._forward_outputs is not None and node.op == "placeholder":
            # `role_of` derives a placeholder's role from its name, so the call must name the same role.
            called, role = call_name(call), ROLES[role_of(node)]
            if called != role:
                expected = f"{role}(…), as AOTAutograd names its inputs"
                raise self._source.error(call, expected, f"'{node.name}' as {called}(…)")

    def _node(self, name: ast.Name, call: ast.expr, meta: dict[str, Any]) -> fx.Node:
        """Create the graph node for one line of the text."""
        if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name):
            container, key = self._node_of(call.value), self._source.integer(call.slice)
            return self._create(name, "call_function", operator.getitem, (container, key), {})
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
        """Create a placeholder, and store its descriptor in ``meta``."""
        if len(call.args) > 1 or any(k.arg != "target" for k in call.keywords):
            raise self._source.error(call, "a descriptor, and target=…")
        if call.args:
            meta["desc"] = self._literals.descriptor(call.args[0])
        target = self._source.string(call.keywords[0].value) if call.keywords else name.id
        if not IDENTIFIER.fullmatch(target):
            raise self._source.error(call, "a name", f"the target {target[:60]!r}")
        return self._create(name, "placeholder", target, (), {})

    def _create(
        self, name: ast.Name, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        """Create a node, and check that FX gave it the name in the text."""
        node = self._graph.create_node(op, target, name=name.id)
        # Arguments are set afterwards, because `create_node` warns about symbolic sizes in arguments.
        if args:
            node.args = args
        if kwargs:
            node.kwargs = kwargs
        if node.name != name.id:
            expected = "one that is neither taken nor reserved"
            raise self._source.error(name, expected, f"the name {name.id!r}")
        return node

    def _outputs(self, value: ast.expr) -> None:
        """Create the output node from a literal, or from calls such as ``forward(mm, PlainAOTOutput(0))``."""
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
            descs.append(self._literals.descriptor(args[1]) if len(args) == 2 else None)
            names.append(name)
        if count is not None and names != ["forward"] * count + ["backward"] * (len(names) - count):
            got = f"{names.count('forward')} outputs of forward among {len(names)}"
            raise self._source.error(value, f"{count} at the beginning, as the head says", got)
        out = self._graph.output(values if isinstance(value, ast.List) else tuple(values))
        if any(d is not None for d in descs):
            out.meta["desc"] = descs


def _read_header(
    source: Source, node: ast.stmt | None, kind: str
) -> tuple[str, torch.device, dict[str, Any]]:
    """Return the name, device and `JointGraph` fields that ``joint("name", …)`` or ``graph("name", …)`` states."""
    literals = ArgumentReader(source)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or call_name(call) != kind:
        raise source.error(node, f'{kind}("name", version={VERSION}, …)', "the first statement")
    if len(call.args) != 1:
        got = f"{len(call.args)} unnamed values"
        raise source.error(call, "one: the name of the graph", got)
    name = source.string(call.args[0])
    keywords = {k.arg: k.value for k in call.keywords}
    takes = ["version", "device", *(FIELDS if kind == "joint" else ())]
    required, optional = takes[:4], takes[4:]
    if not {*required} <= keywords.keys() <= {*takes}:
        got = f"a head with {', '.join(sorted(map(str, keywords))) or 'nothing'}"
        allowed = f", and if needed {', '.join(optional)}" if optional else ""
        raise source.error(call, f"one with {', '.join(required)}{allowed}", got)
    version = source.integer(keywords["version"])
    if version != VERSION:
        expected = f"version {VERSION}, as this remat reads"
        raise source.error(call, expected, f"a text of version {version}")
    device = literals.device(keywords["device"])
    fields: dict[str, Any] = {}
    for key in (k for k in FIELDS if k in keywords):
        fields[key] = as_tuples(literals.read(keywords[key]))
        if not _has_form(fields[key], FIELDS[key]):
            raise source.error(keywords[key], f"one such as {FIELDS[key]!r}", f"{key} as {{}}")
    return name, device, fields


def _has_form(value: Any, form: Any) -> bool:
    """Return whether a value has the type and structure of an example."""
    # A list with one element stands for tuples of any length whose elements all match it.
    if isinstance(form, (list, tuple)):
        if type(value) is not tuple:
            return False
        forms = form * len(value) if isinstance(form, list) else form
        return len(value) == len(forms) and all(map(_has_form, value, forms))
    # An int stands for ints at least as large, and a string for any nonempty string.
    return type(value) is type(form) and (value >= form if type(form) is int else value != "")


def _check_name(source: Source, node: ast.expr, taken: Mapping[str, Any]) -> str:
    """Return the name of a graph module's new attribute; raise `ProblemError` if another attribute has the name."""
    name = source.string(node)
    parts = name.split(".")
    above = (taken.get(".".join(parts[:k])) for k in range(1, len(parts)))
    good = is_dotted(name) and all(x is None or isinstance(x, torch.nn.Module) for x in above)
    good = good and not any(x == name or x.startswith(f"{name}.") for x in taken)
    # An attribute must not shadow a method of the graph module.
    if not good or hasattr(fx.GraphModule, parts[0]):
        raise source.error(node, "a name that is not taken", f"the attribute {name[:60]!r}")
    return name
