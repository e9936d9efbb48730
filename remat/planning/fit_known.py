"""Plans of one step that are known whatever memory there is, and what they come to at another batch.

Whether a batch fits a memory is asked of these alone: so what fits a memory fits more of it. A search that is
aimed at the memory itself only makes the plan cheaper; the next memory, or batch, may be where it finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat.errors import RematError
from remat.graph.lowering import Decision
from remat.passes.core.state import Costs
from remat.planning.decider import Decided
from remat.planning.peak_frontier import pareto
from remat.planning.peak_planner import PeakPlanner
from remat.planning.planner import Planner
from remat.solvers.graph_problem import evaluate
from remat.units import bytes_of_share

#: Peaks that are searched, evenly over the range: as many as these nodes allow, between a least and a most.
_NODES, _PEAKS = 2_000, (2, 32)
#: Shares that are decided.
_SHARES = (0.6, 0.3, 0.0)
#: Plans that are taken to another batch, at most; the one of the least peak is always among them.
_MOST = 8


@dataclass(frozen=True, slots=True)
class Known:
    """Decisions on the step of one batch, of which none has a lower peak and costs no more; the least peak first.

    Attributes:
        operators: name and target of each node of the step.
        decisions: what is kept.
    """

    operators: tuple[tuple[str, str], ...]
    decisions: tuple[Decision, ...]

    @classmethod
    def of(cls, planner: Planner, peak_of: Callable[[Decided], int]) -> Known:
        """Decides a step at shares and at peaks over the whole range.

        Args:
            planner: decides the step.
            peak_of: bytes that are alive at once under a decision.
        """
        found = pareto(_found(planner), lambda d: (peak_of(d), d.cost))
        steps = max(1, len(found) - 1)
        some = sorted({steps * k // (_MOST - 1) for k in range(_MOST)} & {*range(len(found))})
        return cls(_operators(planner), tuple(found[i].decision for i in some))

    def on(self, planner: Planner) -> list[Decided] | None:
        """The decisions on the step of another batch; None where that has other operators."""
        if _operators(planner) != self.operators:
            return None
        return [_on(decision, planner) for decision in self.decisions]


def _found(planner: Planner) -> Iterator[Decided]:
    peaks = PeakPlanner(planner)  # of its own: what it finds depends on nothing that was looked at
    for share in _SHARES:
        yield planner.at(max(planner.least_bytes, bytes_of_share(share, planner.full_bytes)))
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


def _on(decision: Decision, planner: Planner) -> Decided:
    """A decision with what it saves and costs on a step of the same operators."""
    lowered, state = planner.lowered, planner.state
    scored = evaluate(lowered.problem, lowered.saved_of(decision))
    cost = scored.recompute_cost
    if decision.is_ordered:
        costs = state.get(Costs(planner.request.cost))
        cost = sum(costs[state.index.by_name[name]] for name in decision.further_runs)
    choice = planner.choice(max(planner.full_bytes, scored.saved_bytes))
    return Decided(decision=decision, saved_bytes=scored.saved_bytes, cost=cost, choice=choice)


def runnable(decided: list[Decided], peak_of: Callable[[Decided], int]) -> list[Decided]:
    """Those of which a step can be made, where sizes, which decide what is a view, are others."""
    found = []
    for one in decided:
        try:
            peak_of(one)
        except RematError:
            continue
        found.append(one)
    return found
