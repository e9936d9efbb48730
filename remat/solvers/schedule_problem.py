"""The step problem: the order in which nodes run, and which run again, within a peak of memory.

A *schedule* is a sequence of runs. A node may stand in it several times: a later run makes its value
anew, so that the earlier one need not be kept until then. ``evaluate_schedule`` is the one yardstick:
it follows the runs and counts bytes and cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from remat.errors import BudgetError, ProblemError
from remat.solvers import columns
from remat.solvers.columns import as_integer
from remat.solvers.problem import Limits, Problem
from remat.solvers.solution import Schedule, ScheduleAnswer

#: Runs that a schedule may have for each node, on average; more are taken for a solver's mistake.
MOST_RUNS_PER_NODE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProblem(Problem[Schedule]):
    """Run every node at least once, at the least summed cost, with no more bytes alive than there are.

    Nodes are numbered in an order in which they can run: each input stands before its reader. What
    follows ``capacity`` has neutral defaults: a plain graph needs none of it. Sequences of integers may
    be any ordered iterables; they are kept as tuples of ``int``. Sums may not exceed 2**63 - 1.

    While a run goes on, memory holds the values that later runs read, what the run makes, its ``extra``
    bytes, and the ``resident`` ones. A run reads the latest earlier run of each of its inputs; a value
    stays from its run to the last run that reads it.

    Attributes:
        names: what each node is called, for messages; all different.
        inputs: for each node, the nodes it reads.
        cost: cost of one run, in ``unit``.
        size: bytes of the value that a run makes.
        capacity: bytes that may be alive at a time; None: as many as one likes.
        part_of: for each node, the node that makes it along with its own value (an operator with
            several results), and -1 for one that runs by itself. Parts have no runs, inputs, cost or
            extra bytes of their own. Empty: there are none.
        extra: bytes that a run takes besides what it reads and makes, one for each node. Empty: none.
        once: nodes that may not run a second time.
        ordered: nodes whose first runs come in this order.
        at_start: nodes that nobody runs: their values are there from the start to their last use.
        forward: nodes that first run before the boundary.
        backward: nodes that run only after the boundary; whoever reads what is there only then is added.
            The boundary lies just before the first of their runs.
        at_boundary: nodes that nobody runs: their values are there from the boundary to their last use.
        to_end: nodes whose value stays from its last run to the end.
        resident: bytes that are there all the time.
        unit: unit of ``cost``.
        known: schedules that a solver may start from, whether or not they fit. No part of the problem.

    Raises:
        ProblemError: an argument is not what it must be; the message names it, with the node.
    """

    kind: ClassVar[str] = "schedule"
    method: ClassVar[str] = "solve_schedule"
    answer: ClassVar[type[ScheduleAnswer]] = ScheduleAnswer
    expected: ClassVar[str] = (
        "nodes are due: return an iterable of nodes in the order in which they run, or "
        "ScheduleAnswer(sequence, bound)"
    )
    solution: ClassVar[type[Schedule]] = Schedule
    bytes_taken: ClassVar[str] = "peak_bytes"
    bound_text: ClassVar[str] = "every schedule costs at least"
    own_text: ClassVar[str] = "its own schedule costs"

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
    known: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        where = "ScheduleProblem."
        names = columns.texts(where + "names", self.names)
        if len(set(names)) != len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise ProblemError(
                f"{where}names has {columns.short(twice)} twice; expected different names"
            )
        last = len(names) - 1
        self._put(names=names, inputs=columns.earlier_nodes(where + "inputs", self.inputs, names))
        for label in ("cost", "size", "extra"):
            given = getattr(self, label)
            empty = label == "extra" and not given
            self._put(**{label: () if empty else columns.amounts(where + label, given, names)})
        if self.part_of:
            parts = columns.sequence(where + "part_of", self.part_of, len(names))
            self._put(part_of=columns.integers(where + "part_of", parts, -1, last, names=names))
        else:
            self._put(part_of=())
        for label in _SETS:
            self._put(**{label: columns.integers(where + label, getattr(self, label), 0, last)})
        known = enumerate(columns.sequence(where + "known", self.known))
        self._put(
            resident=columns.integer(where + "resident", self.resident),
            capacity=columns.capacity(where + "capacity", self.capacity),
            known=tuple(columns.integers(f"{where}known[{i}]", k, 0, last) for i, k in known),
        )
        self._check_roles()

    def _check_roles(self) -> None:
        """Refuses nodes whose roles contradict each other."""
        for label in _SETS:
            if len(set(getattr(self, label))) != len(getattr(self, label)):
                raise ProblemError(f"ScheduleProblem.{label} names a node twice")
        for this, that in (("at_start", "at_boundary"), ("forward", "backward")):
            for i in set(getattr(self, this)) & set(getattr(self, that)):
                raise ProblemError(
                    f"ScheduleProblem.{this} and .{that} both name '{self.names[i]}'"
                )
        given = self.given
        running = {
            label: set(getattr(self, label)) for label in ("once", "ordered", "forward", "backward")
        }
        running["part_of"] = {i for i, p in enumerate(self.part_of) if p >= 0 and i in given}
        for i in sorted(given | self.parts):
            what = "is there without a run" if i in given else "is part of another node"
            for label, nodes in running.items():
                if i in nodes:
                    raise self._misnamed(label, i, what)
            if self.inputs[i] or self.cost[i] or self.extra_bytes(i):
                raise ProblemError(
                    f"ScheduleProblem has inputs, a cost or extra bytes for '{self.names[i]}', which {what}; "
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
        self._put(backward=tuple(i for i in sorted(runs) if late[i]))
        if self.at_boundary and not self.backward:
            raise ProblemError(
                f"ScheduleProblem.at_boundary names '{self.names[self.at_boundary[0]]}', but no node runs after the "
                "boundary; expected some in backward, or one that reads it"
            )
        for one, other in pairwise(self.ordered):
            if one >= other or late[one] > late[other]:
                raise ProblemError(
                    f"ScheduleProblem.ordered has '{self.names[one]}' before '{self.names[other]}'; expected "
                    "nodes in the problem's own order, those after the boundary last"
                )
        for i in self.forward:
            if late[i]:
                why = "reads what is only there after the boundary"
                raise self._misnamed("forward", i, why)

    def _late(self) -> bytearray:
        """For each node whether it runs after the boundary only, or is there only then."""
        late = bytearray(len(self))
        for i in (*self.backward, *self.at_boundary):
            late[i] = 1
        behind = dict(pairwise(reversed(self.ordered)))
        for i, row in enumerate(self.inputs):
            if i in behind and behind[i] < i:
                late[i] |= late[behind[i]]
            maker = self.maker(i)
            late[i] |= late[maker] if maker != i else any(late[j] for j in row)
        return late

    def _misnamed(self, label: str, node: int, why: str) -> ProblemError:
        return ProblemError(f"ScheduleProblem.{label} names '{self.names[node]}', which {why}")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def given(self) -> frozenset[int]:
        """Nodes that never run: their values exist from the start or from the boundary."""
        return frozenset((*self.at_start, *self.at_boundary))

    @property
    def parts(self) -> frozenset[int]:
        """The nodes that another node makes along with its own value."""
        return frozenset(i for i, maker in enumerate(self.part_of) if maker >= 0)

    @property
    def runnable(self) -> tuple[int, ...]:
        """The nodes that run: all that are neither given nor parts."""
        idle = self.given | self.parts
        return tuple(i for i in range(len(self)) if i not in idle)

    @property
    def used(self) -> frozenset[int]:
        """Nodes whose value is read, or stays to the end."""
        return frozenset(self.to_end).union(*self.inputs)

    @property
    def results(self) -> list[list[int]]:
        """For each node the values that its run makes, its own first."""
        made = [[i] for i in range(len(self))]
        for i in sorted(self.parts):
            made[self.part_of[i]].append(i)
        return made

    def extra_bytes(self, node: int) -> int:
        """Bytes of a run besides its inputs and its result."""
        return self.extra[node] if self.extra else 0

    def maker(self, node: int) -> int:
        """The node whose run makes a node's value."""
        return self.part_of[node] if self.part_of and self.part_of[node] >= 0 else node

    def knowing(self, known: Iterable[Sequence[int]]) -> ScheduleProblem:
        """The same problem with schedules to start from."""
        return self._with(known=tuple(tuple(k) for k in known))

    @property
    def order(self) -> tuple[int, ...]:
        """Every node that runs, once, in the problem's own order; those of backward last."""
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
        try:
            done = evaluate_schedule(self, choice)
        except ProblemError as error:
            raise ProblemError(f"returned a schedule that cannot run: {error}") from None
        return {
            "sequence": choice,
            "cost": done.cost,
            "peak_bytes": done.peak_bytes,
            "boundary": done.boundary,
        }

    def excess(self, figures: Mapping[str, Any]) -> str:
        runs = figures["sequence"]
        at = evaluate_schedule(self, runs).peak_at
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


#: How `ScheduleEvaluator` tells nodes that may run once only, and those that have no runs of their own.
_ONCE, _NEVER = 1, 2
_SETS = ("once", "ordered", "at_start", "forward", "backward", "at_boundary", "to_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEvaluation:
    """What a schedule takes and costs.

    Attributes:
        cost: summed cost of all runs.
        peak_bytes: most bytes alive at a time.
        peak_at: position of the run that goes on then; 0 for a schedule without runs.
        boundary: position of the first run after the boundary; the length where there is none.
        bytes_alive: bytes alive at each position.
    """

    cost: int
    peak_bytes: int
    peak_at: int
    boundary: int
    bytes_alive: tuple[int, ...]


def evaluate_schedule(
    problem: ScheduleProblem, sequence: Sequence[int], boundary: int | None = None
) -> ScheduleEvaluation:
    """Follows a schedule run by run; `ScheduleEvaluator` follows many of one problem.

    Args:
        problem: the problem; its capacity plays no part.
        sequence: nodes in the order in which they run.
        boundary: position of the first run after the boundary; None: as late as may be.

    Raises:
        ProblemError: the schedule cannot run: it names the first run that is wrong, and why.
    """
    return ScheduleEvaluator(problem).evaluate(sequence, boundary)


class ScheduleEvaluator:
    """Follows schedules of one problem run by run.

    Args:
        problem: the problem; its capacity plays no part.
    """

    def __init__(self, problem: ScheduleProblem) -> None:
        self._problem, self._results = problem, problem.results
        self._runnable = problem.runnable
        self._backward, given, used = set(problem.backward), problem.given, problem.used
        #: What is given takes memory only where it is used.
        self._idle_bytes = sum(problem.size[i] for i in given & used)
        self._held = [i for i in range(len(problem)) if i in used or i not in given]
        #: Nodes that may not run, or not again.
        self._special = bytearray(len(problem))
        for i in problem.once:
            self._special[i] = _ONCE
        for i in given | problem.parts:
            self._special[i] = _NEVER

    def evaluate(self, sequence: Sequence[int], boundary: int | None = None) -> ScheduleEvaluation:
        """What a schedule takes and costs; see `evaluate_schedule`."""
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
        started = [-1] * n  # position at which the value of each node that is there now was made
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
            for made in results[v]:
                if started[made] >= 0:
                    change[started[made]] += size[made]
                    change[ended[made] + 1] -= size[made]
                started[made] = ended[made] = position
        if boundary >= len(sequence):
            for i in problem.at_boundary:
                started[i] = -1
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
        if problem.extra:
            alive = [nbytes + problem.extra[v] for nbytes, v in zip(alive, sequence, strict=True)]
        peak = max(alive, default=problem.resident + self._idle_bytes)
        return ScheduleEvaluation(
            cost=sum(problem.cost[v] for v in sequence),
            peak_bytes=peak,
            peak_at=alive.index(peak) if alive else 0,
            boundary=boundary,
            bytes_alive=tuple(alive),
        )

    def _check_order(self, first: Sequence[int], boundary: int) -> None:
        """Refuses a schedule by the positions of first runs."""
        problem, names = self._problem, self._problem.names
        for v in self._runnable:
            if first[v] < 0:
                raise ProblemError(f"'{names[v]}' never runs")
        for one, other in pairwise(problem.ordered):
            if first[one] > first[other]:
                raise ProblemError(
                    f"'{names[other]}' first runs at {first[other]}, before '{names[one]}' at "
                    f"{first[one]}, but the order of the two is fixed"
                )
        for v in problem.forward:
            if first[v] >= boundary:
                raise ProblemError(
                    f"'{names[v]}' first runs at {first[v]}, after the boundary at {boundary}, but belongs to forward"
                )


def least_peak(problem: ScheduleProblem) -> tuple[int, int]:
    """Bytes that every schedule has alive at some moment, and the node whose run shows it (-1: the end).

    A run has its inputs and its results in memory, and whatever is there all the time. At the end
    all that stays is there.
    """
    stays = set(problem.to_end)
    always = {i for i in problem.at_start if i in stays}
    base = problem.resident + sum(problem.size[i] for i in always)
    most, which = base + sum(problem.size[i] for i in stays - always), -1
    results = problem.results
    for v in problem.runnable:
        there = {u for u in problem.inputs[v] if u not in always}.union(results[v])
        nbytes = base + sum(problem.size[u] for u in there) + problem.extra_bytes(v)
        if nbytes > most:
            most, which = nbytes, v
    return most, which


def not_found(problem: ScheduleProblem, least_found: int) -> BudgetError:
    """The error for a capacity that no schedule was found for, though none is proven not to exist."""
    return BudgetError(
        f"no schedule with a peak of {problem.capacity} bytes was found; the least found has {least_found}, "
        f"and it is proven only that none has less than {least_peak(problem)[0]}: raise the capacity, or give "
        "the solver more time"
    )
