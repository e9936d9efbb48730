"""Define the schedule problem: choose the order in which nodes run, and which nodes run again.

The peak memory of the schedule must stay within a capacity. A *schedule* is a sequence of runs of
nodes, in which a node may occur several times. A second run of a node recomputes its value, so memory
need not hold the value between two uses. `evaluate_schedule` defines the bytes and cost of a schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise, product
from typing import Any, ClassVar

from remat.errors import BudgetError, ProblemError
from remat.solvers import columns
from remat.solvers.columns import as_integer
from remat.solvers.problem import Limits, Problem
from remat.solvers.solution import Schedule

#: Largest number of runs per node of a schedule, on average. Longer schedules are refused as a
#: solver's mistake.
MOST_RUNS_PER_NODE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProblem(Problem[Schedule]):
    """Run every node at least once, at the lowest total cost, within a limit on peak memory.

    Each input of a node has a smaller number than the node, so nodes can run in the order of numbers. The fields after
    ``capacity`` have defaults, which suit a plain graph without rules about order or boundary. Sequences of integers
    may be any ordered iterables and are stored as tuples of ``int``. The sums of ``cost``, ``size`` and ``extra`` may
    each not exceed 2**63 - 1.

    Each run of a node makes a new value. A run reads, for each input of its node, the value that the latest earlier run
    of the input made. During a run, memory holds the run's results, its other memory (``extra``), the always alive
    bytes (``resident``), and earlier values. A value stays in memory until its last reader's run.

    The *boundary* is the position in a schedule at which backward begins.

    Attributes:
        names: name of each node, for messages; all different.
        inputs: for each node, the nodes that it reads.
        cost: cost of one run of each node, in ``unit``.
        size: bytes of the value that a run of each node makes.
        capacity: bytes that may be alive at one time; None: no limit.
        part_of: for each node, -1 if the node has runs of its own. Otherwise the node is a *part*:
            an additional result of another node's run, as for an operator with several results.
            The entry of a part is the node that makes it. Parts have no inputs, cost or extra
            bytes. The constructor replaces an empty tuple by -1 for each node.
        extra: bytes that a run of each node takes besides its inputs and results. The constructor
            replaces an empty tuple by 0 for each node.
        once: nodes that may not run a second time.
        ordered: nodes whose first runs must come in this order.
        at_start: nodes that never run, and whose values exist from the start to the last run that
            reads them.
        forward: nodes whose first run must come before the boundary.
        backward: nodes that run only after the boundary. The constructor adds nodes that read a
            value available only after the boundary, and nodes that follow such a node in ``ordered``.
            The boundary is at the latest right before the first run of a node in ``backward``.
        at_boundary: nodes that never run, and whose values exist from the boundary to the last run
            that reads them.
        to_end: nodes whose value stays in memory to the end, from the node's last run on.
        resident: bytes that are alive all the time.
        unit: unit of ``cost``.
        hints: schedules that a solver may start from, which may exceed the capacity and are not
            checked. Problems that differ only in ``hints`` are equal.

    Raises:
        ProblemError: an argument is invalid; the message names it, with the node.
    """

    kind: ClassVar[str] = "schedule"
    method: ClassVar[str] = "solve_schedule"
    noun: ClassVar[str] = "schedule"
    solution: ClassVar[type[Schedule]] = Schedule
    bytes_taken: ClassVar[str] = "peak_bytes"

    names: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    cost: tuple[int, ...]
    size: tuple[int, ...]
    capacity: int | None = None
    part_of: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()
    once: tuple[int, ...] = ()
    ordered: tuple[int, ...] = ()
    at_start: tuple[int, ...] = ()
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    at_boundary: tuple[int, ...] = ()
    to_end: tuple[int, ...] = ()
    resident: int = 0
    unit: str = ""
    hints: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        self._check(columns.typed, "names", kind=str)
        names = self.names
        if len(set(names)) != len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise ProblemError(
                f"ScheduleProblem.names has {columns.short(twice)} twice; expected different names"
            )
        last = len(names) - 1
        self._check(columns.earlier_nodes, "inputs", names=names)
        self._check(columns.sequence, "extra", length=len(names), default=0)
        self._check(columns.sequence, "part_of", length=len(names), default=-1)
        self._check(columns.amounts, "cost", "size", "extra", names=names)
        self._check(columns.integers, "part_of", low=-1, high=last, names=names)
        self._check(columns.integers, *_SETS, high=last)
        self._check(columns.integer, "resident")
        self._check(columns.capacity, "capacity")
        self._check_roles()

    def _check_roles(self) -> None:
        """Check that fields of nodes, such as ``once``, do not contradict each other; fill in ``backward``."""
        named = {label: set(getattr(self, label)) for label in _SETS} | {"part_of": self.parts}
        for label in _SETS:
            if len(named[label]) != len(getattr(self, label)):
                raise ProblemError(f"ScheduleProblem.{label} names a node twice")
        for label, other_label in _DISJOINT:
            for i in sorted(named[label] & named[other_label]):
                raise ProblemError(
                    f"ScheduleProblem.{label} and .{other_label} both name '{self.names[i]}'"
                )
        given = self.given
        for i in sorted(given | self.parts):
            if self.inputs[i] or self.cost[i] or self.extra[i]:
                why = "is there without a run" if i in given else "is part of another node"
                raise ProblemError(
                    f"ScheduleProblem has inputs, a cost or extra bytes for '{self.names[i]}', which {why}; "
                    "expected none"
                )
        for i in self.parts:
            maker = self.part_of[i]
            if maker >= i or maker in given or maker in self.parts:
                raise ProblemError(
                    f"ScheduleProblem.part_of[{i}] ('{self.names[i]}') is {maker}; expected an earlier node that runs"
                )
        late = self._late()
        runs = set(self.runnable)
        object.__setattr__(self, "backward", tuple(i for i in sorted(runs) if late[i]))
        if self.at_boundary and not self.backward:
            raise ProblemError(
                f"ScheduleProblem.at_boundary names '{self.names[self.at_boundary[0]]}', but no node runs after the "
                "boundary; expected some in backward, or one that reads it"
            )
        for earlier, later in pairwise(self.ordered):
            if earlier >= later or late[earlier] > late[later]:
                raise ProblemError(
                    f"ScheduleProblem.ordered has '{self.names[earlier]}' before '{self.names[later]}'; expected "
                    "nodes in the problem's own order, those after the boundary last"
                )
        for i in self.forward:
            if late[i]:
                raise ProblemError(
                    f"ScheduleProblem.forward names '{self.names[i]}', which reads a value that is only there after the "
                    "boundary"
                )

    def _late(self) -> bytearray:
        """Return, for each node, 1 if the node's value is available only after the boundary, otherwise 0."""
        late = bytearray(len(self))
        for i in (*self.backward, *self.at_boundary):
            late[i] = 1
        # A node ordered after a backward node can also run only in backward.
        behind = dict(pairwise(reversed(self.ordered)))
        for i, row in enumerate(self.inputs):
            if i in behind and behind[i] < i:
                late[i] |= late[behind[i]]
            maker = self.maker(i)
            late[i] |= late[maker] if maker != i else any(late[j] for j in row)
        return late

    def __len__(self) -> int:
        return len(self.names)

    @property
    def given(self) -> frozenset[int]:
        """Nodes that never run: those in `at_start`, such as parameters, and in `at_boundary`, such as tangents."""
        return frozenset((*self.at_start, *self.at_boundary))

    @property
    def parts(self) -> frozenset[int]:
        """Nodes without runs of their own, because the run of another node makes their value."""
        return frozenset(i for i, maker in enumerate(self.part_of) if maker >= 0)

    @property
    def runnable(self) -> tuple[int, ...]:
        """Nodes with runs of their own: all nodes that are neither in `given` nor in `parts`."""
        idle = self.given | self.parts
        return tuple(i for i in range(len(self)) if i not in idle)

    @property
    def used(self) -> frozenset[int]:
        """Nodes whose value another node reads, or whose value stays in memory to the end of the schedule."""
        return frozenset(self.to_end).union(*self.inputs)

    @property
    def results(self) -> list[list[int]]:
        """For each node, the nodes whose values the node's run makes: the node itself, then its parts (``part_of``)."""
        results = [[i] for i in range(len(self))]
        for i in sorted(self.parts):
            results[self.part_of[i]].append(i)
        return results

    def maker(self, node: int) -> int:
        """Return the node whose run makes the value of ``node``: ``node`` itself or, for a part, its ``part_of``."""
        return node if self.part_of[node] < 0 else self.part_of[node]

    @property
    def order(self) -> tuple[int, ...]:
        """All nodes with runs of their own, in the order of their numbers, but with the nodes in ``backward`` last."""
        late = set(self.backward)
        return tuple(sorted(self.runnable, key=late.__contains__))

    @property
    def most_entries(self) -> int:
        return MOST_RUNS_PER_NODE * max(1, len(self))

    def read(self, entries: list[Any]) -> tuple[int, ...]:
        if len(entries) > self.most_entries:
            raise ProblemError(
                f"returned more than {self.most_entries} runs, {MOST_RUNS_PER_NODE} for each node"
            )
        runs = []
        for position, entry in enumerate(entries):
            node = as_integer(entry)
            if node is None:
                raise ProblemError(
                    f"returned {entry!r} as run {position}, where a node's number is due"
                )
            runs.append(node)
        return tuple(runs)

    def measure(self, choice: tuple[int, ...]) -> dict[str, Any]:
        evaluation = evaluate_schedule(self, choice)
        return {
            "sequence": choice,
            "cost": evaluation.cost,
            "peak_bytes": evaluation.peak_bytes,
            "boundary": evaluation.boundary,
        }

    def excess(self, figures: Mapping[str, Any]) -> str:
        runs, peak = figures["sequence"], figures["peak_bytes"]
        at = evaluate_schedule(self, runs).bytes_alive.index(peak) if runs else 0
        where = f" at run {at} ('{self.names[runs[at]]}')" if runs else ""
        return f"a schedule with a peak of {figures['peak_bytes']} bytes{where}"

    def limits(self) -> Limits:
        return Limits(sum(self.cost))

    def refuse_infeasible(self) -> None:
        if self.capacity is None:
            return
        least, node = least_peak(self)
        if least > self.capacity:
            if node < 0:
                why = "what stays to the end takes that much"
            else:
                why = f"'{self.names[node]}' alone takes that much with what it reads and makes"
            raise BudgetError(
                f"no schedule keeps to a peak of {self.capacity} bytes; every one has at least {least}: "
                f"{why}. Raise the capacity"
            )


#: Marks in `ScheduleEvaluator`: a node that may run only once, and a node without runs of its own.
_ONCE, _NEVER = 1, 2
#: Fields that name nodes with runs of their own, and fields that name nodes without.
_RUNNING, _IDLE = ("once", "ordered", "forward", "backward"), ("at_start", "at_boundary", "part_of")
#: Fields that are sets of nodes.
_SETS = (*_RUNNING, "at_start", "at_boundary", "to_end")
#: Pairs of fields that may not name the same node.
_DISJOINT = (*combinations(_IDLE, 2), *product(_IDLE, _RUNNING), ("forward", "backward"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEvaluation:
    """Memory and cost of a schedule.

    Attributes:
        cost: summed cost of all runs, in the problem's unit.
        peak_bytes: most bytes alive at one time.
        boundary: position at which backward begins; the number of runs if there is no backward.
        bytes_alive: bytes alive during each run.
    """

    cost: int
    peak_bytes: int
    boundary: int
    bytes_alive: tuple[int, ...]


def evaluate_schedule(
    problem: ScheduleProblem, sequence: Sequence[int], boundary: int | None = None
) -> ScheduleEvaluation:
    """Compute the memory and cost of a schedule by following its runs; see `ScheduleEvaluator.evaluate`."""
    return ScheduleEvaluator(problem).evaluate(sequence, boundary)


class ScheduleEvaluator:
    """Computes the memory and cost of many schedules of one schedule problem, whose capacity is ignored."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self._problem, self._results = problem, problem.results
        self._runnable = problem.runnable
        self._backward, given, used = set(problem.backward), problem.given, problem.used
        #: Bytes of the values that exist without a run; a value outside of `used` takes no memory.
        self._idle_bytes = sum(problem.size[i] for i in given & used)
        self._held = [i for i in range(len(problem)) if i in used or i not in given]
        #: For each node: `_NEVER`, `_ONCE`, or 0 if the node may run any number of times.
        self._special = bytearray(len(problem))
        for i in problem.once:
            self._special[i] = _ONCE
        for i in given | problem.parts:
            self._special[i] = _NEVER

    def evaluate(self, sequence: Sequence[int], boundary: int | None = None) -> ScheduleEvaluation:
        """Compute the memory and cost of a schedule; by default, backward begins as late as possible.

        Raises:
            ProblemError: the schedule cannot run; the message names the first wrong run and the reason.
        """
        problem, backward = self._problem, self._backward
        latest = next((p for p, v in enumerate(sequence) if v in backward), len(sequence))
        if boundary is None:
            boundary = latest
        elif not 0 <= boundary <= latest:
            raise ProblemError(
                f"the boundary is at {boundary}, but the first run after it is at {latest}"
            )
        n, inputs, size, results = len(problem), problem.inputs, problem.size, self._results
        special = self._special
        started = [-1] * n  # for each node, the position of the run that made its current value
        ended, first = [-1] * n, [-1] * n
        change = [0] * (len(sequence) + 2)
        for i in problem.at_start:
            started[i] = ended[i] = 0
        for position, v in enumerate(sequence):
            if position == boundary:
                for i in problem.at_boundary:
                    started[i] = ended[i] = boundary
            if not 0 <= v < n:
                raise ProblemError(f"run {position} is of node {v}, but the nodes are 0 to {n - 1}")
            if first[v] < 0:
                first[v] = position
                if special[v] == _NEVER:
                    raise ProblemError(
                        f"run {position} is of '{problem.names[v]}', which has no runs of its own"
                    )
            elif special[v]:
                raise ProblemError(
                    f"run {position} is the second of '{problem.names[v]}', which may run once only"
                )
            for u in inputs[v]:
                if started[u] < 0:
                    raise ProblemError(
                        f"run {position} ('{problem.names[v]}') comes before its input "
                        f"'{problem.names[u]}' is there"
                    )
                ended[u] = position
            # A later run starts a new lifetime of the value. The previous lifetime ended at its last reader.
            for value in results[v]:
                if started[value] >= 0:
                    change[started[value]] += size[value]
                    change[ended[value] + 1] -= size[value]
                started[value] = ended[value] = position
        self._check_order(first, boundary)
        last = max(0, len(sequence) - 1)
        for i in problem.to_end:
            ended[i] = last
        for i in self._held:
            if started[i] >= 0:
                change[started[i]] += size[i]
                change[ended[i] + 1] -= size[i]
        change[0] += problem.resident
        alive = list(accumulate(change[: len(sequence)]))
        alive = [nbytes + problem.extra[v] for nbytes, v in zip(alive, sequence, strict=True)]
        return ScheduleEvaluation(
            cost=sum(problem.cost[v] for v in sequence),
            peak_bytes=max(alive, default=problem.resident + self._idle_bytes),
            boundary=boundary,
            bytes_alive=tuple(alive),
        )

    def _check_order(self, first: Sequence[int], boundary: int) -> None:
        """Check that every node runs, and that first runs meet the problem's rules ``ordered`` and ``forward``."""
        problem, names = self._problem, self._problem.names
        for v in self._runnable:
            if first[v] < 0:
                raise ProblemError(f"'{names[v]}' never runs")
        for earlier, later in pairwise(problem.ordered):
            if first[earlier] > first[later]:
                raise ProblemError(
                    f"'{names[later]}' first runs at {first[later]}, before '{names[earlier]}' at "
                    f"{first[earlier]}, but the order of the two is fixed"
                )
        for v in problem.forward:
            if first[v] >= boundary:
                raise ProblemError(
                    f"'{names[v]}' first runs at {first[v]}, after the boundary at {boundary}, but belongs to forward"
                )


def least_peak(problem: ScheduleProblem) -> tuple[int, int]:
    """Return a lower bound on the peak of every schedule, and the node whose run takes that many bytes.

    The node is -1 if the values that stay in memory to the end of the schedule take the most bytes.
    """
    # During a run, memory holds at least its inputs, results and extra bytes, and what exists from start to end.
    # A value in `to_end` that a run makes may not exist yet during other runs.
    stays = set(problem.to_end)
    always = {i for i in problem.at_start if i in stays}
    base = problem.resident + sum(problem.size[i] for i in always)
    most, which = base + sum(problem.size[i] for i in stays - always), -1
    results = problem.results
    for v in problem.runnable:
        there = {u for u in problem.inputs[v] if u not in always}.union(results[v])
        nbytes = base + sum(problem.size[u] for u in there) + problem.extra[v]
        if nbytes > most:
            most, which = nbytes, v
    return most, which


def not_found(problem: ScheduleProblem, least_found: int) -> BudgetError:
    """Build the error for a search that found no schedule within the capacity, though one may exist."""
    return BudgetError(
        f"no schedule with a peak of {problem.capacity} bytes was found; the least found has {least_found}, "
        f"and it is proven only that none has less than {least_peak(problem)[0]}: raise the capacity, or give "
        "the solver more time"
    )
