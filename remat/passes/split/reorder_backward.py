"""Pass that orders the nodes of the backward graph as PyTorch's autograd engine would run them.

The pass follows ``reordering_to_mimic_autograd_engine`` in PyTorch's
``torch/_functorch/partitioners.py``. One difference: PyTorch copies nodes into a new graph, and this
pass moves nodes within the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from remat.graph import ops
from remat.graph.index import are_plain, inputs_of
from remat.graph.joint import Role, role_of
from remat.graph.memory.storages import Memories
from remat.graph.memory.writes import written_by
from remat.graph.roles import must_be_in_backward
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State


@dataclass(frozen=True)
class ReorderBackward(Pass):
    """Move recomputed operators to right before their first use in backward, to shorten the values' lifetimes.

    From the first user of a tangent on, backward's operators keep their order. Among the nodes before the first user of
    a tangent, nodes with effects come first. Before the first user of a tangent, every node without effects moves to
    right before the first operator that needs the node's result. A node that reads memory stays before a later write to
    the same memory. The pass does nothing if the decision has node orders.
    """

    name: ClassVar[str] = "reorder-backward"
    stage: ClassVar[Stage] = Stage.SPLIT

    def run(self, state: State) -> PassResult:
        if state.backward is None:
            return PassResult(state=state, modified=False, detail="not partitioned")
        if state.decision is not None and state.decision.is_ordered:
            return PassResult(state=state, modified=False, detail="the decision has an order")
        with state.edit() as edit:
            moved = reorder(state.backward.graph)
            return edit.result(f"{moved} nodes moved", moved=moved)


def reorder(graph: fx.Graph) -> int:
    """Reorder a backward graph in place, and return the number of nodes whose position changed."""
    nodes = [n for n in graph.nodes if n.op != "output"]
    placeholders = graph.find_nodes(op="placeholder")
    rank = dict(zip(nodes, range(len(nodes)), strict=True))
    late = [u for n in placeholders if role_of(n) is Role.TANGENT for u in n.users if u in rank]
    late += filter(must_be_in_backward, nodes)
    if not late:
        return 0
    plain = are_plain(nodes)
    before = _ordered_by_memory(nodes, plain)
    placed = dict.fromkeys(placeholders)

    def place(node: fx.Node) -> None:
        """Append nodes that must precede ``node``, in their old order, and then ``node``, to the new order."""
        missing: set[fx.Node] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            if n not in placed and n not in missing:
                missing.add(n)
                stack.extend(inputs_of(n))
                stack.extend(before.get(n, ()))
        for n in sorted(missing, key=rank.__getitem__):
            placed[n] = None

    def place_behind(node: fx.Node) -> None:
        """Append nodes that must precede ``node`` because of shared memory, and then ``node``, to the new order."""
        for earlier in before.get(node, ()):
            place(earlier)
        place(node)

    start = min(map(rank.__getitem__, late))
    # A node with an effect may have no reader before which it could be placed, so it is placed here. PyTorch
    # does this only for `copy_`.
    for node, harmless in zip(nodes[:start], plain, strict=False):
        if not harmless and ops.may_have_effects(node):
            place_behind(node)
    for node in nodes[start:]:
        if node in before or not all(map(placed.__contains__, inputs_of(node))):
            place_behind(node)
        placed[node] = None
    placed.update(dict.fromkeys(nodes))  # nodes that only the outputs read
    order = list(placed)
    moved = sum(a is not b for a, b in zip(order, nodes, strict=True))
    anchor = order[0]
    for node in order[1:] if moved else ():
        if anchor.next is not node:
            anchor.append(node)
        anchor = node
    return moved


def _ordered_by_memory(nodes: list[fx.Node], plain: Sequence[bool]) -> dict[fx.Node, list[fx.Node]]:
    """Return a dict from each node to the earlier nodes that must precede it because they share written memory."""
    written = {n: written_by(n) for n, harmless in zip(nodes, plain, strict=True) if not harmless}
    if not any(written.values()):
        return {}
    key = Memories().key
    touched = {key(d.meta.get("val")) for ds in written.values() for d in ds}
    must_follow: dict[fx.Node, list[fx.Node]] = {}
    users: dict[int | None, list[fx.Node]] = {k: [] for k in touched}
    writers: dict[int | None, list[fx.Node]] = {k: [] for k in touched}
    for node in nodes:
        read = {k: None for n in inputs_of(node) if (k := key(n.meta.get("val"))) in touched}
        memories = [key(d.meta.get("val")) for d in written.get(node, ())]
        # A write follows earlier reads and writes of its memory, and a read follows earlier writes.
        earlier = [n for k in memories for n in users[k]]
        earlier += [n for k in read for n in writers[k]]
        if earlier:
            must_follow[node] = list(dict.fromkeys(earlier))
        for k in read:
            users[k].append(node)
        for k in memories:
            writers[k].append(node)
    return must_follow
