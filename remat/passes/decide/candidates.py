"""The knapsack inside a graph problem: which operators compete for the budget, and what they weigh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from remat.graph.lowering import Lowered, SavedKind
from remat.graph.roles import UNREACHABLE
from remat.passes.core.analyses import Distances
from remat.passes.core.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The knapsack inside a graph problem.

    Attributes:
        candidates: operators to keep or to allow recomputing, with the bytes that keeping one adds:
            of all its results that backward can reach, less the generator state it saves. Largest
            first.
        fixed: for each node of the problem, whether it is kept in any case.
        forced_bytes: bytes that are saved in any case, if backward reads them at all.
    """

    candidates: tuple[tuple[int, int], ...]
    fixed: tuple[bool, ...]
    forced_bytes: int


def candidates(state: State, lowered: Lowered, ban: bytearray) -> Items:
    """Finds the operators that the loosest cut keeps from recomputation, and what they weigh."""
    problem, distance, nodes = lowered.problem, state.get(Distances()), state.index.nodes
    fixed = [False] * len(problem)
    weight: dict[int, int] = {}
    state_bytes: dict[int, int] = {}
    forced = 0
    for i, kind in enumerate(lowered.kind):
        if kind is SavedKind.SNAPSHOT:
            forced += problem.size[i]
        if kind is not SavedKind.VALUE or distance[lowered.position[i]] >= UNREACHABLE:
            continue
        producer = _producer(nodes, lowered, i)
        if not problem.recomputable[i] or not problem.recomputable[producer]:
            forced += problem.size[i]
        elif ban[lowered.position[producer]]:
            weight[producer] = weight.get(producer, 0) + problem.size[i]
    for i in weight:
        for j in problem.inputs[i]:
            if lowered.kind[j] is SavedKind.GENERATOR_STATE:
                state_bytes[i] = problem.size[j]
    chosen: list[tuple[int, int]] = []
    for i, nbytes in weight.items():
        spare = state_bytes.get(i, 0)
        if nbytes <= spare:  # the value is smaller than the state that would replay it
            fixed[i] = True
            forced += nbytes
        else:
            forced += spare
            chosen.append((i, nbytes - spare))
    chosen.sort(key=lambda item: (-item[1], item[0]))
    return Items(candidates=tuple(chosen), fixed=tuple(fixed), forced_bytes=forced)


def _producer(nodes: Sequence[fx.Node], lowered: Lowered, i: int) -> int:
    """The operator behind an element of a tuple; any other node stands for itself."""
    node = nodes[lowered.position[i]]
    while (
        getattr(node.target, "__name__", "") == "getitem"
        and not lowered.problem.savable[lowered.problem.inputs[i][0]]
    ):
        i = lowered.problem.inputs[i][0]
        node = nodes[lowered.position[i]]
    return i
