"""Define edits that make a joint graph smaller or simpler.

An edit changes a graph in place and keeps AOTAutograd's convention for joint graphs. The inputs of
a joint graph are primals, then tangents. The outputs of a joint graph are forward's outputs, then a
gradient or None for every primal. No edit changes a value's shape, so gradients still match their
primals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from remat.graph.capture.fake import repair_aliases
from remat.graph.joint import (
    JointGraph,
    Role,
    check_structure,
    output_node,
    outputs_of,
    primals_of,
    role_of,
    split_outputs,
    tangent_dependents,
)
from remat.graph.memory.storages import form_of

#: An element of a graph that an edit changes: the position of an output, or the name of a node.
Item = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdit:
    """One kind of edit that makes a joint graph smaller or simpler.

    Attributes:
        name: description of the edit.
        items: function that returns the outputs, by position, or the nodes, by name, that can be edited.
        apply: function that edits a graph at the given items and returns the graph. Items that no longer
            exist are skipped.
    """

    name: str
    items: Callable[[JointGraph], list[Item]]
    apply: Callable[[JointGraph, Sequence[Item]], JointGraph]


def tidy(joint: JointGraph) -> JointGraph:
    """Erase unused calls that have no side effect, and repair the sharing of storages among fake values.

    The graph is changed in place and returned.
    """
    # Random calls count as impure and stay. The edit "erase calls without readers" erases them, and the test decides.
    for node in reversed(list(joint.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not node.is_impure():
            joint.graph.erase_node(node)
    repair_aliases(joint.graph)
    return joint


def fault_of(joint: JointGraph) -> str | None:
    """Return why a graph is not a valid joint graph; None if the graph is valid."""
    fault = check_structure(joint.graph_module)
    if fault is not None:
        return fault
    behind_tangents = False
    for node in joint.graph.find_nodes(op="placeholder"):
        is_primal = role_of(node) is Role.PRIMAL
        if is_primal and behind_tangents:
            return f"primal '{node.name}' stands behind a tangent"
        behind_tangents |= not is_primal
    backward = tangent_dependents(joint.graph)
    values, n = outputs_of(joint.graph), joint.num_fwd_outputs
    dependent = [v.name for v in values[:n] if v in backward]
    if dependent:
        return f"forward returns '{dependent[0]}', which depends on a tangent"
    return None


def _outputs(joint: JointGraph) -> list[tuple[Any, Any]]:
    """Return a pair (value, AOTAutograd's descriptor) for each output; None if the graph has no descriptors."""
    forward, backward, forward_descs, backward_descs = split_outputs(joint)
    return list(zip([*forward, *backward], [*forward_descs, *backward_descs], strict=True))


def _set_outputs(joint: JointGraph, outputs: Sequence[tuple[Any, Any]]) -> None:
    """Replace the outputs of a graph by new outputs, each given as a pair (value, descriptor)."""
    out = output_node(joint.graph)
    out.args = (tuple(value for value, _ in outputs),)
    if out.meta.get("desc") is not None:
        out.meta = {**out.meta, "desc": [desc for _, desc in outputs]}


def _nodes(joint: JointGraph, names: Sequence[Item]) -> list[fx.Node]:
    """Return the nodes with the given names, in the order of the graph; unknown names are skipped."""
    wanted = set(names)
    return [n for n in joint.graph.nodes if n.name in wanted]


def _gradients(joint: JointGraph) -> list[Item]:
    """Return the positions of those outputs of a joint graph that are gradients and not None."""
    values, n = outputs_of(joint.graph), joint.num_fwd_outputs
    return [k for k in range(n, len(values)) if isinstance(values[k], fx.Node)]


def _drop_gradients(joint: JointGraph, items: Sequence[Item]) -> JointGraph:
    """Replace the gradients at the given positions by None."""
    # The position of a gradient determines its primal, so None takes the place of the gradient.
    outputs = enumerate(_outputs(joint))
    _set_outputs(joint, [(None if k in items else v, desc) for k, (v, desc) in outputs])
    return joint


def _drop_outputs(joint: JointGraph, items: Sequence[Item]) -> JointGraph:
    """Remove the forward outputs at the given positions."""
    _set_outputs(joint, [out for k, out in enumerate(_outputs(joint)) if k not in items])
    return replace(joint, num_fwd_outputs=joint.num_fwd_outputs - len(items))


def _has_a_gradient_each(joint: JointGraph) -> bool:
    """Return whether a graph's inputs are only primals and tangents, and every primal has a gradient output."""
    gradients = len(outputs_of(joint.graph)) - joint.num_fwd_outputs
    return gradients == len(primals_of(joint)) and all(
        role_of(n) in (Role.PRIMAL, Role.TANGENT) for n in joint.graph.find_nodes(op="placeholder")
    )


def _unused(joint: JointGraph) -> list[Item]:
    """Return the names of a graph's unused inputs; an empty list if inputs cannot be removed from the graph."""
    if not _has_a_gradient_each(joint):
        return []
    return [n.name for n in joint.graph.find_nodes(op="placeholder") if not n.users]


def _drop_unused(joint: JointGraph, items: Sequence[Item]) -> JointGraph:
    """Remove inputs without users, and the outputs for the gradients of removed primals."""
    removed = [n for n in _nodes(joint, items) if n.op == "placeholder" and not n.users]
    inputs, n = joint.graph.find_nodes(op="placeholder"), joint.num_fwd_outputs
    dropped = {n + k for k, p in enumerate(primals_of(joint)) if p in removed}
    _set_outputs(joint, [out for k, out in enumerate(_outputs(joint)) if k not in dropped])
    # Positions of inputs shift if inputs before them are removed.
    place = {k: at for at, k in enumerate(k for k, p in enumerate(inputs) if p not in removed)}
    for node in removed:
        joint.graph.erase_node(node)
    return replace(
        joint,
        static_inputs=tuple(place[k] for k in joint.static_inputs if k in place),
        received=tuple((place[k], i, j) for k, i, j in joint.received if k in place),
        shared=tuple((place[k], i, j) for k, i, j in joint.shared if k in place),
        turns=(),  # turns refer to other graphs of the step, which the reduction does not have
    )


def _results(joint: JointGraph) -> list[Item]:
    """Return the names of the calls that return a tensor; an empty list if inputs cannot be added to the graph."""
    if not _has_a_gradient_each(joint):
        return []
    return [
        n.name
        for n in joint.graph.nodes
        if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)
    ]


def _add_input(joint: JointGraph, like: fx.Node, *, tangent: bool, gradient: Any = None) -> fx.Node:
    """Add an input with the shape of a node's value, and return it; a new primal gets the given gradient."""
    graph = joint.graph
    before = list(graph.find_nodes(op="placeholder")) if tangent else primals_of(joint)
    first = next(iter(graph.nodes))
    with graph.inserting_after(before[-1]) if before else graph.inserting_before(first):
        placeholder = graph.placeholder(f"{'tangents' if tangent else 'primals'}_{like.name}")
    placeholder.meta = {"val": _new_fake(like.meta["val"])}
    if not tangent:  # the new primal is the last one, so its gradient is the last output
        _insert_output(joint, len(outputs_of(joint.graph)), gradient)
    return placeholder


def _insert_output(joint: JointGraph, at: int, value: Any) -> None:
    """Insert ``value``, without a descriptor, at position ``at`` of the outputs of a joint graph."""
    outputs = _outputs(joint)
    _set_outputs(joint, [*outputs[:at], (value, None), *outputs[at:]])


def _cut_out(joint: JointGraph, items: Sequence[Item]) -> JointGraph:
    """Replace results of calls by new inputs, and make the calls' arguments outputs or gradients of the graph."""
    backward_nodes, cut = tangent_dependents(joint.graph), _nodes(joint, items)
    removed = set(cut)
    for node in cut:
        gradients = outputs_of(joint.graph)[joint.num_fwd_outputs :]
        # Backward must compute an argument of a call that backward runs or reads. So the argument becomes a gradient.
        in_backward = (
            node in backward_nodes or node in gradients or not backward_nodes.isdisjoint(node.users)
        )
        if node.users:
            node.replace_all_uses_with(_add_input(joint, node, tangent=node in backward_nodes))
        stack = [node]
        while stack:
            erased = stack.pop()
            read = [
                n for n in erased.all_input_nodes if n.op == "call_function" and n not in removed
            ]
            joint.graph.erase_node(erased)
            for value in read:
                if not isinstance(value.meta.get("val"), torch.Tensor):
                    if not value.users:
                        removed.add(value)
                        stack.append(value)
                    continue
                n, returned = joint.num_fwd_outputs, outputs_of(joint.graph)
                if in_backward and value not in returned[n:]:
                    _add_input(joint, value, tangent=False, gradient=value)
                if node not in backward_nodes and value not in returned[:n]:
                    _insert_output(joint, n, value)
                    joint = replace(joint, num_fwd_outputs=n + 1)
    return joint


def _new_fake(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the shape, strides and type of ``value``, on a new storage."""
    with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        if value.layout is not torch.strided:
            return torch.empty_like(value)
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device
        )


def _kind_of(value: Any) -> Any:
    """Return the properties that a tensor must share with a replacement; None if the value is no tensor."""
    return form_of(value) if isinstance(value, torch.Tensor) else None


def _bypass_to(node: fx.Node) -> fx.Node | None:
    """Return the first input of a call that can replace the call's result; None if no input can."""
    kind = _kind_of(node.meta.get("val"))
    if kind is None or node.op != "call_function":
        return None
    return next((i for i in node.all_input_nodes if _kind_of(i.meta.get("val")) == kind), None)


def _replacements(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """Return the inputs that can be replaced, each with the first input of the same role, shape and type."""
    first: dict[Any, fx.Node] = {}
    replacements: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        kind = _kind_of(node.meta.get("val"))
        if kind is not None and node.users:
            same = first.setdefault((role_of(node), kind), node)
            if same is not node:
                replacements[node] = same
    return replacements


def _merge(joint: JointGraph, items: Sequence[Item]) -> JointGraph:
    """Make the users of the inputs in ``items`` read earlier inputs of the same role, shape and type."""
    for node, same in _replacements(joint).items():
        if node.name in items:
            node.replace_all_uses_with(same)
    return joint


def _of_nodes(
    name: str, applies: Callable[[fx.Node], bool], change: Callable[[fx.Node], object]
) -> GraphEdit:
    """Build an edit that changes the nodes for which ``applies`` holds, from the graph's last node to the first."""

    def items(joint: JointGraph) -> list[Item]:
        return [n.name for n in joint.graph.nodes if applies(n)]

    def apply(joint: JointGraph, names: Sequence[Item]) -> JointGraph:
        for node in reversed(_nodes(joint, names)):
            # Changes to other nodes may have made the change of this node impossible.
            if applies(node):
                change(node)
        return joint

    return GraphEdit(name=name, items=items, apply=apply)


def _bypass(node: fx.Node) -> None:
    """Replace a call's result by the input that `_bypass_to` finds."""
    input_node = _bypass_to(node)
    assert input_node is not None
    node.replace_all_uses_with(input_node)


def _untag(node: fx.Node) -> None:
    """Remove a node's tags for recomputation."""
    node.meta = {k: v for k, v in node.meta.items() if k not in ("recompute", "ac_graph_id")}


#: All edits in the order in which a round tries them: edits that remove the most nodes come first.
EDITS = (
    GraphEdit(name="drop gradients", items=_gradients, apply=_drop_gradients),
    GraphEdit(
        name="drop outputs",
        items=lambda joint: list(range(joint.num_fwd_outputs)),
        apply=_drop_outputs,
    ),
    GraphEdit(name="cut calls out", items=_results, apply=_cut_out),
    _of_nodes("leave out calls", lambda n: _bypass_to(n) is not None, _bypass),
    _of_nodes(
        "erase calls without readers",
        lambda n: n.op == "call_function" and not n.users,
        lambda n: n.graph.erase_node(n),
    ),
    GraphEdit(
        name="merge inputs",
        items=lambda joint: [n.name for n in _replacements(joint)],
        apply=_merge,
    ),
    GraphEdit(name="drop inputs", items=_unused, apply=_drop_unused),
    _of_nodes("drop tags", lambda n: n.meta.get("recompute") is not None, _untag),
)
