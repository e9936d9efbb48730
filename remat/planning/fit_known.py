"""Plans of one step that are known whatever memory there is, and what they come to at another batch.

What fits a memory by one of these fits more of it. A search that is aimed at the memory itself makes the plan
cheaper, and may fit a batch that none of these does; the next memory, or batch, may be where it finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from remat.errors import RematError
from remat.graph.lowering import Decision
from remat.passes.core.state import Costs
from remat.planning.candidates import Candidate
from remat.planning.planner import Planner
from remat.solvers.graph_problem import evaluate
from remat.units import bytes_of_share

#: Peaks that are searched, evenly over the range: as many as these nodes allow, between a least and a most.
_NODES, _PEAKS = 2_000, (2, 32)
#: Shares that are decided.
_SHARES = (0.6, 0.3, 0.0)
#: Decisions that take no search.
QUICK = len(_SHARES)


class Known:
    """Decisions on the step of one batch, made as they are asked for: what is quick to find comes first.

    Args:
        planner: decides the step.
    """

    def __init__(self, planner: Planner) -> None:
        self._operators = _operators(planner)
        self._found: list[Decision] = []
        self._more = _decisions(planner)

    def on(self, planner: Planner) -> Iterator[Candidate] | None:
        """The decisions on the step of another batch; None where that has other operators."""
        if _operators(planner) != self._operators:
            return None
        return (_on(decision, planner) for decision in self._decisions())

    def _decisions(self) -> Iterator[Decision]:
        yield from self._found
        for decision in self._more:
            self._found.append(decision)
            yield decision


def _decisions(planner: Planner) -> Iterator[Decision]:
    seen = set()
    for decided in _decided(planner):
        if decided.decision not in seen:
            seen.add(decided.decision)
            yield decided.decision


def _decided(planner: Planner) -> Iterator[Candidate]:
    """Decides a step at shares, at its least peak, and at peaks over the whole range."""
    for share in _SHARES:
        yield planner.at(max(planner.least_bytes, bytes_of_share(share, planner.full_bytes)))
    # Of its own: what it finds depends on nothing that was looked at.
    peaks = Planner(planner.state, planner.request, fingerprint=planner.fingerprint)
    yield peaks.least_peak
    low, high = peaks.least_found, planner.peak(planner.full)
    least, most = _PEAKS
    count = min(most, max(least, _NODES // len(planner.state.index)))
    for k in range(1, count):
        found = peaks.searched(low + (high - low) * k // count)
        if found is not None:
            yield found


def _operators(planner: Planner) -> tuple[tuple[str, str], ...]:
    return tuple((node.name, str(node.target)) for node in planner.state.index.nodes)


def _on(decision: Decision, planner: Planner) -> Candidate:
    """A decision with what it saves and costs on a step of the same operators."""
    lowered, state = planner.lowered, planner.state
    scored = evaluate(lowered.problem, lowered.saved_of(decision))
    cost = scored.recompute_cost
    if decision.is_ordered:
        costs = state.get(Costs(planner.request.cost))
        cost = sum(costs[state.index.by_name[name]] for name in decision.further_runs)
    choice = planner.choice(max(planner.full_bytes, scored.saved_bytes))
    return Candidate.of(lowered, decision, cost, choice)


def runnable(
    decided: Iterable[Candidate], peak_of: Callable[[Candidate], int]
) -> Iterator[Candidate]:
    """Those of which a step can be made, where sizes, which decide what is a view, are others."""
    for one in decided:
        try:
            peak_of(one)
        except RematError:
            continue
        yield one
