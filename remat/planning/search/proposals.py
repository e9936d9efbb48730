"""The proposers: functions that find candidates, listed in the order in which a search calls them.

A search calls each proposer to find candidates within a limit on the peak. For simulated peaks, which the schedule
problem gives exactly, each proposer searches once. Estimated peaks differ from peaks in the schedule problem, by
similar bytes for similar candidates. For estimated peaks, a proposer therefore searches several times, and corrects its
limit after each measured peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from remat.planning.context import GraphContext
from remat.planning.search.aim import aim
from remat.planning.search.candidates import Candidate
from remat.planning.search.pool import CandidatePool, Limits, cost_of, scheduled_peak
from remat.planning.search.search import Proposer, Search

Candidates = Iterator[Candidate]
Seeds = Sequence[Candidate]


def at_budget_one(search: Search, limits: Limits, seeds: Seeds) -> Candidates:
    """Propose the decision at budget 1 as a candidate."""
    yield search.decisions.allowed_at_budget_one


def by_named_solver(search: Search, limits: Limits, seeds: Seeds) -> Candidates:
    """Let the solver that the user named propose decisions at limits on saved bytes, and a schedule."""
    context = search.context
    if not context.is_alone:
        return
    yield from search.decisions.swept(limits)
    request = context.request
    if "schedule" not in request.solver.solves or request.hooks:
        return
    context.on_progress(f"searching for a schedule by '{request.solver.name}'")
    exact = search.is_exact(limits.measure)
    # Without its schedule, the start is in the node order of the passes.
    start = replace(search.least_peak, schedule=None) if exact else search.nearest(limits)
    near = search.near(limits.measure, start)
    limit = int(limits.peak_bytes) + near.offset
    if candidate := near.orders.solved(request.solver, start, limit, request.time_limit):
        yield search.decisions.credited(candidate, "scheduled by the solver")


def by_prices(search: Search, limits: Limits, seeds: Seeds) -> Candidates:
    """Propose decisions that are minimum cuts under prices of memory, in the node order of the passes."""
    if search.context.is_alone or search.is_solved(limits):
        return
    wanted, exact = int(limits.peak_bytes), search.is_exact(limits.measure)
    last = None if exact else search.nearest(limits)
    near = search.near(limits.measure, last)
    # A search starts from the best candidate within its limits, such as the result for a smaller budget.
    best = search.recomputing(limits) if exact else None
    reused = [] if best is None else [best]
    if not exact:
        reused = [d for d in search.pool if not d.decision.is_ordered]
    starts = [d.saved for d in (*seeds, *reused)]
    if exact or not starts:
        starts += search.starts

    def ask(peak_bytes: int) -> Candidate:
        search.rounds_run["by prices"] += 1
        within = Limits(peak_bytes=peak_bytes, saved_bytes=limits.saved_bytes)
        candidate = near.prices.search_within(within, starts, orders=near.orders.is_possible)
        return search.decisions.credited(candidate)

    rounds, start = search.rounds(limits.measure).prices, wanted + near.offset
    yield from aim(ask, limits.measure, wanted, start=start, rounds=rounds, last=last)


def by_node_orders(search: Search, limits: Limits, seeds: Seeds) -> Candidates:
    """Propose cheaper schedules with other node orders, unless a known candidate costs next to nothing."""
    context = search.context
    if context.is_alone or context.request.hooks or search.is_solved(limits):
        return
    for start, searches in _ordered_from(search, limits):
        yield from _annealed(search, limits, start, searches)


def _ordered_from(search: Search, limits: Limits) -> Iterator[tuple[Candidate, int]]:
    """Yield the candidates from which searches over node orders start, each with the number of searches to run."""
    rounds = search.rounds(limits.measure)
    if search.is_exact(limits.measure):
        plain = [d for d in search.pool if not (d.decision.is_ordered or d.offloads_more)]
        start, best = CandidatePool(plain).best(limits.rank), search.recomputing(limits)
        exceeds = limits.measure(start) > limits.peak_bytes
        yield start, 1 if exceeds else rounds.orders
        if best is not None and best.schedule and exceeds:
            yield best, rounds.orders
        return
    # The candidate with the least peak and one near the limit lead to different local optima.
    least = search.pool.best(limits.measure)
    yield least, rounds.from_least
    above = replace(limits, peak_bytes=rounds.above * limits.peak_bytes)
    near = search.recomputing(above) or search.nearest(limits)
    if near is not least:
        yield near, rounds.orders


def _annealed(search: Search, limits: Limits, start: Candidate, searches: int) -> Candidates:
    """Yield the candidates of several searches over node orders within limits; the first search edits ``start``."""
    context, rounds, wanted = search.context, search.rounds(limits.measure), int(limits.peak_bytes)
    near, own = search.near(limits.measure, start), CandidatePool([start])
    exact = search.is_exact(limits.measure)
    # The simulated peak is that of the schedule, which is known already.
    measure, among = (scheduled_peak, own) if exact else (limits.measure, search.pool)
    counted = replace(limits, measure=measure, offload=False)
    above = replace(counted, peak_bytes=rounds.above * wanted)
    offset, offsets, misses, idle = near.offset, list[int](), 0, 0
    least = among.cheapest(counted, cost_of)
    # The peak of a start that exceeds the limit falls slowly, so this search is not cut short.
    share = 1.0 if exact and searches == 1 else rounds.share
    for _ in range(searches):
        search.rounds_run["by node orders"] += 1
        seen = {d.decision for d in search.pool}
        # The limit falls with each search in a row that finds nothing within the limit.
        limit = wanted + offset - misses * int(rounds.lowered * wanted)
        allowed = filter(context.may_save, near.orders.search_within(start, limit, share=share))
        new = [d for d in allowed if d.decision not in seen and d.schedule != start.schedule]
        own.add(*new)
        informed = [search.offloads.with_tagged(search.decisions.credited(d)) for d in new]
        yield from informed
        reached = [*map(measure, new if exact else informed)]
        offsets += [d.peak_bytes - peak for d, peak in zip(new, reached, strict=True)]
        before, least = least, among.cheapest(counted, cost_of)
        better = least is not None and (before is None or least.cost < before.cost)
        idle = 0 if better else idle + 1
        misses = 0 if any(peak <= wanted for peak in reached) else misses + 1
        if (least is not None and not least.cost) or idle == rounds.idle:
            return
        # Peaks of the schedule problem exceed the measured ones by similar bytes for similar candidates.
        offset = sum(offsets) // len(offsets) if offsets else offset
        start = own.cheapest(above, cost_of) or CandidatePool(new).cheapest(rank=cost_of) or start


def from_least_peak(search: Search, limits: Limits, seeds: Seeds) -> Candidates:
    """If no candidate is within the limits, propose the candidate of least peak, and search again at lower limits."""
    context, hooks = search.context, search.context.request.hooks
    if context.is_alone or not search.is_exact(limits.measure):
        return
    if not hooks and search.recomputing(limits):
        return
    yield search.least_peak
    # With hooks, which pack saved values, the peaks of the search differ from those of the step.
    yield from search.decisions.swept(limits)
    if cheapest := search.recomputing(limits):
        yield from _closing_in(search, limits, [cheapest])
    if not hooks:
        small = len(context.state.index) <= search.effort.small
        for part in search.effort.lower[: None if small else 1]:
            lower = int(part * limits.peak_bytes)
            if lower >= search.schedules.least_possible:
                yield from _closing_in(search, replace(limits, peak_bytes=lower), ())


def _closing_in(search: Search, limits: Limits, seeds: Seeds) -> Candidates:
    """Yield candidates within limits, found by a search by prices of memory and by searches over node orders."""
    yield from by_prices(search, limits, seeds)
    yield from by_node_orders(search, limits, seeds)


def with_offloads(search: Search, limits: Limits, seeds: Seeds) -> Candidates:
    """Propose a candidate that offloads values to the host and is cheaper than all others within the limits."""
    if not (limits.offload and search.context.may_offload and search.is_exact(limits.measure)):
        return
    # Offloading cannot lower the peak below this bound.
    if limits.peak_bytes >= search.schedules.least_possible:
        without = search.recomputing(limits)
        candidate = search.offloads.with_offloads(int(limits.peak_bytes), without)
        if candidate is not None:
            yield candidate


#: The proposers, in the order in which a search asks them. The pool then has what earlier proposers have found.
PROPOSERS: tuple[Proposer, ...] = (
    at_budget_one,
    by_named_solver,
    by_prices,
    by_node_orders,
    from_least_peak,
    with_offloads,
)


def search_of(context: GraphContext) -> Search:
    """Return a search for candidates of a prepared graph that calls all proposers."""
    return Search(context, PROPOSERS)
