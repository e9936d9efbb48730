"""Choose the values to save and to offload, so that peak memory stays within a capacity.

The search starts from given decisions, and offloads values of each decision until the decision's schedule fits the
capacity. The search then improves the best decisions: it saves, recomputes or offloads one more value at a time, as
long as the decision improves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from remat.errors import ProblemError
from remat.solvers.effort import EFFORT
from remat.solvers.graph.problem import GraphProblem, always_saved, evaluate, worth_saving
from remat.solvers.schedule.copies import Copy
from remat.solvers.schedule.offload_problem import (
    CarriedSchedule,
    OffloadPlan,
    OffloadProblem,
    carried,
    evaluate_offloads,
)

#: `greedy` rounds rates (bytes per unit of copy time) to powers of 2**(1/8); similar rates become equal.
_ALIKE = 8
#: A schedule: its runs, and the position at which backward begins.
Scheduled = tuple[Sequence[int], int]


class OffloadSearch:
    """Search for the cheapest way to save, recompute or offload each value while the peak stays within a limit.

    Args:
        problem: the schedule problem with its copy times.
        graph: the graph problem: which values may be saved and which recomputed. Its costs are
            those of the schedule problem.
        node_of: for each node of the graph problem, the node of the schedule problem with the same
            value; -1 for none.
        schedule: a function that takes the saved nodes and returns a schedule: its runs, and the
            position of the run at which backward begins.
        capacity: limit on the peak memory of the device, in bytes.
    """

    def __init__(
        self,
        problem: OffloadProblem,
        graph: GraphProblem,
        node_of: Sequence[int],
        schedule: Callable[[Iterable[int]], Scheduled],
        capacity: int,
    ) -> None:
        self._problem, self._graph, self._node_of = problem, graph, node_of
        self._always = always_saved(graph)
        self.schedule, self.capacity = schedule, capacity
        self._schedules: dict[tuple[int, ...], CarriedSchedule] = {}
        self._walked = self._evaluations = 0
        self._grant(1.0)

    # ---- evaluation -----------------------------------------------------------------------------------
    def decide(self, saved: Iterable[int], offloaded: Iterable[int]) -> OffloadPlan:
        """Build the schedule of a decision, and compute its memory and cost.

        In all methods, ``saved`` are nodes of the graph problem, and ``offloaded`` are nodes of the schedule problem.

        Raises:
            ProblemError: backward reads a value that is neither saved nor recomputable.
        """
        saved_and_read = evaluate(self._graph, {*saved, *self._always}).saved
        carried_schedule = self._schedules.get(saved_and_read)
        if carried_schedule is None:
            sequence, boundary = self.schedule(saved_and_read)
            carried_schedule = carried(self._problem, sequence, boundary)
            self._schedules[saved_and_read] = carried_schedule
            self._walked += 3 * len(sequence)
        return self.evaluate(saved_and_read, carried_schedule, offloaded)

    def improve_offloads(self, offload_plan: OffloadPlan) -> OffloadPlan:
        """Improve a decision by changing only which values it offloads, and return the improved decision."""
        self._grant(EFFORT.offload_around)
        return self._drop_offloads(self._fit_capacity(offload_plan, again=False))

    def evaluate_order(
        self,
        saved: tuple[int, ...],
        sequence: Sequence[int],
        boundary: int,
        offloaded: Iterable[int],
    ) -> OffloadPlan:
        """Compute the memory and cost of a decision whose nodes run in a given order, as an `OffloadPlan`."""
        return self.evaluate(saved, carried(self._problem, sequence, boundary), offloaded)

    def offload_greedily(
        self, saved: tuple[int, ...], sequence: Sequence[int], boundary: int
    ) -> OffloadPlan:
        """Offload values of a schedule until its peak fits the capacity, and return the resulting decision.

        Values are tried in the order of their last uses in forward. Offloads that add exposed transfer time are used
        only if the other offloads do not suffice.
        """
        self._grant(EFFORT.offload_around)
        best = self.evaluate_order(saved, sequence, boundary, ())
        idle = best.schedule.idle
        for v in sorted(idle, key=lambda v: (idle[v][0], v)):
            if not best.over or self._spent():
                break
            if self.may_offload(v):
                offload_plan = self.evaluate(saved, best.schedule, (*best.offloaded, v))
                exposed_time = offload_plan.placement.exposed_time
                if offload_plan.over < best.over and exposed_time <= best.placement.exposed_time:
                    best = offload_plan
        return self._drop_offloads(self._fit_capacity(best, again=False))

    def evaluate(
        self, saved: tuple[int, ...], schedule: CarriedSchedule, offloaded: Iterable[int]
    ) -> OffloadPlan:
        """Compute the memory and cost of a schedule with offloaded values, as an `OffloadPlan`."""
        self._walked += len(schedule.sequence)
        self._evaluations += 1
        return evaluate_offloads(self._problem, schedule, offloaded, self.capacity, saved)

    def copies(self, offload_plan: OffloadPlan, *, at_once: bool) -> list[Copy]:
        """Return, for each offloaded value of a decision, the runs between which the device does not hold the value.

        If ``at_once`` is True, copies take no time. The device then does not hold a value between its last use in
        forward and its first use in backward.
        """
        offloaded, placement = offload_plan.offloaded, offload_plan.placement
        places = [*zip(placement.freed, placement.fetched, strict=True)]
        if at_once:
            places = [offload_plan.schedule.idle[v] for v in offloaded]
        return [
            Copy(
                value=v, nbytes=self._problem.schedule_problem.size[v], freed=freed, fetched=fetched
            )
            for v, (freed, fetched) in zip(offloaded, places, strict=True)
        ]

    def may_offload(self, v: int) -> bool:
        """Return whether the value of a node of the schedule problem may be offloaded."""
        return self._problem.copy_time[v] >= 0

    def _grant(self, share: float) -> None:
        """Let the next search evaluate as many schedules as the fraction ``share`` of a full search's work allows."""
        self._work = self._walked + int(share * EFFORT.offload_work)
        self._least = self._evaluations + int(share * EFFORT.offload_least)

    def _spent(self) -> bool:
        return self._walked > self._work and self._evaluations > self._least

    # ---- the search -----------------------------------------------------------------------------------
    def best(self, starts: Iterable[Iterable[int]]) -> OffloadPlan:
        """Return the cheapest decision found that fits the capacity; if none fits, the decision that exceeds it least.

        The search starts from the sets of saved nodes in ``starts``, of which there is at least one.
        """
        self._grant(1.0)
        # Local searches only find nearby decisions, so start from decisions without and with offloads.
        begun = [self.decide(saved, ()) for saved in starts]
        begun += [self.greedy(c) for c in begun]
        begun.sort(key=lambda c: c.rank)
        return min(
            (self.improve(c) for c in begun[: EFFORT.offload_improved]), key=lambda c: c.rank
        )

    def greedy(self, start: OffloadPlan) -> OffloadPlan:
        """Offload values of a decision until its schedule fits the capacity; return the new decision.

        Values with the most bytes per unit of copy time are offloaded first. Of values with about the same bytes per
        unit of copy time, the value with the earliest last use in forward comes first.
        """
        problem, rates = self._problem, []
        for v, (ready, _) in start.schedule.idle.items():
            if self.may_offload(v):
                time = 2 * problem.copy_time[v]
                rate = math.floor(_ALIKE * math.log2(problem.schedule_problem.size[v] / (1 + time)))
                rates.append((-rate, ready, v))
        order: list[int] = []
        host_bytes = start.host_bytes
        for *_, v in sorted(rates):
            more = 0 if v in start.offloaded else problem.host_size[v]
            if not problem.host_over(host_bytes + more):
                order, host_bytes = [*order, v], host_bytes + more
        # Bisect for the shortest prefix of `order` that fits; take the whole list if no prefix fits.
        low, high = 0, len(order)
        best = start
        while low < high:
            middle = (low + high) // 2
            offload_plan = self.evaluate(start.saved, start.schedule, order[:middle])
            if offload_plan.rank < best.rank or (best.over and not offload_plan.over):
                best = offload_plan
            if offload_plan.over:
                low = middle + 1
            else:
                high = middle
        last = self.evaluate(start.saved, start.schedule, order[:high])
        return min(best, last, key=lambda c: c.rank)

    # ---- local moves ----------------------------------------------------------------------------------
    def improve(self, best: OffloadPlan) -> OffloadPlan:
        """Improve a decision by saving, recomputing or offloading single values, up to a limit on evaluations."""
        while not self._spent():
            before = best
            for change in (self._fit_capacity, self._drop_offloads, self._save_more):
                best = change(best)
            if best.rank >= before.rank:
                break
        return best

    def _fit_capacity(self, best: OffloadPlan, *, again: bool = True) -> OffloadPlan:
        """While a decision exceeds the capacity, offload a value unused at the peak, or recompute a saved value."""
        sizes, time = self._problem.schedule_problem.size, self._problem.copy_time
        while best.over and not self._spent():
            alive, over = best.placement.bytes_alive, best.over
            at = alive.index(max(alive))
            candidates = [
                v
                for v, (ready, needed) in best.schedule.idle.items()
                if ready < at < needed and self.may_offload(v) and v not in best.offloaded
            ]
            candidates.sort(key=lambda v: (-min(sizes[v], over) / (1 + 2 * time[v]), v))
            for v in candidates[: EFFORT.offload_mends]:
                offload_plan = self.evaluate(best.saved, best.schedule, (*best.offloaded, v))
                if offload_plan.rank < best.rank:
                    best = offload_plan
                    break
            else:
                saved = (self._node_of[i] for i in best.saved)
                nodes = self._of_nodes(saved)[: EFFORT.offload_mends] if again else []
                offload_plan = self._recompute_first(best, nodes)
                if offload_plan is best:
                    break
                best = offload_plan
        return best

    def _of_nodes(self, nodes: Iterable[int]) -> list[int]:
        """Convert nodes of the schedule problem to recomputable nodes of the graph problem, least cost per byte first."""
        p, wanted = self._graph, set(nodes)
        matches = [
            i
            for i, v in enumerate(self._node_of)
            if v in wanted and p.recomputable[i] and p.size[i]
        ]
        return sorted(matches, key=lambda i: (p.cost[i] / p.size[i], i))

    def _recompute_first(self, best: OffloadPlan, nodes: Sequence[int]) -> OffloadPlan:
        """Try to recompute each node instead of saving it; return the first better decision, or ``best``."""
        for i in nodes:
            if self._spent():
                break
            try:
                offload_plan = self.decide([k for k in best.saved if k != i], best.offloaded)
            except ProblemError:  # node i needs a value that cannot be recomputed
                continue
            if offload_plan.rank < best.rank:
                return offload_plan
        return best

    def _drop_offloads(self, best: OffloadPlan) -> OffloadPlan:
        """Stop offloading each value whose copies make a decision worse, and return the decision."""
        time = self._problem.copy_time
        for v in sorted(best.offloaded, key=lambda v: (-time[v], v)):
            if self._spent():
                break
            offloaded = [u for u in best.offloaded if u != v]
            offload_plan = self.evaluate(best.saved, best.schedule, offloaded)
            if offload_plan.rank < best.rank:
                best = offload_plan
        return best

    def _save_more(self, best: OffloadPlan) -> OffloadPlan:
        """Save or offload recomputed values, and recompute offloaded ones, if that improves the decision."""
        p, node_of = self._graph, self._node_of
        again = [i for i in worth_saving(p, best.saved) if node_of[i] >= 0]
        for i in again:
            for more in ((), (node_of[i],)) if self.may_offload(node_of[i]) else ((),):
                if self._spent():
                    return best
                offload_plan = self.decide((*best.saved, i), (*best.offloaded, *more))
                if offload_plan.over and offload_plan.cost < best.cost:
                    offload_plan = self._fit_capacity(offload_plan)
                if offload_plan.rank < best.rank:
                    best = offload_plan
                    break
        while not self._spent():
            offload_plan = self._recompute_first(best, self._of_nodes(best.offloaded))
            if offload_plan is best:
                break
            best = offload_plan
        return best
