"""Text back into a graph: the syntax tree is walked, and nothing in it is run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from remat import torch_compat
from remat.graph.joint import JointGraph, make_module, role_of
from remat.graph.text.attributes import check_name, owner_of, read_constant
from remat.graph.text.descriptors import read_descriptor
from remat.graph.text.expressions import Expressions
from remat.graph.text.fakes import Fakes
from remat.graph.text.header import Header, read_header, read_symbols
from remat.graph.text.literals import IDENTIFIER, Reader
from remat.graph.text.marks import PARTS, read_comment, read_mark
from remat.graph.text.opaque import read_opaque
from remat.graph.text.printer import ROLES
from remat.graph.text.syntax import MAX_NAME, MAX_NODES, Source, arguments, call_name
from remat.graph.text.value_reader import ValueReader

_ROLES = {name: role for role, name in ROLES.items()}


def parse_joint(text: str) -> JointGraph:
    """The joint graph that `print_joint` wrote; its fingerprint is that of the original.

    Values are fake tensors under a mode of their own, whatever their size; symbols get the hints and
    ranges that the text gives. The module takes flat arguments: primals, then tangents.

    Raises:
        ProblemError: the text is no joint graph, cut off, too large, or has something in it that is
            not known; the message says where, what was found, and what was expected.
    """
    header, module = _parse(text, "joint")
    return JointGraph(graph_module=module, name=header.name, **header.fields)


def parse_graph(text: str) -> fx.GraphModule:
    """The graph that `print_graph` wrote, with fake values as `parse_joint` makes them.

    Raises:
        ProblemError: as with `parse_joint`.
    """
    return _parse(text, "graph")[1]


def _parse(text: str, kind: str) -> tuple[Header, fx.GraphModule]:
    source = Source(text)
    statements = source.body
    header, device = read_header(source, _at(statements, 0), kind)
    declared = read_symbols(source, _at(statements, 1))
    fakes = Fakes(declared or ())
    expressions = Expressions(source, fakes.symbols)
    values = ValueReader(source, fakes, expressions, device, kind)
    parser = _Parser(source, values, forward_outputs=header.fields.get("num_fwd_outputs"))
    # A graph may be read while another is compiled: fake values are made here, not by a mode.
    with torch_compat.disable_current_modes():
        return header, parser.module(statements[1 if declared is None else 2 :])


def _at(statements: Sequence[ast.stmt], k: int) -> ast.stmt | None:
    return statements[k] if k < len(statements) else None


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
        self._joint = forward_outputs is not None
        self._left = [MAX_NODES] if left is None else left
        self._literals = Reader(source, self._node_of, self._values.symbolic)
        self._graph = fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._attributes: dict[str, Any] = {}
        self._part: str | None = None

    def module(self, statements: Sequence[ast.stmt]) -> fx.GraphModule:
        """The graph of a sequence of statements, the last of which is a return."""
        last = statements[-1] if statements else None
        if not isinstance(last, ast.Return) or last.value is None:
            raise self._source.error(last, "the end of a graph", "return …; is the text cut off?")
        for statement in statements[:-1]:
            if isinstance(statement, (ast.AnnAssign, ast.Assign)):
                self._statement(statement)
            elif isinstance(statement, ast.With):
                self._subgraph(statement)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._declaration(statement.value)
            else:
                raise self._source.error(
                    statement,
                    self._source.quote(statement),
                    "name: type = call(…), part(…), constant(…), attribute(…), or with subgraph(…)",
                )
        self._outputs(last.value)
        return make_module(owner_of(self._attributes), self._graph)  # type: ignore[arg-type]

    def _node_of(self, node: ast.Name) -> fx.Node:
        found = self._nodes.get(node.id)
        if found is None:
            raise self._source.error(node, f"the name {node.id[:60]!r}", "a node of a line above")
        return found

    # Statements --------------------------------------------------------------------------------

    def _statement(self, statement: ast.AnnAssign | ast.Assign) -> None:
        """One node: its name, type, call, marks and comment."""
        if isinstance(statement, ast.Assign):
            target = statement.targets[0] if len(statement.targets) == 1 else None
        else:
            target = statement.target
        if not isinstance(target, ast.Name) or statement.value is None:
            raise self._source.error(
                statement, self._source.quote(statement), "name: type = call(…)"
            )
        if not IDENTIFIER.fullmatch(target.id) or len(target.id) > MAX_NAME:
            got = f"the name {target.id[:60]!r}"
            raise self._source.error(target, got, f"at most {MAX_NAME} letters, digits and _")
        self._count(statement)
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
        if self._joint and node.op == "placeholder":
            self._check_role(node, call)

    def _count(self, statement: ast.stmt) -> None:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise self._source.error(statement, "one node more", f"at most {MAX_NODES} nodes")

    def _declaration(self, call: ast.Call) -> None:
        """``part(…)``, ``constant(…)`` and ``attribute(…)``."""
        if (args := arguments(call, "part", 1, 1)) is not None:
            part = args[0].value if isinstance(args[0], ast.Constant) else False
            if part is not None and part not in PARTS:
                raise self._source.error(
                    call, self._source.quote(call), f"one of {', '.join(PARTS)}, None"
                )
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
                self._source.quote(call),
                'part("is_forward"), constant("name", type, values), attribute("name", opaque(…)), '
                "or a node as name: type = call(…)",
            )

    def _subgraph(self, statement: ast.With) -> None:
        item = statement.items[0] if len(statement.items) == 1 else None
        call = None if item is None or item.optional_vars is not None else item.context_expr
        args = arguments(call, "subgraph", 1, 1)
        if args is None:
            raise self._source.error(statement, "this block", 'with subgraph("name"):')
        name = check_name(self._source, args[0], self._attributes)
        inner = _Parser(self._source, self._values.nested(name), left=self._left)
        self._attributes[name] = inner.module(statement.body)

    # Nodes -------------------------------------------------------------------------------------

    def _node(self, name: ast.Name, call: ast.expr, meta: dict[str, Any]) -> fx.Node:
        if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name):
            whole, key = self._node_of(call.value), self._source.integer(call.slice)
            return self._create(name, "call_function", operator.getitem, (whole, key), {})
        if not isinstance(call, ast.Call):
            raise self._source.error(
                call, self._source.quote(call), "a call, or an element as x[0]"
            )
        kind = call_name(call)
        if kind in _ROLES if self._joint else kind == "placeholder":
            return self._placeholder(name, call, meta)
        if kind == "get_attr":
            args = arguments(call, "get_attr", 1, 1)
            target = self._source.string(args[0]) if args else ""
            if target not in self._attributes:
                raise self._source.error(
                    call,
                    f"the attribute {target[:60]!r}",
                    "one that constant(…), attribute(…) or with subgraph(…) above makes",
                )
            return self._create(name, "get_attr", target, (), {})
        if kind is not None:
            known = ", ".join([*(_ROLES if self._joint else ["placeholder"]), "get_attr"])
            raise self._source.error(
                call, f"{kind[:60]}(…)", f"{known}, or an operator such as aten.mm.default"
            )
        target = self._literals.target(call.func)
        return self._create(name, "call_function", target, *self._literals.call(call))

    def _placeholder(self, name: ast.Name, call: ast.Call, meta: dict[str, Any]) -> fx.Node:
        if len(call.args) > 1 or any(k.arg != "target" for k in call.keywords):
            raise self._source.error(call, self._source.quote(call), "a descriptor, and target=…")
        if call.args:
            meta["desc"] = read_descriptor(self._source, call.args[0])
        target = self._source.string(call.keywords[0].value) if call.keywords else name.id
        if not IDENTIFIER.fullmatch(target) or len(target) > MAX_NAME:
            raise self._source.error(call, f"the target {target[:60]!r}", "a name")
        return self._create(name, "placeholder", target, (), {})

    def _check_role(self, node: fx.Node, call: ast.expr) -> None:
        kind, role = call_name(call), ROLES[role_of(node)]
        if kind != role:
            raise self._source.error(
                call, f"'{node.name}' as {kind}(…)", f"{role}(…), as AOTAutograd names its inputs"
            )

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
            raise self._source.error(
                name, f"the name {name.id!r}", "one that is neither taken nor reserved"
            )
        return node

    # Outputs -----------------------------------------------------------------------------------

    def _outputs(self, value: ast.expr) -> None:
        """``return``: a literal, or one call for each output with its descriptor."""
        kinds = ("forward", "backward") if self._joint else ("output",)
        listed = value.elts if isinstance(value, (ast.List, ast.Tuple)) else []
        if not listed or not any(call_name(x) in kinds for x in listed):
            self._graph.output(self._literals.read(value))
            return
        values: list[Any] = []
        descs: list[Any] = []
        names: list[str] = []
        for x in listed:
            name = call_name(x) or ""
            args = arguments(x, name, 1, 2)
            if name not in kinds or args is None:
                raise self._source.error(
                    x, self._source.quote(x), f"{' or '.join(kinds)}(node, descriptor)"
                )
            values.append(self._literals.read(args[0]))
            descs.append(read_descriptor(self._source, args[1]) if len(args) == 2 else None)
            names.append(name)
        count = self._forward_outputs
        if count is not None and names != ["forward"] * count + ["backward"] * (len(names) - count):
            got = f"{names.count('forward')} outputs of forward among {len(names)}"
            raise self._source.error(value, got, f"{count} at the beginning, as the head says")
        out = self._graph.output(values if isinstance(value, ast.List) else tuple(values))
        if any(d is not None for d in descs):
            out.meta["desc"] = descs
