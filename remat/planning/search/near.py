"""Schedule problems for fused code: near one candidate, a schedule's peak is the estimated peak plus a constant.

Searches compute the simulated peak of each schedule. At each node, the unfused graphs have more bytes alive than the
fused code, and the difference is similar for similar plans. A search near one candidate therefore corrects each node's
bytes by the difference between unfused graphs and fused code under this candidate. The resulting peaks are estimated
peaks plus a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph.copying import run_of
from remat.graph.memory.fused_liveness import FusedWalk
from remat.graph.memory.liveness import StepWalk
from remat.passes.core.state import State
from remat.planning.pipelines import for_walk
from remat.planning.search.effort import Effort
from remat.planning.search.proposers.orders import Orders
from remat.planning.search.proposers.prices import PriceSearch
from remat.planning.search.schedules import Schedules


@dataclass(frozen=True, slots=True)
class Near:
    """Two searches on one schedule problem: one by prices of memory, and one over node orders.

    Attributes:
        prices: the search by prices of memory, in the node order of the passes.
        orders: the search over node orders.
        offset: the bytes by which a peak in the schedule problem exceeds the measured peak.
    """

    prices: PriceSearch
    orders: Orders
    offset: int = 0

    @classmethod
    def of(cls, schedules: Schedules, effort: Effort, offset: int = 0) -> Near:
        """Return a search by prices and a search over node orders, both on the schedule problem of ``schedules``."""
        return cls(PriceSearch(schedules, effort), Orders(schedules), offset)


def near_fused(state: State, schedules: Schedules, effort: Effort) -> Near:
    """Return searches that use the estimated peaks of fused code, for schedules near one candidate.

    Args:
        state: the graph split by the candidate, which gives the differences between unfused graphs and fused code.
        schedules: the decisions of the graph, with its schedule problem.
        effort: limits on the work of one search.

    Returns:
        The searches, with the largest difference between unfused graphs and fused code as their offset.
    """
    fused, unfused = FusedWalk(*for_walk(state)), StepWalk(*for_walk(state))
    # Both walks have the same program points, so bytes are compared one by one.
    both = list(zip(unfused.alive(), fused.alive(), strict=True))
    # By name of a node, the fewest bytes by which fused code holds less when the node runs.
    less: dict[str, int] = {}
    for program_point, node in unfused.running():
        name, (more, fewer) = run_of(node), both[program_point]
        less[name] = min(more - fewer, less.get(name, more))
    most = max([0, *less.values()])
    step = schedules.lowered_schedule.with_extra({name: most - n for name, n in less.items()})
    return Near.of(Schedules(schedules.context, step), effort, most)
