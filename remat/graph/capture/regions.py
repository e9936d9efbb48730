"""Handle nested compile regions: graphs that an outer joint graph calls, each partitioned before the outer graph.

AOTAutograd hands a partitioner the joint graph of each region first, and the outer joint graph last. In the outer
joint graph, a region's forward is a call that returns the values saved for the region's backward. Only the plan for
the outer graph has a budget. The outer graph's plan saves the results of a region's call, or recomputes the results
by a second call. Each region itself is partitioned for the shortest run time, without a budget.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat import torch_compat
from remat.graph import ops
from remat.graph.branch_values import check_may_branch_again, fix_branches
from remat.graph.capture.fake import refresh
from remat.graph.index import index_graph
from remat.graph.joint import JointGraph, output_node
from remat.graph.memory.storages import fake_mode_of, storage_key
from remat.graph.memory.writes import aliased_argument
from remat.graph.problems.lowering import check_may_run_again
from remat.graph.problems.replays import is_element, maker_of
from remat.graph.roles import classify

Modules = tuple[fx.GraphModule, fx.GraphModule]


def is_region(module: fx.GraphModule, joint_inputs: Sequence[object]) -> bool:
    """Return whether a joint graph belongs to a nested compile region."""
    first = next(iter(module.graph.nodes))
    # For a region, AOTAutograd gives no example inputs, and numbers the placeholders from 0 instead of 1.
    return not joint_inputs and first.op == "placeholder" and first.name == "primals_0"


def calls_regions(module: fx.GraphModule) -> bool:
    """Return whether a graph, as Dynamo hands it to a backend, contains nested regions."""
    target = torch.ops.higher_order.invoke_subgraph
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    return any(g.find_nodes(op="call_function", target=target) for g in graphs)


def split_region(
    module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    **_: Any,
) -> Modules:
    """Partition the joint graph of a nested region by PyTorch's minimum cut, without a budget.

    Capture and compilation partition regions with this function, because a plan for the outer graph
    is valid for only one partition of its regions.

    Raises:
        PlanError: an operator that may have undeclared effects, or a branch value, is tagged
            MUST_RECOMPUTE.
    """
    for node in module.graph.nodes:
        # An operator that may have undeclared effects runs once, even in a checkpointed part of the region.
        if node.meta.get("recompute") is not None and ops.is_opaque(maker_of(node)):
            check_may_run_again(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    _fix_branches(module, num_fwd_outputs)
    # At a budget below 1, PyTorch recomputes random operators, which then draw other numbers.
    with torch_compat.functorch_config.patch(activation_memory_budget=1.0):
        split: Modules = torch_compat.min_cut_rematerialization_partition(
            module,
            [],
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(static_lifetime_input_indices or ()),
        )
    return split


def _fix_branches(module: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Tag nodes of a region as MUST_SAVE if they must not run again, so that backward branches as forward did."""
    joint = JointGraph(graph_module=module, num_fwd_outputs=num_fwd_outputs)
    index = index_graph(joint.graph)
    fixed = fix_branches(index, classify(joint, index))
    for i, node in enumerate(index.nodes):
        if index.position[maker_of(node)] in fixed:
            if i in fixed.branches:
                check_may_branch_again(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def separate_calls(graph: fx.Graph) -> int:
    """Put the fake results of each call of a nested region on storages that no other call uses.

    If a region returns an input unchanged, nodes that read the result are changed to read the input.

    Returns:
        Number of region calls in the graph.
    """
    calls = 0
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.invoke_subgraph:
            continue
        regions = ops.subgraphs(node)
        if not regions or not isinstance(node.meta.get("val"), (tuple, list)):
            continue
        # AOTAutograd gives every call the fake values of the region itself, as if all calls returned the same
        # memory.
        _separate(node, regions[0])
        calls += 1
    return calls


def _separate(call: fx.Node, region: fx.GraphModule) -> None:
    """Put the fake results of one call of a nested region on storages that no other call uses."""
    inputs = [n for n in region.graph.nodes if n.op == "placeholder"]
    returned: Any = output_node(region.graph).args[0]
    # The first two arguments of `invoke_subgraph` are the graph and its identifier.
    argument_of = dict(zip(inputs, call.args[2:], strict=False))
    values = call.meta["val"] = _own_values(call, argument_of, returned)
    elements: dict[int, fx.Node] = {}
    for user in list(call.users):
        if is_element(user):
            k: Any = user.args[1]
            user.meta["val"] = values[k]
            elements[k] = user
    # Counterparts outside of the region for its inputs and for results that are not views.
    outside: dict[Any, Any] = dict(argument_of)
    ends = dict.fromkeys([*argument_of, *returned])
    for k, inner in enumerate(returned):
        if isinstance(inner, fx.Node) and inner not in outside:
            base, _ = _base(inner, ends)
            if base is inner:
                outside[inner] = elements.get(k) or _element(call, k)
                call.append(outside[inner])
    for k, element in elements.items():
        # Results that are views of inputs or of other results are rebuilt outside of the region.
        outer = _view_outside(element, returned[k], outside)
        if outer is not None and outer is not element:
            element.replace_all_uses_with(outer)


def _base(inner: fx.Node, ends: Mapping[Any, Any]) -> tuple[fx.Node, list[fx.Node]]:
    """Return the node in ``ends`` of which ``inner`` is a view, and the views in between; else only ``inner``."""
    views: list[fx.Node] = []
    node = inner
    while node not in ends or not views:
        base = aliased_argument(node)
        if base is None or any(n is not base and n not in ends for n in node.all_input_nodes):
            return inner, []
        views.append(node)
        node = base
    return node, views


def _view_outside(element: fx.Node, inner: Any, outside: dict[Any, Any]) -> fx.Node | None:
    """Return a node outside of a region that equals a result of the region's call, such as a new view; else None."""
    if not isinstance(inner, fx.Node):
        return None
    if inner not in outside:
        base, views = _base(inner, outside)
        if not isinstance(outside.get(base), fx.Node):
            return None
        for view in reversed(views):
            with element.graph.inserting_before(element):
                copy = element.graph.node_copy(view, outside.__getitem__)
            copy.meta = {**element.meta, "val": view.meta["val"]}
            refresh(copy)
            outside[view] = copy
    outer = outside[inner]
    return outer if isinstance(outer, fx.Node) else None


def _element(call: fx.Node, k: int) -> fx.Node:
    """Insert a ``getitem`` node for result ``k`` of a call after the call, and return the node."""
    with call.graph.inserting_after(call):
        element = call.graph.call_function(operator.getitem, (call, k))
    element.meta = {**call.meta, "val": call.meta["val"][k]}
    return element


def _own_values(call: fx.Node, argument_of: dict[fx.Node, Any], returned: Any) -> tuple[Any, ...]:
    """Return new fake values for the results of a region call, on storages that no other call uses."""
    values = call.meta["val"]
    mode = fake_mode_of(values)
    if mode is None:
        return tuple(values)
    memory: dict[int, torch.Tensor] = {}
    for inner, operand in argument_of.items():
        key = storage_key(inner.meta.get("val"))
        if key is not None and isinstance(operand, fx.Node):
            # A result that shares memory with an input of the region gets the storage of the call's argument.
            memory.setdefault(key, operand.meta["val"])
    own_values: list[Any] = []
    with mode, mode.shape_env.suppress_guards(), torch.no_grad():
        for node, value in zip(returned, values, strict=True):
            operand = argument_of.get(node)
            if isinstance(operand, fx.Node):
                own_values.append(operand.meta["val"])
                continue
            key = storage_key(value)
            if key is None:
                own_values.append(value)
                continue
            if key not in memory:
                # The new storage has the size of the whole old one, because other results may be
                # views of it.
                elements = value.untyped_storage().nbytes() // value.element_size()
                memory[key] = value.new_empty(elements)
            own_values.append(_viewed(memory[key], value))
    return tuple(own_values)


def _viewed(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of ``base`` with the sizes, strides, offset and dtype of the tensor ``like``."""
    same = base if base.dtype == like.dtype else base.view(like.dtype)
    return same.as_strided(like.size(), like.stride(), like.storage_offset())
