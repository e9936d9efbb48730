"""Find tensors that the user may overwrite before backward, and protect backward from such writes.

Users overwrite, for example, a loader's pinned buffer or a step's logits. Eager PyTorch allows
writes to tensors that autograd has not saved, and raises for writes to saved tensors. The joint
graph shows which tensors eager autograd saves: the forward values that nodes traced in backward
read.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
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
    Role,
    is_input_mutation,
    output_node,
    outputs_of,
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
    candidates = [n for n in inputs if role_of(n) is Role.PRIMAL and n not in static]
    candidates = [n for n in candidates if _is_user_mutable(n)]
    root = _Roots(joint)
    given_back = [o for o in split_outputs(joint)[1] if isinstance(o, fx.Node)]
    saved = _saved_by_autograd(joint, root, candidates)
    saved |= {n for n in candidates if not root.views_of(n).isdisjoint(given_back)}
    return frozenset(n.name for n in candidates if n not in saved)


def copy_outputs(joint: JointGraph, places: Collection[int] | None = None) -> None:
    """Make a joint graph return copies of those user outputs that backward might read.

    The user may overwrite the returned copies before backward reads the originals. Outputs that
    share memory with an input are not copied, nor are outputs whose memory no other node reads.

    Args:
        joint: the joint graph, which is changed.
        places: indices of the user's outputs to copy. Other outputs that share memory with one of
            these are copied too. None: copy all outputs that eager autograd does not save.
    """
    root = _Roots(joint)
    position = {n: i for i, n in enumerate(joint.graph.nodes)}
    outputs = _copyable_outputs(joint, root)
    saved = _saved_by_autograd(joint, root, outputs) if places is None else set()
    of_root = {
        base: [value for value, _ in of_base]
        for base, of_base in outputs.items()
        if base not in saved
        and (places is None or any(_user_index(desc) in places for _, desc in of_base))
        and root.is_read(base)
    }
    copies: dict[fx.Node, fx.Node] = {}
    for base, values in of_root.items():
        # If several outputs share memory, their copies share memory too.
        source = values[0] if len({*values}) == 1 else base
        views = {n for v in values for n in root.views(v, source)}
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
    of_base = _copyable_outputs(joint, _Roots(joint))
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
    """Return an output's index among the user's outputs, from its descriptor; None if the user does not see it."""
    return desc.idx if isinstance(desc, torch_compat.descriptors.PlainAOTOutput) else None


def _copyable_outputs(joint: JointGraph, root: _Roots) -> dict[fx.Node, list[tuple[fx.Node, Any]]]:
    """Return forward's outputs outside of inputs' memory, in a dict by the node that owns an output's memory."""
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


class _Roots(dict[fx.Node, fx.Node]):
    """Map from each node to the node that owns the memory of its result, computed on first access.

    A node that is not a view maps to itself.
    """

    def __init__(self, joint: JointGraph) -> None:
        super().__init__()
        self._sizes = Sizes(joint.memories)

    def __missing__(self, node: fx.Node) -> fx.Node:
        views: list[fx.Node] = []
        base = node
        while base not in self:
            viewed = self._base(base)
            if viewed is None:
                self[base] = base
            else:
                views.append(base)
                base = viewed
        self.update(dict.fromkeys(views, self[base]))
        return self[base]

    def _base(self, node: fx.Node) -> fx.Node | None:
        """Return the argument of which a call's result is a view; None if the result is no view."""
        return aliased_argument(node) or _hidden_base(node, self._sizes)

    def views(self, node: fx.Node, base: fx.Node) -> Iterator[fx.Node]:
        """Yield the chain of views that leads from ``node`` to ``base``."""
        while node is not base:
            yield node
            viewed = self._base(node)
            assert viewed is not None
            node = viewed

    def views_of(self, base: fx.Node) -> set[fx.Node]:
        """Return ``base`` and all its views, including views of views."""
        # `views` grows while the loop runs, so views of views are visited too.
        views = [base]
        for viewed in views:
            views += [u for u in viewed.users if self._base(u) is viewed]
        return {*views}

    def is_read(self, base: fx.Node) -> bool:
        """Return whether a node that is not a view of ``base`` reads the memory of ``base``."""
        # `stack` grows while the loop runs, so views of views are visited too.
        stack = [base]
        for viewed in stack:
            for user in viewed.users:
                if user.op != "output":
                    if self[user] is not base:
                        return True
                    stack.append(user)
        return False


def _hidden_base(node: fx.Node, sizes: Sizes) -> fx.Node | None:
    """Return the argument that shares memory with a call's result, according to the fake values."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        maker: Any = node.args[0]
        return maker if _hidden_base(maker, sizes) is not None else None
    # Fake values also show views that the operator's schema does not declare.
    own_keys = {*sizes.keys(node)}
    return next(
        (n for n in node.all_input_nodes if own_keys and own_keys == {*sizes.keys(n)}), None
    )


def _saved_by_autograd(joint: JointGraph, root: _Roots, owners: Iterable[fx.Node]) -> set[fx.Node]:
    """Return those of the nodes ``owners`` whose memory eager autograd saves for backward."""
    in_backward: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            if role_of(node).in_backward:
                in_backward.add(node)
        elif node.op != "output" and (
            belongs_to_backward(node) or not in_backward.isdisjoint(inputs_of(node))
        ):
            in_backward.add(node)
    # An operator such as `sym_size` reads a size, not memory.
    return {
        owner
        for owner in owners
        for view in root.views_of(owner) - in_backward
        if any(
            u in in_backward and not ops.name_of(u.target).startswith("sym_") for u in view.users
        )
    }


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
