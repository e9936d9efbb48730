"""Find the nodes that the minimum cut may not recompute.

The heuristics that ban nodes from recomputation are those of ``solve_min_cut`` in PyTorch's
``torch/_functorch/partitioners.py``. In this module, a position is the index of a node in the joint
graph.
"""

from __future__ import annotations

import heapq

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.graph import ops
from remat.graph.fusion import absorbed_inputs
from remat.graph.memory.storages import tensor_bytes
from remat.graph.memory.writes import by_target
from remat.graph.problems.lowering import SavedKind, must_recompute, must_save
from remat.passes.core.provenance import BanRules
from remat.passes.core.state import Distances, State

#: Length up to which a chain of fusible nodes may be recomputed: the largest distance between the
#: ranks of the chain's two ends in forward's order. PyTorch calls 100 an arbitrary choice.
LONG_CHAIN = 100


class Fusion:
    """Model of a fusing compiler such as Inductor: which nodes can be computed in one kernel.

    A call ``fusion(a, b)`` tells whether the node at position ``a`` and its user at position ``b``
    fuse. Each attribute of `Fusion` is a bytearray with one entry per position, 1 for True.

    Attributes:
        view: whether the node is a view.
        computes: whether the node calls an operator other than ``getitem``.
        unlisted: whether the operator is not in the list of operators that are cheap to recompute.
        expensive: whether the operator is compute-intensive (a matrix product or a convolution) or
            random.
        fusible: whether the node fuses with any neighbour that is fusible too.
    """

    def __init__(self, state: State) -> None:
        self._index = index = state.index
        n = len(index)
        self.view, self.computes, self.unlisted = bytearray(n), bytearray(n), bytearray(n)
        self.expensive, self.fusible = bytearray(n), bytearray(n)
        self._absorbed: dict[int, frozenset[int]] = {}
        self._nbytes: dict[fx.Node, int] = {}
        for i, (node, properties) in enumerate(
            zip(index.nodes, by_target(index.nodes, _looked_up), strict=True)
        ):
            self.view[i], self.computes[i], cheap, self.expensive[i] = properties
            self.unlisted[i], self.fusible[i] = not cheap, cheap
            if not index.plain[i] and ops.is_random(node):
                self.expensive[i] = self.fusible[i] = 1
            if absorbed := absorbed_inputs(node):
                self._absorbed[i] = frozenset(index.position[x] for x in absorbed)

    def __call__(self, a: int, b: int) -> bool:
        """Return whether one kernel can compute the node at position ``a`` and its user at position ``b``."""
        if self.fusible[a] and self.fusible[b]:
            return True
        return a in self._absorbed.get(b, ())

    def is_reduction(self, node: fx.Node) -> bool:
        """Return whether a node counts as a reduction: its result has less than a quarter of its inputs' bytes."""
        read = sum([self._bytes(a) for a in node.args if isinstance(a, fx.Node)])
        # Saving such a small result costs little. A quarter is PyTorch's arbitrary choice.
        return self._bytes(node) * 4 < read

    def _bytes(self, node: fx.Node) -> int:
        nbytes = self._nbytes.get(node)
        if nbytes is None:
            nbytes = self._nbytes[node] = tensor_bytes(node.meta.get("val"))
        return nbytes

    def is_materialized(self, i: int) -> bool:
        """Return whether the value at position ``i`` is written to memory even if it is not saved."""
        # True for an input of the graph, and for a value with at least one user that does not fuse with it.
        if self._index.nodes[i].op == "placeholder":
            return True
        return not all(self(i, u) for u in self._index.users[i])


def _looked_up(node: fx.Node) -> tuple[bool, ...]:
    """Return four bools: whether a node is a view, computes a value, may run again, and is compute-intensive."""
    taxonomy = ops.default_taxonomy()
    return (
        taxonomy.is_view(node),
        node.op == "call_function" and getattr(node.target, "__name__", "") != "getitem",
        taxonomy.is_recomputable(node),
        taxonomy.is_compute_intensive(node),
    )


def banned(state: State, rules: BanRules, fusion: Fusion) -> bytearray:
    """Return a bytearray with 1 at the position of each node that the ban rules keep from being recomputed.

    Views, aliases, nodes that forward does not require, and nodes tagged for recomputation are never banned from
    recomputation. All operators tagged MUST_SAVE, PREFER_SAVE or for offloading are banned under any rules, except
    ``getitem`` and the nodes that are never banned.

    Args:
        state: the state with the joint graph.
        rules: the heuristics to apply.
        fusion: tells whether two nodes fuse.
    """
    index, required, owner = state.index, state.roles.required_forward, state.storages.owner
    ban, may_ban = bytearray(len(index)), bytearray(len(index))
    written = bytearray(len(index))
    if rules.ban_materialized_backward:
        written = _materialized_in_backward(state, fusion)
    unwanted = fusion.unlisted if rules.ban_not_in_allowlist else fusion.expensive
    for i, node in enumerate(index.nodes):
        if not required[i] or fusion.view[i] or owner[i] != i:
            continue
        tag = node.meta.get("recompute")
        if tag is not None and must_recompute(node):
            continue
        may_ban[i] = 1
        if not fusion.computes[i]:
            continue
        if tag is not None and (must_save(node) or tag is CheckpointPolicy.PREFER_SAVE):
            ban[i] = 1
        elif isinstance(index.values[i], (torch.Tensor, tuple, list)):
            ban[i] = (
                unwanted[i] or written[i] or (rules.ban_reductions and fusion.is_reduction(node))
            )
    if rules.ban_used_far_apart:
        for i in _used_far_apart(state, fusion, ban):
            ban[i] |= may_ban[i]
    if rules.ban_long_fusible_chains:
        for i in _long_chains(state, fusion, ban):
            ban[i] |= may_ban[i]
    return ban


def _materialized_in_backward(state: State, fusion: Fusion) -> bytearray:
    """Find the values that some node of backward reads, directly or through views, without fusing with them."""
    index, required = state.index, state.roles.required_forward
    view = fusion.view
    # Backward writes a recomputed value to memory unless its reader fuses with it, so recomputing is not free.
    read = bytearray(len(index))
    for i in range(len(index) - 1, -1, -1):
        if not required[i] and not view[i]:
            continue
        for u in index.users[i]:
            if (read[u] and view[u]) or not (required[u] or fusion(i, u)):
                read[i] = 1
                break
    return read


def _used_far_apart(state: State, fusion: Fusion, ban: bytearray) -> list[int]:
    """Return the positions of users that fuse with a value, but run in forward long after the value's other users."""
    index, roles = state.index, state.roles
    order = roles.forward_order
    late: list[int] = []
    for i in range(len(index)):
        if not roles.required_forward[i]:
            continue
        users = [u for u in index.users[i] if roles.required_forward[u]]
        if len(users) < 2:  # no user comes after the only user
            continue
        last = max(order[u] for u in users)
        # A compiler is unlikely to fuse a user that runs later with the early users, so recomputing both saves
        # nothing.
        first_unfusible = _first_unfusible(index.users, order, fusion, users, last)
        late += [u for u in users if order[u] > first_unfusible and fusion(i, u) and not ban[u]]
    return late


def _first_unfusible(
    users: tuple[tuple[int, ...], ...],
    order: tuple[int, ...],
    fusion: Fusion,
    start: list[int],
    last: int,
) -> int:
    """Return the place in forward's order of the first node reached from ``start`` that cannot fuse with its input."""
    # Rank, position, and whether the node fuses with the node before it on the path. The first node counts as fusible.
    heap = [(order[s], s, True) for s in start]
    heapq.heapify(heap)
    seen = set(heap)
    while heap:
        at, i, fusible = heapq.heappop(heap)
        if not fusible:
            return at
        for u in users[i]:
            if 0 <= order[u] <= last:  # -1: forward does not require the user
                entry = (order[u], u, fusion(i, u))
                if entry not in seen:
                    seen.add(entry)
                    heapq.heappush(heap, entry)
    return last


def _long_chains(state: State, fusion: Fusion, ban: bytearray) -> list[int]:
    """Return the positions at which a chain of fusible nodes becomes longer than `LONG_CHAIN`."""
    index, roles = state.index, state.roles
    order = roles.forward_order
    visited = bytearray(len(index))
    ends: list[int] = []
    for start in range(len(index)):
        if not roles.required_forward[start] or visited[start]:
            continue
        heap = [(order[start], start)]
        while heap:
            at, i = heapq.heappop(heap)
            if visited[i]:
                continue
            visited[i] = 1
            # With an empty heap, no other branch of the chain is still open.
            if at > order[start] + LONG_CHAIN and not heap:
                ends.append(i)
                break
            for u in index.users[i]:
                if roles.required_forward[u] and fusion(i, u) and not ban[u]:
                    heapq.heappush(heap, (order[u], u))
    return ends


def cut_weights(state: State, fusion: Fusion) -> tuple[int, ...]:
    """Return, for each node of the graph problem, the weight that the minimum cut pays for saving the node.

    The weight of a value is ``nbytes * 1.1 ** d``. In this formula, d is the number of edges from the node to backward,
    limited to the range from 1 to 100. The weight is doubled for a value that fusion would keep out of memory if the
    value were not saved. The weight is also doubled for a copy of an input that the user may overwrite. The weight of a
    generator state, and of a copy of an input that forward overwrites, is its number of bytes.

    Args:
        state: the state with the joint graph.
        fusion: tells whether two nodes fuse.
    """
    lowered, user_mutated = state.lowered(), state.storages.user_mutated
    distances = state.get(Distances())
    weights: list[int] = []
    for kind, at, nbytes in zip(lowered.kind, lowered.position, lowered.problem.size, strict=True):
        weight, is_copy = nbytes, kind is SavedKind.SNAPSHOT and at in user_mutated
        if nbytes and (kind is SavedKind.VALUE or is_copy):
            # At most 100 steps, as in PyTorch, which calls the factor 1.1 a complete guess.
            weight = int(nbytes * 1.1 ** max(min(distances[at], 100), 1))
            weight *= 1 if fusion.is_materialized(at) else 2
            # Doubled as for a fused value, because the copy is written to memory for backward only.
            weight *= 2 if is_copy else 1
        weights.append(weight)
    return tuple(weights)
