"""Propose decisions that save checkpoints, which divide forward into segments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from remat.planning.search.candidates import Candidate
from remat.planning.search.pool import Limits
from remat.planning.search.proposers.cuts import Cuts
from remat.planning.search.schedules import SAVED, Schedules


def checkpointed(
    cuts: Cuts, limits: Limits, sets: Sequence[frozenset[int]]
) -> list[tuple[frozenset[int], Candidate]]:
    """Return up to two of the given sets of checkpoints, for which the caller repeats a search by prices.

    Each set has a candidate that saves the checkpoints and little else. Of the sets whose candidate is within the
    limits, the set with the fewest segments is returned last. If no candidate is within the limits, the set whose
    candidate exceeds the limits least is returned last. If two sets are returned, the first has the next smaller number
    of segments.
    """
    # At this price, saving a value of 1 KiB costs as much as recomputing everything.
    prices = {SAVED: sum(cuts.problem.cost) / 1024}
    pairs = [(c, cuts.at(prices, c)) for c in sets]
    if not pairs:
        return []
    ranks = [limits.rank(candidate) for _, candidate in pairs]
    fits = (k for k, (excess, _) in enumerate(ranks) if not excess)
    chosen = next(fits, min(range(len(pairs)), key=ranks.__getitem__))
    return pairs[max(0, chosen - 1) : chosen + 1]


def checkpoint_sets(schedules: Schedules, most: int) -> list[frozenset[int]]:
    """Return sets of checkpoints, as nodes of the graph problem: one set for 2, 4, 8, … segments of forward.

    All segments compute values of about the same total size. In each segment, the position is chosen that the fewest
    bytes cross, from earlier operators of forward to later ones. The values that cross this position are checkpoints.
    """
    problem, context = schedules.problem, schedules.context
    state, lowered = context.state, context.lowered
    index, owner = state.index, state.storages.owner
    order = [i for i in schedules.forward_order if state.roles.required_forward[i]]
    rank = {p: k for k, p in enumerate(order)}
    last = [-1] * len(index)
    for p in order:
        last[owner[p]] = max([last[owner[p]], *(rank[u] for u in index.users[p] if u in rank)])
    # Only a value that may also be recomputed is a choice.
    spans = {
        i: (rank[p], last[p])
        for i, p in enumerate(lowered.position)
        if p in rank and problem.savable[i] and problem.recomputable[i] and problem.size[i]
    }
    changes, computed = [0] * (len(order) + 1), [0] * len(order)
    for i, (first, end) in spans.items():
        computed[first] += problem.size[i]
        if end > first:
            changes[first] += problem.size[i]
            changes[end] -= problem.size[i]
    crossing, before = list(accumulate(changes)), list(accumulate(computed))
    sets: dict[frozenset[int], None] = {}
    segments = 2
    while before and segments <= min(most, len(order)):
        ends = [bisect_left(before, k * before[-1] // segments) for k in range(segments + 1)]
        at = [min(range(a, max(a + 1, b)), key=crossing.__getitem__) for a, b in pairwise(ends)]
        sets[frozenset(i for i, (a, b) in spans.items() if any(a <= k < b for k in at))] = None
        segments *= 2
    return list(sets)
