"""Lagrange multipliers for offloading, and the decision that is cheapest under them.

A *program point*, called ``moment`` in the code, is a position in the joint graph. The program
point of a forward run is the position of the run's node. A backward run may be a recomputation. Its
program point is the position of the next node that backward runs in every decision. A *window* is a
range of program points in which runs wait for the host link, in one direction of the link. Each
program point has a multiplier: the price of a byte on the device. Each window has a multiplier: the
price of a unit of copy time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from remat.solvers.flow import Network
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.offload_problem import CarriedSchedule, OffloadChoice, OffloadProblem
from remat.solvers.prices import price_between

#: Largest number of windows that have a multiplier, for each direction of the link.
_WINDOWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Lifetimes of the values of a graph problem; one entry per node.

    All entries are program points: positions in the joint graph.

    Attributes:
        begin: the program point at which the value is computed.
        ready: the program point of the value's last use in forward.
        first: the program point of the value's first use in backward.
        last: the program point of the value's last use in backward.
    """

    begin: Sequence[int]
    ready: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]


class Prices:
    """Lagrange multipliers: prices of memory, and of copy time on the host link.

    A byte on the device has a price at each program point, a position in the joint graph. A unit of
    copy time has a price in each window, a range of program points in which runs wait for the link.
    A byte on the host has one price. All prices start at 0. They rise where a decision exceeds a
    capacity or waits for the link.

    Args:
        problem: the step problem with its copy times.
        graph: the graph problem: which values may be saved and which recomputed.
        node_of: for each node of the graph problem, the node of the step problem; -1 for none.
        lives: lifetimes of the values of the graph problem.
        capacity: limit on the peak memory of the device, in bytes.
        whole: the schedule of the decision that saves every savable value, with the program point
            of each run.
    """

    def __init__(
        self,
        problem: OffloadProblem,
        graph: GraphProblem,
        node_of: Sequence[int],
        lives: Lives,
        capacity: int,
        whole: CarriedSchedule,
    ) -> None:
        self._problem, self._graph, self._node_of = problem, graph, node_of
        self._lives, self._capacity = lives, capacity
        self._network = Network(graph)
        self._moment: dict[int, float] = {}
        self._window: dict[tuple[bool, int, int], float] = {}
        self._host = 0.0  # price of a byte in the host's memory
        edge = whole.boundary
        # Time at the start of each run. It tells during which run a copy ends if the link is free.
        self._starts = [0, *itertools.accumulate(problem.times[v] for v in whole.sequence)]
        runs, moments = whole.sequence, whole.moments
        self._time_scale = max(1, self._starts[-1] // 2)
        self._byte_scale = max(1, max(whole.evaluation.bytes_alive) - capacity)
        at_run = {m: k for k, m in reversed([*enumerate(moments[:edge])])}
        n = len(graph)
        self._sent, self._fetched = list(lives.ready), list(lives.first)
        for i in range(n):
            v = node_of[i]
            if v < 0 or problem.copy_time[v] < 0:
                continue
            r, f = at_run.get(lives.ready[i]), bisect_left(moments, lives.first[i], edge)
            if r is None or f >= len(runs):
                continue
            end = self._starts[r + 1] + problem.copy_time[v]
            k = min(edge, bisect_left(self._starts, end)) - 1
            self._sent[i] = max(lives.ready[i], moments[max(0, min(k, len(runs) - 1))])
            # In backward, program points never fall from run to run, so bisection works.
            start = self._starts[f] - problem.copy_time[v]
            k = max(edge, bisect_right(self._starts, start) - 1)
            self._fetched[i] = min(lives.first[i], moments[min(k, len(runs) - 1)])

    def decision(self) -> tuple[tuple[int, ...], list[int]]:
        """Return the cheapest decision at the current prices.

        A saved value is offloaded if this costs less than to keep the value on the device.

        Returns:
            Two items: the nodes of the graph problem to save, and the nodes of the step problem whose
            values are offloaded.
        """
        graph, problem, lives = self._graph, self._problem, self._lives
        at, priced = bool(self._moment), price_between(self._moment)
        keep, again, offloaded = [], [], set()
        for i, nbytes in enumerate(graph.size):
            begin, ready, first, last = (
                lives.begin[i], lives.ready[i], lives.first[i], lives.last[i],
            )  # fmt: skip
            least = nbytes * priced(begin, last) if nbytes and at else 0.0
            v = self._node_of[i]
            between = first <= last and ready < first
            if nbytes and at and between and v >= 0 and problem.copy_time[v] >= 0:
                held = priced(begin, self._sent[i]) + priced(self._fetched[i], last)
                price = nbytes * (held + self._host) + self._on_link(i, v)
                if price < least:
                    least = price
                    offloaded.add(i)
            keep.append(least)
            held = nbytes * priced(first, last) if nbytes and at else 0.0
            again.append((graph.cost[i] if graph.in_forward[i] else 0) + held)
        saved = self._network.cut_at(keep, again)
        return saved, [self._node_of[i] for i in saved if i in offloaded]

    def _on_link(self, i: int, v: int) -> float:
        lives, problem, total = self._lives, self._problem, 0.0
        for (back, low, high), price in self._window.items():
            if low <= (lives.first[i] if back else lives.ready[i]) <= high:
                total += price * problem.copy_time[v]
        return total

    def move(self, choice: OffloadChoice, most: float, step: float) -> bool:
        """Move the multipliers along a subgradient at a decision, with Polyak's step size.

        Args:
            choice: the decision that is cheapest under the current multipliers.
            most: cost of the best decision known, or an estimate. A larger number gives longer
                steps.
            step: factor by which Polyak's step size is multiplied.

        Returns:
            False if the subgradient is zero, so that the multipliers do not change; True otherwise.
        """
        capacity, bytes_scale, time_scale = self._capacity, self._byte_scale, self._time_scale
        highest: dict[int, int] = {}
        for m, nbytes in zip(choice.schedule.moments, choice.placement.bytes_alive, strict=True):
            if nbytes > highest.get(m, 0):
                highest[m] = nbytes
        slope: dict[int, float] = {
            m: (nbytes - capacity) / bytes_scale
            for m, nbytes in highest.items()
            if nbytes > capacity or m in self._moment  # a price of 0 cannot fall
        }
        self._open_windows(choice)
        behind = {w: self._behind(w, choice) / time_scale for w in self._window}
        host = 0.0
        if self._problem.host_capacity is not None:
            above = choice.host_bytes - self._problem.host_capacity
            host = above / bytes_scale if above > 0 or self._host else 0.0
        length = sum(s * s for s in (*slope.values(), *behind.values(), host))
        if not length:
            return False
        # The cost without exposed time, because the link's multipliers already charge for this time.
        value = float(choice.cost - choice.exposed)
        value += sum(self._moment.get(m, 0.0) * s * bytes_scale for m, s in slope.items())
        value += sum(self._window[w] * s * time_scale for w, s in behind.items())
        value += self._host * host * bytes_scale
        move = step * max(most - value, 0.02 * most) / length
        moved = {m: self._moment.get(m, 0.0) + move * s / bytes_scale for m, s in slope.items()}
        self._moment = {m: p for m, p in moved.items() if p > 0}
        self._host = max(0.0, self._host + move * host / bytes_scale)
        for w, s in behind.items():
            # A late copy delays the step by at most its own time, so a unit of link time costs at most 1.
            self._window[w] = min(1.0, max(0.0, self._window[w] + move * s / time_scale))
        return True

    def _open_windows(self, choice: OffloadChoice) -> None:
        """Add a multiplier of 0 for each new window in which runs of a decision wait for the link.

        A window is a range of program points and a direction of the link. Windows with the longest
        waits are added first, until the direction has `_WINDOWS` windows.
        """
        placed, moments = choice.placement, choice.schedule.moments
        last = len(moments) - 1
        for back, waits in ((False, placed.sending), (True, placed.fetching)):
            opened = sum(w[0] == back for w in self._window)
            for wait in sorted(waits, key=lambda w: -w.time)[: max(0, _WINDOWS - opened)]:
                low, high = sorted(moments[max(0, min(last, k))] for k in (wait.begin, wait.at))
                self._window.setdefault((back, low, high), 0.0)

    def _behind(self, window: tuple[bool, int, int], choice: OffloadChoice) -> float:
        """Return the time of the copies in a window, less the time of the runs in the window.

        The result is negative if the runs take longer than the copies.

        Args:
            window: three entries: True for fetches and False for sends, the first program point,
                and the last program point.
            choice: the decision whose copies and runs are counted.
        """
        back, low, high = window
        problem, idle, moments = self._problem, choice.schedule.idle, choice.schedule.moments
        copies = 0
        for v in choice.offloaded:
            at = moments[idle[v][1 if back else 0]]
            if low <= at <= high:
                copies += problem.copy_time[v]
        runs = sum(
            problem.times[v]
            for v, m in zip(choice.schedule.sequence, moments, strict=True)
            if low <= m <= high
        )
        return copies - runs
