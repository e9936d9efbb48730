"""Search for the frontier of one graph by peak: its Pareto-optimal candidates by (peak, cost)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from remat.planning.search.bound import bound_with_offloads, line_of_bounds
from remat.planning.search.candidates import Candidate
from remat.planning.search.pool import CandidatePool
from remat.planning.search.proposers.mix import mixed
from remat.planning.search.schedules import Schedules
from remat.planning.search.search import Search


def frontier_by_peak(search: Search) -> tuple[list[Candidate], tuple[tuple[int, int], ...]]:
    """Return the Pareto-optimal candidates by (peak, cost), and a proven lower bound on the cost at each peak.

    Peaks are simulated. If a large graph has many candidates, peaks are computed from schedules without simulation, and
    may differ from simulated peaks by the bytes of a few scalars. For a step of up to ``Effort.small`` operators, the
    frontier's lowest peak is at most the peak of `Search.least_peak`. If values may be offloaded, offloading is tried
    at some of the peaks and below the lowest peak.

    Returns:
        The candidates, lowest peak first; and the bound, as vertices (peak bytes, cost) of a line below which no
        decision lies, lowest peak first.
    """
    context, decisions = search.context, search.decisions
    offloading = context.may_offload
    bound = (
        partial(bound_with_offloads, context, search.bounds) if offloading else search.bounds.bound
    )
    # The frontier must not depend on earlier searches within one peak, so it has schedules of its own.
    schedules = Schedules(context, search.schedules.lowered_schedule)
    cuts = [saved for _, saved in context.cuts(search.effort.all_peaks.starts)]
    if context.is_alone:  # a named solver decides without remat's searches
        own = [
            _simulated(search, d)
            for d in (decisions.allowed_at_budget_one, *decisions.on_frontier())
        ]
        line = line_of_bounds(schedules, bound, cuts)
        return _above(search, line, own), line
    others = decisions.at_budget_one.saved, context.runtime_optimal.saved
    candidates = mixed(schedules, [*cuts, *others], context.on_progress)
    runs = len(schedules.lowered_schedule.problem.runnable)
    orders = search.simulated.orders
    ordered = runs <= search.effort.few and orders.is_possible
    if ordered:
        pool = CandidatePool(candidates)
        for start in candidates[:: max(1, len(candidates) // search.effort.all_peaks.ordered)]:
            context.on_progress("searching orders")
            pool.add(*orders.search_within(start, start.peak_bytes)[:1])
        candidates = pool.pareto()
    context.on_progress("proving bounds")
    line = line_of_bounds(schedules, bound, cuts)
    points = [decisions.credited(f, "" if f.schedule else "mixed") for f in candidates]
    if len(candidates) * len(context.state.index) <= search.effort.all_peaks.simulated:
        points = [_simulated(search, d) for d in points]
    if runs <= search.effort.small:
        points += _down_to_least(search, candidates, ordered=ordered)
    if offloading:
        frontier = CandidatePool(points).pareto()
        points += _cheaper_with_offloads(search, frontier, schedules.least_possible)
    return _above(search, line, points), line


def _simulated(search: Search, candidate: Candidate) -> Candidate:
    """Return a copy of a candidate with the simulated peak of its step as ``peak_bytes``."""
    return replace(candidate, peak_bytes=search.measures.simulated(candidate))


def _down_to_least(
    search: Search, candidates: Sequence[Candidate], *, ordered: bool
) -> list[Candidate]:
    """Return candidates whose peaks lie between the least peak found and the lowest peak of ``candidates``."""
    lowest = _simulated(search, search.within_peak(search.least_found, offload=False))
    least, points = lowest.peak_bytes, list[Candidate]()
    first = next((f for f in candidates if not f.ordered), None)
    room = candidates[0].peak_bytes - least
    if first and room > 0 and ordered:
        search.context.on_progress("searching orders down to the least peak")
        for k in range(1, search.effort.all_peaks.to_least):
            orders = search.simulated.orders.search_within(
                first, least + room * k // search.effort.all_peaks.to_least
            )
            points += [_simulated(search, search.decisions.credited(d)) for d in orders]
    return [*points, lowest]


def _above(
    search: Search, line: tuple[tuple[int, int], ...], candidates: list[Candidate]
) -> list[Candidate]:
    """Store a lower bound on the cost in each candidate; return Pareto-optimal candidates, lowest peak first."""
    pool = CandidatePool[Candidate]()
    for before in candidates:  # a bound holds for the decision with its tagged values offloaded
        d = search.offloads.with_tagged(before)
        d = d if d is before else _simulated(search, d)
        bound = next((cost for peak, cost in line if peak >= d.peak_bytes), 0)
        pool.add(d.with_provenance(recompute_bound=bound))
    return pool.pareto()


def _cheaper_with_offloads(
    search: Search, candidates: Sequence[Candidate], least_possible: int
) -> list[Candidate]:
    """Return candidates with offloads that are cheaper than a frontier's candidates, or have lower peaks."""
    thin = candidates[:: max(1, len(candidates) // search.effort.all_peaks.offloaded)]
    wanted: list[tuple[int, Candidate | None]] = [(d.peak_bytes, d) for d in thin]
    lowest = candidates[0].peak_bytes
    room = lowest - least_possible
    wanted += [
        (lowest - room * k // search.effort.all_peaks.below, None)
        for k in range(1, search.effort.all_peaks.below)
    ]
    improved = []
    for peak, without in wanted:
        d = search.offloads.with_offloads(peak, without)
        if d is not None and d is not without:
            improved.append(_simulated(search, d))
        elif without is None:
            break
    return improved
