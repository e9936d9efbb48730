"""Backward in the order of the autograd engine (SPEC A11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from remat.graph import ops
from remat.graph.joint import Role, role_of
from remat.graph.storages import storage_key
from remat.passes.base import Pass, PassResult, Stage, State


@dataclass(frozen=True)
class ReorderBackward(Pass):
    """Moves recomputed operators to where backward first needs them, so that they live shortly.

    Starting from the first user of a tangent, backward's operators keep their order; whatever else
    they need is pulled in just before. What reads memory that backward overwrites stays before the
    overwriting. Nodes are moved, not copied.
    """

    name: ClassVar[str] = "reorder-backward"
    stage: ClassVar[Stage] = Stage.SPLIT
    summary: ClassVar[str] = "recompute just before use, in the order of the autograd engine"

    def run(self, state: State) -> PassResult:
        if state.backward is None:
            return PassResult(state=state, modified=False, detail="not partitioned")
        moved = reorder(state.backward.graph)
        return PassResult(state=state, modified=moved > 0, detail=f"{moved} nodes moved")


def reorder(graph: fx.Graph) -> int:
    """Reorders a backward graph in place and returns how many nodes changed their place."""
    nodes = [n for n in graph.nodes if n.op != "output"]
    rank = {n: i for i, n in enumerate(nodes)}
    placeholders = [n for n in nodes if n.op == "placeholder"]
    users = [
        rank[u] for n in placeholders if role_of(n) is Role.TANGENT for u in n.users if u in rank
    ]
    if not users:
        return 0
    placed = dict.fromkeys(placeholders)

    def place(node: fx.Node) -> None:
        """Places a node after everything it needs that is not placed yet, in the old order."""
        missing: set[fx.Node] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            if n not in placed and n not in missing:
                missing.add(n)
                stack.extend(n.all_input_nodes)
        for n in sorted(missing, key=rank.__getitem__):
            placed[n] = None

    readers = _readers_of_overwritten(nodes)
    start = min(users)
    for node in nodes[:start]:
        if node.op == "call_function" and (ops.is_effectful(node) or ops.is_random(node)):
            for earlier in readers.get(node, ()):
                place(earlier)
            place(node)
    for node in nodes[start:]:
        for earlier in readers.get(node, ()):
            place(earlier)
        place(node)
    for node in nodes:  # what only the outputs read
        place(node)
    order = list(placed)
    moved = sum(a is not b for a, b in zip(order, nodes, strict=True))
    if moved:
        anchor = order[0]
        for node in order[1:]:
            anchor.append(node)
            anchor = node
    return moved


def _readers_of_overwritten(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each mutating node, the earlier nodes that read the memory it overwrites."""
    found: dict[fx.Node, list[fx.Node]] = {}
    reads: dict[int | None, list[fx.Node]] = {}
    mutating = [n for n in nodes if ops.is_mutating(n)]
    if not mutating:
        return found
    for node in nodes:
        if node in mutating and node.args and isinstance(node.args[0], fx.Node):
            found[node] = list(reads.get(storage_key(node.args[0].meta.get("val")), ()))
        for read in node.all_input_nodes:
            reads.setdefault(storage_key(read.meta.get("val")), []).append(node)
    return found
