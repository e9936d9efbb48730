"""Bare problems with ways: the cheapest decision within the capacity, without a graph of PyTorch around it.

A schedule is what a decision comes to: forward in the problem's order, then backward, in which what was
not saved is made again right before it is first read.
"""

from __future__ import annotations

from collections.abc import Iterable

from remat.errors import BudgetError, ProblemError
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.schedule_problem import ScheduleProblem
from remat.solvers.ways_lagrangian import Found, Lives
from remat.solvers.ways_problem import WaysProblem
from remat.solvers.ways_search import Scheduled, WaysSearch


def solve_ways(problem: WaysProblem) -> Found:
    """The cheapest decision found, with a way for each value that is saved.

    Of problems with few decisions it is the cheapest that there is.

    Raises:
        BudgetError: none was found within the capacity.
        ProblemError: the problem has no capacity, or an operator with several results.
    """
    found = search_of(problem).best([_savable(problem)])
    if found.over:
        raise BudgetError(
            f"no decision with a peak of {problem.step.capacity} bytes was found; the least found has "
            f"{found.peak_bytes}: raise the capacity"
        )
    return found


def search_of(problem: WaysProblem) -> WaysSearch:
    """The search over a bare problem.

    Raises:
        ProblemError: as from `solve_ways`.
    """
    step = problem.step
    if step.capacity is None:
        raise ProblemError("WaysProblem.step.capacity is None; expected bytes of the device")
    if step.part_of:
        raise ProblemError(
            "WaysProblem.step.part_of is given; expected operators with one result each"
        )
    bare = _Bare(problem)
    return WaysSearch(
        problem, bare.graph, range(bare.early), bare.schedule, bare.lives, step.capacity
    )


def _savable(problem: WaysProblem) -> tuple[int, ...]:
    return tuple(range(_Bare(problem).early))


def _closure(step: ScheduleProblem, nodes: Iterable[int]) -> bytearray:
    """Marks for each node whether it is one of those, or read on the way to one."""
    found, todo = bytearray(len(step)), [*nodes]
    while todo:
        i = todo.pop()
        if not found[i]:
            found[i] = 1
            todo.extend(step.inputs[i])
    return found


class _Bare:
    """The graph problem of a bare step problem, and the schedule of a decision.

    The nodes before the boundary are numbered first, so that both problems number them alike.
    """

    def __init__(self, problem: WaysProblem) -> None:
        self.step = step = problem.step
        late = {*step.backward, *step.at_boundary}
        self.early = n = len(step) - len(late)
        if any(i < n for i in late):
            raise ProblemError(
                "WaysProblem.step has a node of forward behind one of backward; expected forward's first"
            )
        given = set(step.at_start)
        free = given.union(set(step.to_end).intersection(step.once))  # there in any case
        read = _closure(step, (j for i in step.backward for j in step.inputs[i]))
        # What backward never needs runs in forward, whether it is named there or not.
        forward = _closure(step, (i for i in range(n) if i in step.forward or not read[i]))
        self._forward, self._given = forward, given
        self.graph = GraphProblem(
            names=step.names[:n],
            inputs=step.inputs[:n],
            cost=step.cost[:n],
            # Whether what takes no memory runs early is a question too, unless forward runs it anyway.
            size=tuple(0 if i in free else step.size[i] or int(not forward[i]) for i in range(n)),
            savable=(True,) * n,
            # What runs once may do so in backward, unless forward needs it.
            recomputable=tuple(
                i not in given and (i not in step.once or not forward[i]) for i in range(n)
            ),
            in_forward=tuple(map(bool, forward[:n])),
            needed=tuple(sorted({j for i in step.backward for j in step.inputs[i] if j < n})),
            unit=step.unit,
        )

    def schedule(self, saved: Iterable[int]) -> Scheduled:
        """The schedule of a decision; moments are nodes: of the run, or of backward's own next run."""
        step, keep = self.step, set(saved)
        forward = bytearray(self._forward)
        stack = [i for i in keep if not forward[i]]
        while stack:
            i = stack.pop()
            if not forward[i]:
                forward[i] = 1
                stack.extend(step.inputs[i])
        sequence = [i for i in range(self.early) if forward[i] and i not in self._given]
        moments, boundary = list(sequence), len(sequence)
        placed = {*keep, *self._given, *step.at_boundary}
        for root in step.backward:
            missing, todo = [], [root]
            while todo:
                j = todo.pop()
                if j not in placed:
                    placed.add(j)
                    missing.append(j)
                    todo.extend(step.inputs[j])
            sequence += sorted(missing)
            moments += [root] * len(missing)
        return sequence, moments, boundary

    @property
    def lives(self) -> Lives:
        """When values are there, by nodes."""
        step, n, end = self.step, self.early, len(self.step)
        first, last, ready = [end] * n, [-1] * n, list(range(n))
        for i in range(end - 1, -1, -1):
            for j in step.inputs[i]:
                if j >= n:
                    continue
                if i >= n:
                    first[j], last[j] = min(first[j], i), max(last[j], i)
                else:
                    first[j] = min(first[j], first[i])
                    last[j] = max(last[j], first[i] if first[i] < end else -1)
                    ready[j] = max(ready[j], i)
        return Lives(begin=range(n), ready=ready, first=first, last=last)
