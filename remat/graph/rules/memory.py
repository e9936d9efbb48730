"""Rules for forward and backward graphs on checkpoint tags, the budget, overwritten values and fake values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.graph import ops
from remat.graph.index import inputs_of
from remat.graph.joint import outputs_of, overwritten_after
from remat.graph.memory.liveness import saved_storages
from remat.graph.memory.storages import Memories, Sizes, storage_key
from remat.graph.memory.writes import aliased_argument, is_destination, root_of, written_by
from remat.graph.problems.lowering import must_save, tag_of
from remat.graph.problems.replays import Replays
from remat.graph.rules.facts import Facts, Fault, called


def tags_hold(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each node that is saved or recomputed against its checkpoint tag."""
    tags = {name: tag for name, n in facts.joint.items() if (tag := n.meta.get("recompute"))}
    if not tags:
        return
    replays = Replays(facts.special[0])
    for node in facts.split_nodes[1]:
        if (
            node.name in tags
            and must_save(facts.joint[node.name])
            # MUST_SAVE forbids only a second run; a node that forward does not run may run in backward.
            and node.name in facts.calls
            and node.op == "call_function"
            and not _is_view(node)
            and isinstance(node.meta.get("val"), torch.Tensor)
        ):
            yield Fault(
                f"'{node.name}' is tagged {tag_of(facts.joint[node.name])} and recomputed", (node,)
            )
    for node in facts.saved_for_backward:
        if (
            tags.get(node.name) is CheckpointPolicy.MUST_RECOMPUTE
            and isinstance(node.meta.get("val"), torch.Tensor)
            and not replays.forbid(facts.joint[node.name])
        ):
            yield Fault(
                f"'{node.name}' is tagged {tag_of(facts.joint[node.name])} and saved", (node,)
            )


def _is_view(node: fx.Node) -> bool:
    """Return whether a node is a view; a MUST_SAVE tag on a view only asks that the view's storage be saved."""
    if ops.default_taxonomy().is_view(node) or aliased_argument(node) is not None:
        return True
    # Some operators, such as `_unsafe_view`, return an alias that their schema does not declare.
    key = None if ops.is_mutating(node) else storage_key(node.meta.get("val"))
    return key is not None and any(
        storage_key(n.meta.get("val")) == key for n in node.all_input_nodes
    )


def values_are_known(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each call or placeholder without a fake value, unless its joint-graph node has none either."""
    for node in (*facts.split_nodes[0], *facts.split_nodes[1]):
        if node.op in ("call_function", "placeholder") and "val" not in node.meta:
            source = facts.joint.get(node.name)
            if source is None or "val" in source.meta:
                yield Fault(f"'{node.name}' has lost its fake value", (node,))


def the_budget_holds(facts: Facts) -> Iterator[Fault]:
    """Yield a fault if forward saves more bytes for backward than the limit on saved bytes allows."""
    split, capacity = facts.split, facts.split.capacity
    if capacity is None:
        return
    saved = saved_storages(
        split.forward, split.joint.num_fwd_outputs, count_outputs=split.count_outputs
    )
    total = sum(saved.values())
    if total > capacity:
        owners = Sizes().first_of(facts.saved_for_backward)
        largest = sorted(saved, key=lambda key: -saved[key])[:3]
        text = f"{total} bytes are saved, {capacity} allowed"
        yield Fault(text, tuple(owners[key] for key in largest))


def saved_values_share_no_memory(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each saved value that shares memory with another saved value."""
    keys = Memories()
    safe = (*facts.placeholders[1], *facts.returned[0], *outputs_of(facts.split.backward.graph))
    others = {keys.key(n.meta.get("val")): n for n in safe if isinstance(n, fx.Node)}
    first: dict[int, fx.Node] = {}
    for node in facts.saved_for_backward:
        key = keys.key(node.meta.get("val"))
        # AOTAutograd lets nothing be overwritten in graphs with `set_`.
        if key is None or key in others or node.name not in facts.joint or ops.is_mutating(node):
            continue
        # AOTAutograd lets Inductor's backward overwrite a saved value in place, without comparing saved values with
        # each other.
        first_node = first.setdefault(key, node)
        if first_node is not node:
            text = f"'{node.name}' and '{first_node.name}' are in the same memory, which backward may overwrite"
            yield Fault(text, (node, first_node))


def nothing_overwritten_is_read(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each node that, because of a write, reads other contents than the node in the joint graph."""
    key = _memory(facts)
    writes = [
        {n: {key(w) for w in written_by(n)} for n in nodes if ops.is_mutating(n)}
        for nodes in facts.special[1:]
    ]
    overwritten = {k: n for n, keys in writes[0].items() for k in keys}
    overwritten |= {key(n): n for n in overwritten_after(facts.split.joint, facts.split_nodes[0])}
    if overwritten:
        last = _last_writes(facts, writes[0])
        for node in facts.split_nodes[1]:
            if node.op != "call_function" or ops.ignores_content(node):
                continue
            for read in inputs_of(node):
                k = key(read)
                if k not in overwritten or is_destination(read, node):
                    continue
                is_handed = root_of(read).op == "placeholder"
                if is_handed and _is_behind(facts, node, last.get(k, len(facts.joint))):
                    continue  # in the joint graph, too, the node reads the value after the write
                text = f"{called(node)} reads '{read.name}', which forward has overwritten"
                yield Fault(text, (node, overwritten[k]))
    for nodes, written in zip(facts.split_nodes, writes, strict=True):
        if written:
            yield from _reordered(facts, nodes, written, key)


def _is_behind(facts: Facts, node: fx.Node, write: int) -> bool:
    """Return whether, in the joint graph, a node of forward or backward comes after a write."""
    if node.op != "call_function":
        return False
    if facts.position.get(node.name, -1) > write:
        return True
    # A view counts as after the write if all its readers do.
    return aliased_argument(node) is not None and all(
        _is_behind(facts, u, write) for u in node.users
    )


def _last_writes(facts: Facts, writes: Mapping[fx.Node, set[Any]]) -> dict[Any, int]:
    """Return the joint-graph position of forward's last write to each memory, by memory key."""
    last: dict[Any, int] = {}
    for node, keys in writes.items():
        for k in keys:
            last[k] = max(last.get(k, -1), facts.position.get(node.name, len(facts.position)))
    return last


def nothing_user_mutated_is_read(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each node of backward that reads an input that the user may have overwritten."""
    user_mutated = facts.split.user_mutated
    if not user_mutated:
        return
    key = _memory(facts)
    written = {key(n): n for n in facts.placeholders[0] if n.name in user_mutated}
    for node in facts.split_nodes[1]:
        for read in inputs_of(node) if node.op == "call_function" else ():
            if key(read) in written and not is_destination(read, node):
                yield Fault(f"{called(node)} reads '{read.name}'", (node, written[key(read)]))


def _memory(facts: Facts) -> Callable[[fx.Node], Any]:
    """Return a function that maps a node to a key of the memory behind its value."""
    storage = Memories().key
    keys = [storage(n.meta.get("val")) for n in facts.placeholders[0]]
    shared = {k for k in keys if keys.count(k) > 1} if len(set(keys)) < len(keys) else set()

    def memory(node: fx.Node) -> Any:
        key = storage(node.meta.get("val"))
        # Distinct inputs on one storage do not overlap, because AOTAutograd merges overlapping inputs.
        if key in shared:
            return root_of(node).name
        return node if key is None else key

    return memory


def _reordered(
    facts: Facts, nodes: list[fx.Node], written: dict[fx.Node, set[Any]], key: Any
) -> Iterator[Fault]:
    """Yield a fault for each read and write of the same memory that run in the opposite order in the joint graph."""
    place_of = {n: i for i, n in enumerate(nodes)}
    touched = {k for keys in written.values() for k in keys}
    for node in nodes:
        read_position = facts.position.get(node.name)
        if node.name.removesuffix("_snapshot") != node.name:
            read_position = -1  # a snapshot copies an input, and must come before all writes
        if node.op != "call_function" or read_position is None:
            continue
        for read in inputs_of(node):
            memory = key(read)
            if memory not in touched:
                continue
            for write, keys in written.items():
                write_position = facts.position.get(write.name)
                if write_position is None or write is node or memory not in keys:
                    continue
                if (read_position < write_position) != (place_of[node] < place_of[write]):
                    side = "behind" if read_position < write_position else "before"
                    text = f"{called(node)} reads '{read.name}' {side} {called(write)}"
                    yield Fault(text, (node, write))
