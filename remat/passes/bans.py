"""Which nodes the minimum cut may not recompute: the heuristics of SPEC A6, over positions."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.graph import ops
from remat.graph.lowering import must_recompute, must_save
from remat.graph.roles import UNREACHABLE
from remat.graph.storages import tensor_bytes
from remat.passes.analyses import Distances
from remat.passes.base import State

#: A chain of fusible nodes longer than this is cut.
LONG_CHAIN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BanRules:
    """Which heuristics apply; each keeps some nodes from being recomputed.

    Attributes:
        used_far_apart: users of one value with something unfusible between them.
        long_fusible_chains: chains of fusible nodes over `LONG_CHAIN` long.
        materialized_backward: what backward writes to memory anyway.
        not_in_allowlist: whatever is not known to be cheap; without it, only random operators and
            compute-intensive ones.
        reductions: results under a quarter of their inputs.
    """

    used_far_apart: bool = True
    long_fusible_chains: bool = True
    materialized_backward: bool = True
    not_in_allowlist: bool = True
    reductions: bool = True


class Fusion:
    """Fusibility of neighbours, looked up once per node."""

    def __init__(self, state: State) -> None:
        taxonomy = ops.default_taxonomy()
        self._index = state.index
        nodes = state.index.nodes
        self.view = [taxonomy.is_view(n) for n in nodes]
        self._fusible = [taxonomy.is_fusible(n) for n in nodes]
        self._swallows = [_swallows(n) for n in nodes]

    def __call__(self, a: int, b: int) -> bool:
        """Whether ``b``, a user of ``a``, can be computed in one kernel with it."""
        if self._swallows[b] is True:
            return True
        swallowed = self._swallows[b]
        if swallowed and self._index.nodes[a] in swallowed:
            return True
        return self._fusible[a] and self._fusible[b]

    def is_materialized(self, i: int) -> bool:
        """Whether the value is written to memory whatever is decided."""
        if self._index.nodes[i].op == "placeholder":
            return True
        return not all(self(i, u) for u in self._index.users[i])


def _swallows(node: fx.Node) -> Any:
    """True where every producer can write straight into the node, or the producers that can."""
    target = node.target
    if ops.packet(target) is torch.ops.aten.cat:
        return True
    if target is torch.ops.higher_order.auto_functionalized:
        from torch._higher_order_ops.auto_functionalize import get_mutable_args

        names, _ = get_mutable_args(node.args[0])  # type: ignore[arg-type]
        found: set[fx.Node] = set()
        for name in names:
            arg = node.kwargs.get(name)
            found.update(
                a for a in (arg if isinstance(arg, list) else [arg]) if isinstance(a, fx.Node)
            )
        return found
    if target is torch.ops.higher_order.triton_kernel_wrapper_functional:
        kernel_args: Any = node.kwargs.get("kwargs") or {}
        return {kernel_args[name] for name in node.kwargs.get("tensors_to_clone") or ()}  # type: ignore[union-attr]
    return None


def banned(state: State, rules: BanRules, fusion: Fusion) -> bytearray:
    """Marks the positions that may not be recomputed under the rules.

    Never banned: views, aliases, what forward does not require, and what is tagged for
    recomputation.
    """
    index, roles = state.index, state.roles
    ban = bytearray(len(index))

    def may_ban(i: int) -> bool:
        return (
            roles.required_forward[i]
            and not fusion.view[i]
            and state.storages.owner[i] == i
            and not must_recompute(index.nodes[i])
        )

    for i, node in enumerate(index.nodes):
        if may_ban(i) and _is_worth_keeping(state, rules, fusion, i, node):
            ban[i] = 1
    if rules.used_far_apart:
        for i in _used_far_apart(state, fusion, ban):
            if may_ban(i):
                ban[i] = 1
    if rules.long_fusible_chains:
        for i in _long_chains(state, fusion, ban):
            if may_ban(i):
                ban[i] = 1
    return ban


def _is_worth_keeping(state: State, rules: BanRules, fusion: Fusion, i: int, node: fx.Node) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") == "getitem":
        return False
    if must_save(node) or node.meta.get("recompute") is CheckpointPolicy.PREFER_SAVE:
        return True
    taxonomy = ops.default_taxonomy()
    if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
        return False
    if rules.not_in_allowlist:
        if not taxonomy.is_recomputable(node):
            return True
    elif ops.is_random(node) or taxonomy.is_compute_intensive(node):
        return True
    if rules.materialized_backward and _materialized_in_backward(state, fusion, i):
        return True
    if rules.reductions:
        read = sum(tensor_bytes(a.meta.get("val")) for a in node.args if isinstance(a, fx.Node))
        return tensor_bytes(node.meta.get("val")) * 4 < read
    return False


def _materialized_in_backward(state: State, fusion: Fusion, i: int) -> bool:
    """Whether something unfusible in backward reads the value, or a view of it."""
    index, roles = state.index, state.roles
    if fusion.view[i]:
        return False
    stack, seen = [i], {i}
    while stack:
        j = stack.pop()
        for u in index.users[j]:
            if not roles.required_forward[u] and not fusion(j, u):
                return True
            if fusion.view[u] and u not in seen:
                seen.add(u)
                stack.append(u)
    return False


def _used_far_apart(state: State, fusion: Fusion, ban: bytearray) -> list[int]:
    """Fusible users of a value that come after something unfusible on the way from it."""
    index, roles = state.index, state.roles
    order = roles.forward_order
    found: list[int] = []
    for i in range(len(index)):
        if not roles.required_forward[i]:
            continue
        users = [u for u in index.users[i] if roles.required_forward[u]]
        if not users:
            continue
        last = max(order[u] for u in users)
        first_unfusible = _first_unfusible(index.users, order, fusion, users, last)
        found += [u for u in users if order[u] > first_unfusible and fusion(i, u) and not ban[u]]
    return found


def _first_unfusible(
    users: tuple[tuple[int, ...], ...],
    order: tuple[int, ...],
    fusion: Fusion,
    start: list[int],
    last: int,
) -> int:
    """Forward order of the first node that cannot be fused on the way from ``start`` to ``last``."""
    heap = [(order[s], s, True) for s in start]
    heapq.heapify(heap)
    seen = set(heap)
    while heap:
        at, i, fusible = heapq.heappop(heap)
        if not fusible:
            return at
        for u in users[i]:
            if 0 <= order[u] <= last:
                entry = (order[u], u, fusion(i, u))
                if entry not in seen:
                    seen.add(entry)
                    heapq.heappush(heap, entry)
    return last


def _long_chains(state: State, fusion: Fusion, ban: bytearray) -> list[int]:
    """Nodes at which a chain of fusible nodes has grown too long."""
    index, roles = state.index, state.roles
    order = roles.forward_order
    visited = bytearray(len(index))
    found: list[int] = []
    for start in range(len(index)):
        if not roles.required_forward[start]:
            continue
        heap = [(order[start], start)]
        while heap:
            at, i = heapq.heappop(heap)
            if visited[i]:
                continue
            visited[i] = 1
            if at > order[start] + LONG_CHAIN and not heap:
                found.append(i)
                break
            for u in index.users[i]:
                if roles.required_forward[u] and fusion(i, u) and not ban[u]:
                    heapq.heappush(heap, (order[u], u))
    return found


def cut_weights(state: State, fusion: Fusion, size: list[int]) -> list[int]:
    """Price of saving each position: its bytes, biased towards what is close to backward (SPEC A6)."""
    distances = state.get(Distances())
    weights = [0] * len(size)
    for i, nbytes in enumerate(size):
        if nbytes:
            distance = distances[i]
            steps = max(min(distance if distance < UNREACHABLE else 100, 100), 1)
            scaled = int(nbytes * 1.1**steps)
            weights[i] = scaled if fusion.is_materialized(i) else 2 * scaled
    return weights
