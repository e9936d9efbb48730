"""Find tensors that the user may overwrite before backward, and protect backward from such writes.

Users overwrite, for example, a loader's pinned buffer or a step's logits. Eager PyTorch allows writes to tensors that
autograd has not saved, and raises for writes to saved tensors. The joint graph shows which tensors eager autograd
saves: forward values that are read by nodes of backward.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.capture.fake import cloned, refresh
from remat.graph.capture.source import source_line
from remat.graph.index import inputs_of
from remat.graph.joint import (
    JointGraph,
    is_input_mutation,
    output_node,
    outputs_of,
    primals_of,
    role_of,
    split_outputs,
)
from remat.graph.memory.storages import Sizes, storage_key, type_text
from remat.graph.memory.writes import aliased_argument
from remat.graph.roles import belongs_to_backward


def user_mutable_inputs(joint: JointGraph) -> frozenset[str]:
    """Return the names of the inputs that the user may overwrite between forward and backward.

    The result excludes parameters, buffers, inputs that eager autograd saves for backward, and
    inputs that backward returns, directly or as a view.

    Args:
        joint: the joint graph as traced. A graph whose equal nodes are merged no longer shows which
            node read an input.
    """
    inputs = joint.graph.find_nodes(op="placeholder")
    static = {inputs[k] for k in joint.static_inputs if k < len(inputs)}
    candidates = [n for n in primals_of(joint) if n not in static and _is_user_mutable(n)]
    _, root = _views(joint)
    saved = _saved_by_autograd(joint, root)
    saved |= {root[o] for o in split_outputs(joint)[1] if isinstance(o, fx.Node)}
    return frozenset(n.name for n in candidates if n not in saved)


def copy_outputs(joint: JointGraph, places: Collection[int] | None = None) -> None:
    """Make a joint graph return copies of those user outputs that backward might read.

    The user may overwrite the returned copies before backward reads the originals. An output is not copied if it
    shares memory with an input, or if no other node reads its memory.

    Args:
        joint: the joint graph, which is changed.
        places: indices of the user's outputs to copy. Other outputs that share memory with one of
            these are copied too. None: copy all outputs that eager autograd does not save.
    """
    viewed, root = _views(joint)
    position = {n: i for i, n in enumerate(joint.graph.nodes)}
    # Nodes whose memory is read by a node that is not a view of it.
    read = {
        root[n]
        for node in joint.graph.nodes
        if node.op != "output"
        for n in inputs_of(node)
        if root[n] is not root[node]
    }
    if places is None:
        read -= _saved_by_autograd(joint, root)
    of_root = {
        base: [value for value, _ in of_base]
        for base, of_base in _copyable_outputs(joint, root).items()
        if base in read
        and (places is None or any(_user_index(desc) in places for _, desc in of_base))
    }
    copies: dict[fx.Node, fx.Node] = {}
    for base, values in of_root.items():
        # If several outputs share memory, their copies share memory too.
        source = values[0] if len({*values}) == 1 else base
        views: set[fx.Node] = set()
        for view in values:
            while view is not source:
                views.add(view)
                view = viewed[view]
        last = max((source, *values), key=position.__getitem__)
        with joint.graph.inserting_after(last):
            # A plan on disk may name the copy, so its name must not depend on other nodes of the graph.
            last = joint.graph.create_node(
                "call_function",
                torch.ops.aten.clone.default,
                (source,),
                name=f"{source.name}_returned",
            )
        last.meta["val"] = cloned(source.meta["val"])
        copies[source] = last
        # Sorted, because a set has no fixed order and a view must follow its base.
        for view in sorted(views, key=position.__getitem__):
            with joint.graph.inserting_after(last):
                last = joint.graph.node_copy(view, lambda n: copies.get(n, n))
            copies[view] = last
            refresh(last)
    out = output_node(joint.graph)
    n, values = joint.num_fwd_outputs, outputs_of(joint.graph)
    returned = [copies.get(v, v) if isinstance(v, fx.Node) else v for v in values[:n]]
    out.args = ((*returned, *values[n:]),)


def unversioned_outputs(joint: JointGraph) -> tuple[int, ...]:
    """Return the indices of user outputs that autograd cannot protect from writes before backward.

    Unprotected outputs come from AOTAutograd, from Inductor, and from operators such as ``_unsafe_view``,
    which PyTorch 2.15 traces in a linear layer.
    """
    of_base = _copyable_outputs(joint, _views(joint)[1])
    views = (
        _user_index(desc)
        for base, outputs in of_base.items()
        # Autograd compares version counters. An output that only shares memory with a saved tensor may have a
        # counter of its own, so autograd misses writes that it detects in eager PyTorch.
        if any(value is not base for value, _ in outputs)
        for _, desc in outputs
    )
    return tuple(sorted(place for place in views if place is not None))


def reread_outputs(joint: JointGraph, saved_values: Iterable[Any]) -> tuple[int, ...]:
    """Return the indices of the user's outputs that share memory with a saved value, but not with an input."""
    inputs = {storage_key(p.meta.get("val")) for p in joint.graph.find_nodes(op="placeholder")}
    memories = {storage_key(n.meta.get("val")) for n in saved_values if isinstance(n, fx.Node)}
    memories -= inputs | {None}
    outputs, _, descs, _ = split_outputs(joint)
    return tuple(
        place
        for value, desc in zip(outputs, descs, strict=True)
        if (place := _user_index(desc)) is not None
        and isinstance(value, fx.Node)
        and storage_key(value.meta.get("val")) in memories
    )


def _user_index(desc: Any) -> int | None:
    """Return the index among the user's outputs that a descriptor states; None for an output that is not the user's."""
    return desc.idx if isinstance(desc, torch_compat.descriptors.PlainAOTOutput) else None


def _copyable_outputs(
    joint: JointGraph, root: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, list[tuple[fx.Node, Any]]]:
    """Return forward's outputs that share no memory with inputs, grouped by the node that owns an output's memory."""
    memories = {storage_key(n.meta.get("val")) for n in joint.graph.find_nodes(op="placeholder")}
    outputs, _, descs, _ = split_outputs(joint)
    of_root: dict[fx.Node, list[tuple[fx.Node, Any]]] = {}
    for value, desc in zip(outputs, descs, strict=True):
        if not isinstance(value, fx.Node) or is_input_mutation(desc):
            continue
        base = root[value]
        fake = value.meta.get("val")
        is_computed = base.op == "call_function" and storage_key(fake) not in memories
        if is_computed and isinstance(fake, torch.Tensor):
            of_root.setdefault(base, []).append((value, desc))
    return of_root


def _views(joint: JointGraph) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """Return two dicts by node: one of the arguments that views show, one of the owners of the nodes' memory."""
    sizes = Sizes(joint.memories)
    viewed: dict[fx.Node, fx.Node] = {}
    root: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        base: Any = None
        if node.target is operator.getitem:
            # An element of a list of views is a view of the list.
            base = node.args[0] if node.args[0] in viewed else None
        elif node.op == "call_function":
            # Fake values also show views that the operator's schema does not declare.
            base = aliased_argument(node) or _sharing_argument(node, sizes)
        root[node] = node if base is None else root[base]
        if base is not None:
            viewed[node] = base
    return viewed, root


def _sharing_argument(node: fx.Node, sizes: Sizes) -> fx.Node | None:
    """Return the argument that shares memory with a call's result, according to the fake values."""
    own_keys = {*sizes.keys(node)}
    return next((n for n in inputs_of(node) if own_keys and own_keys == {*sizes.keys(n)}), None)


def _saved_by_autograd(joint: JointGraph, root: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the nodes of forward whose memory eager autograd saves for backward."""
    in_backward: set[fx.Node] = set()
    saved: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            if role_of(node).in_backward:
                in_backward.add(node)
        elif node.op != "output" and (
            belongs_to_backward(node) or not in_backward.isdisjoint(inputs_of(node))
        ):
            in_backward.add(node)
            # An operator such as `sym_size` reads a size, not memory.
            if not ops.name_of(node.target).startswith("sym_"):
                saved.update(root[n] for n in inputs_of(node) if n not in in_backward)
    return saved


def describe_input(graph: fx.Graph, name: str) -> str:
    """Describe an input for a message: its name, dtype, shape and the user's line that reads it."""
    for node in graph.find_nodes(op="placeholder"):
        if node.name == name:
            line = next(filter(None, map(source_line, node.users)), "")
            return f"{name}  {type_text(node.meta['val'])}" + (f"  read at {line}" if line else "")
    return name


def _is_user_mutable(node: fx.Node) -> bool:
    """Return whether an input is a tensor other than a parameter or buffer."""
    desc = node.meta.get("desc")
    owned = desc is not None and (desc.is_param() or desc.is_buffer())
    return not owned and isinstance(node.meta.get("val"), torch.Tensor)
