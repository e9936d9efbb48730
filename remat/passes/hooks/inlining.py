"""Rewrite forward and backward so that saved tensors pass through traced hooks.

The rewritten graphs keep AOTAutograd's calling convention. The packed tensors replace the saved tensor
among forward's outputs and backward's inputs. Symbolic sizes that the pack hook returns come after the
sizes that forward already hands over to backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import fx

from remat import torch_compat
from remat.graph.capture.fake import refresh, refresh_views
from remat.graph.joint import UNCHECKED, output_node, outputs_of
from remat.graph.memory.storages import SYMBOLIC, Sizes, fake_mode_of
from remat.graph.problems.replays import is_element
from remat.passes.hooks.tracing import Traced
from remat.passes.joint.dce import eliminate
from remat.passes.split.convention import own_descriptors, write_output


class Inlining:
    """Rewrite of two graphs that inserts traced hooks: call `add` for each saved tensor, then `finish` once.

    The operators of the pack hook are placed right after the last use of the saved tensor's memory in
    forward. The operators of the unpack hook are placed right before the first use of the tensor in
    backward. Between the last use in forward and the first use in backward, only the packed tensors are
    alive.

    Args:
        forward: the forward module, changed in place.
        backward: the backward module, changed in place.
        num_fwd_outputs: number of forward's own outputs; the saved values come after them.
    """

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
    ) -> None:
        self._forward, self._backward = forward, backward
        self._own = num_fwd_outputs
        self._outputs: list[Any] = list(output_node(forward.graph).args[0])  # type: ignore[arg-type]
        saved_values = self._outputs[num_fwd_outputs:]
        self._memory = Sizes()
        self._last_use = self._find_last_uses()
        self._tail: dict[fx.Node, fx.Node] = {}
        self._packed: dict[fx.Node, list[fx.Node]] = {}
        self._new_sizes: list[fx.Node] = []
        self._size_of = {_symbol(v): v for v in saved_values if _symbol(v) is not None}
        nodes = list(backward.graph.nodes)
        self._rank = {n: i for i, n in enumerate(nodes)}
        self._taken: dict[str, fx.Node] = {n.name: n for n in nodes if n.op == "placeholder"}
        sizes = [n for n in nodes if n.op == "placeholder" and _symbol(n) is not None]
        self._last_size = sizes[-1] if sizes else None
        self._unpacked: list[fx.Node] = []
        self._old_memory: set[int] = set()

    def _find_last_uses(self) -> dict[int, fx.Node]:
        """Find, for each storage, the last node of forward that creates, reads or views the storage."""
        last: dict[int, fx.Node] = {}
        for node in self._forward.graph.nodes:
            if node.op != "output":
                for value in (*node.all_input_nodes, node):
                    last.update(dict.fromkeys(self._memory.keys(value), node))
        return last

    def add(self, saved: fx.Node, traced: Traced) -> None:
        """Insert traced hooks for a saved tensor: pack into forward, and unpack into backward.

        Args:
            saved: the node of the tensor in forward.
            traced: the traced hooks, whose ``unpack`` is not None.
        """
        assert traced.unpack is not None
        taken = self._taken[saved.name]
        packed = self._inline_pack(saved, traced)
        given = [self._take(p, saved, taken) for p in packed]
        self._inline_unpack(taken, given, traced.unpack)
        # Forward's outputs need the order of backward's placeholders. There, `_take` inserts new
        # placeholders before the saved tensor's own placeholder.
        new = [p for p in packed if _symbol(p) is None and p is not saved]
        self._packed[saved] = [*new, *([saved] if saved in packed else [])]
        self._old_memory.update(self._memory.keys(saved))

    def _inline_pack(self, saved: fx.Node, traced: Traced) -> list[fx.Node]:
        """Insert the operators of the pack hook after the last use of a saved tensor's memory in forward."""
        (key,) = self._memory.keys(saved)
        anchor = self._last_use[key]
        last = self._tail.get(anchor, anchor)
        # No call may stand among placeholders, or between a tuple and the elements taken from it.
        while last.next.op == "placeholder" or (
            is_element(last.next) and last.next.args[0] is anchor
        ):
            last = last.next
        mark = last.next
        results = _inline(
            self._forward,
            traced.pack,
            [saved],
            before=mark,
            prefix=f"{saved.name}_pack",
            meta={**_provenance(saved), "packed_from": saved.name},
            mode=fake_mode_of(saved.meta["val"]),
        )
        packed = self._name(results, saved)
        self._tail[anchor] = mark.prev
        return packed

    def _name(self, results: Sequence[fx.Node], saved: fx.Node) -> list[fx.Node]:
        """Give the pack hook's results names that neither forward nor backward uses; return the results' nodes."""
        packed: list[fx.Node] = []
        for k, node in enumerate(results):
            symbol = _symbol(node)
            if symbol is not None and symbol in self._size_of:
                # Forward hands over this size already.
                packed.append(self._size_of[symbol])
                continue
            if node is not saved and node not in packed:
                suffix = f"_{k}" if len(results) > 1 else ""
                torch_compat.rename(node, self._unused(f"{saved.name}_packed{suffix}"))
            if symbol is not None:
                self._size_of[symbol] = node
                self._new_sizes.append(node)
            elif saved.meta.get(UNCHECKED, False):
                node.meta[UNCHECKED] = True
            packed.append(node)
        return packed

    def _unused(self, name: str) -> str:
        """Return ``name``, with a number appended if forward or backward already uses the name."""
        spaces = [torch_compat.used_names(m.graph) for m in (self._forward, self._backward)]
        candidate, count = name, 0
        while any(candidate in s for s in spaces):
            count += 1
            candidate = f"{name}x{count}"
        return candidate

    def _take(self, packed: fx.Node, saved: fx.Node, taken: fx.Node) -> fx.Node:
        """Return backward's placeholder for a value from forward; create the placeholder if missing."""
        if packed is saved:
            return taken
        placeholder = self._taken.get(packed.name)
        if placeholder is not None:
            return placeholder
        graph = self._backward.graph
        if _symbol(packed) is None:
            place = graph.inserting_before(taken)
        elif self._last_size is not None:
            place = graph.inserting_after(self._last_size)
        else:
            place = graph.inserting_before(next(iter(graph.nodes)))
        with place:
            node: fx.Node = graph.placeholder(packed.name)
        node.meta = {**_provenance(packed), "val": packed.meta["val"]}
        if packed.meta.get(UNCHECKED, False):
            node.meta[UNCHECKED] = True
        if _symbol(packed) is not None:
            self._last_size = node
        self._taken[packed.name] = node
        return node

    def _inline_unpack(
        self, taken: fx.Node, given: Sequence[fx.Node], unpack: fx.GraphModule
    ) -> None:
        """Insert the unpack hook before a saved tensor's first use in backward; all users read the unpacked tensor."""
        # `_rank` lacks the nodes of unpack functions that were inserted for earlier tensors.
        first = min((u for u in taken.users if u in self._rank), key=self._rank.__getitem__)
        users = set(taken.users)
        (value,) = _inline(
            self._backward,
            unpack,
            given,
            before=first,
            prefix=f"{taken.name}_unpack",
            meta={**_provenance(taken), "autograd_backward": True},
            mode=fake_mode_of(taken.meta["val"]),
        )
        if value.op == "call_function":
            torch_compat.rename(value, self._unused(f"{taken.name}_unpacked"))
        taken.replace_all_uses_with(value, delete_user_cb=users.__contains__)
        self._unpacked.append(value)
        if not taken.users and taken not in given:
            self._backward.graph.erase_node(taken)

    def finish(self) -> None:
        """Make forward return the packed values, and recompute outdated fake values in backward."""
        # The fake value (``meta["val"]``) of a view of an unpacked tensor is outdated: it still refers to the storage
        # of the saved tensor that was replaced.
        out = output_node(self._forward.graph)
        saved_values = self._outputs[self._own :]
        values = [p for v in saved_values for p in self._packed.get(v, [v])] + self._new_sizes
        values = list(dict.fromkeys(values))
        own = own_descriptors(out, self._own)
        write_output(out, [*self._outputs[: self._own], *values], own)
        eliminate(self._forward.graph)  # copies that only compute a size handed over already
        refresh_views(self._backward.graph, self._unpacked, self._old_memory)


def _inline(
    graph_module: fx.GraphModule,
    body: fx.GraphModule,
    given: Sequence[fx.Node],
    *,
    before: fx.Node,
    prefix: str,
    meta: dict[str, Any],
    mode: Any,
) -> list[fx.Node]:
    """Copy the nodes of a traced function into a graph, and compute the copies' fake values."""
    graph, out = graph_module.graph, output_node(body.graph)
    env = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    for node in body.graph.nodes:
        if node in env or node is out:
            continue
        with graph.inserting_before(before):
            copied = env[node] = graph.node_copy(node, env.__getitem__)
        torch_compat.rename(copied, f"{prefix}_{node.name}")
        copied.meta = dict(meta)
        if node.op == "get_attr":
            copied.target = copied.name  # unique in this module, unlike the name in the hooks
            setattr(graph_module, copied.name, getattr(body, str(node.target)))
            copied.meta["val"] = node.meta.get("val")
        else:
            refresh(copied, mode or contextlib.nullcontext())
    return [env[r] for r in outputs_of(body.graph)]


def _symbol(node: fx.Node) -> str | None:
    """Return the text of a node's value if the value is a number or a symbolic size; None for any other value."""
    value = node.meta.get("val")
    if isinstance(value, SYMBOLIC):
        return str(value.node.expr)
    return repr(value) if isinstance(value, (int, float)) else None


def _provenance(node: fx.Node) -> dict[str, Any]:
    """Return the metadata that says where in the user's code a node comes from."""
    return {k: node.meta[k] for k in ("stack_trace", "nn_module_stack") if k in node.meta}
