"""Convert a schedule problem to the form that the compiled kernel's search reads.

The kernel's form is called the *core* of the schedule problem. The kernel's form has only nodes that read and make
values. In the kernel's form, additional nodes and values express the other rules of the problem. An added first node
makes the values that exist from the start. An added last node reads the values that stay to the end. The boundary, the
point where backward begins, is represented by a node too. If a node must run before another node, the later node reads
a value of 0 bytes that the earlier node makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule

#: Sums of bytes or costs up to this number are exact in the kernel's search, which uses doubles.
_EXACT = 2**52


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCore:
    """Columns of a schedule problem, extended by a first node, a boundary node and a last node.

    Attributes:
        cost: cost of one run of each node; the problem's own nodes come first.
        extra: bytes that a run of each node takes besides the values that it reads and makes.
        once: for each node, 1 if it may not run again, otherwise 0.
        reads: for each node, the values that it reads.
        maker: for each value, the node that makes it.
        size: bytes of each value.
        capacity: bytes that may be alive, without the resident bytes; 0 if there is no capacity.
        start: a legal sequence of the core: every node with runs of its own once, in the problem's
            order.
        nodes: number of the problem's own nodes.
        boundary: index of the boundary node; -1 for a problem without backward nodes.
    """

    cost: tuple[int, ...]
    extra: tuple[int, ...]
    once: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    maker: tuple[int, ...]
    size: tuple[int, ...]
    capacity: int
    start: tuple[int, ...]
    nodes: int
    boundary: int

    def columns(self) -> tuple[Sequence[int], ...]:
        """Return the arguments of the kernel's class `ScheduleGraph`, with large costs and bytes scaled down."""
        # Bytes are rounded up, so a schedule that fits in the kernel also fits the problem.
        starts = (0, *accumulate(map(len, self.reads)))
        return (
            _scaled(self.cost),
            self.scaled_bytes(self.extra),
            self.once,
            starts,
            tuple(chain.from_iterable(self.reads)),
            self.maker,
            self.scaled_bytes(self.size),
        )

    @property
    def shift(self) -> int:
        """Number of bits by which `columns` shifts byte counts to the right; 0 if their sum is below 2**50."""
        return max(0, (8 * (sum(self.size) + sum(self.extra))).bit_length() - _EXACT.bit_length())

    def scaled_bytes(self, numbers: Sequence[int]) -> Sequence[int]:
        """Divide byte counts by ``2**self.shift``, rounded up."""
        return [-(-x >> self.shift) for x in numbers] if self.shift else numbers

    def invert(self, sequence: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Convert the kernel's schedule to a schedule of the problem, with the position at which backward begins."""
        at = sequence.index(self.boundary) if self.boundary >= 0 else len(sequence)
        runs = tuple(v for v in sequence if v < self.nodes)
        return runs, sum(v < self.nodes for v in sequence[:at])

    def apply(
        self, problem: ScheduleProblem, sequence: Sequence[int], boundary: int | None = None
    ) -> tuple[int, ...]:
        """Convert a schedule to the kernel's form; by default, backward begins as late as possible."""
        head, tail = self.nodes, self.nodes + 1
        if self.boundary < 0:
            return (head, *sequence, tail)
        at = evaluate_schedule(problem, sequence, boundary).boundary
        return (head, *sequence[:at], self.boundary, *sequence[at:], tail)


def _scaled(costs: Sequence[int]) -> Sequence[int]:
    shift = max(0, (64 * sum(costs)).bit_length() - _EXACT.bit_length())
    return [x >> shift for x in costs] if shift else costs


def schedule_core(problem: ScheduleProblem) -> ScheduleCore:
    """Convert a schedule problem to the form that the compiled kernel's search reads."""
    n = len(problem)
    head, tail = n, n + 1
    boundary = n + 2 if problem.backward else -1
    count = n + 3 if problem.backward else n + 2
    maker, size = [problem.maker(i) for i in range(n)], list(problem.size)
    for i in problem.at_start:
        maker[i] = head
    for i in problem.at_boundary:
        maker[i] = boundary
    for i in problem.given - problem.used:  # neither read nor kept to the end: no memory
        size[i] = 0
    reads: list[tuple[int, ...]] = [tuple(dict.fromkeys(row)) for row in problem.inputs]
    reads += [()] * (count - n)
    reads[tail] = tuple(problem.to_end)

    def token(v: int) -> int:
        """Add a value of 0 bytes that node ``v`` makes, and return the value's index."""
        maker.append(v)
        size.append(0)
        return len(size) - 1

    runnable = problem.runnable
    begun = token(head)
    # In the kernel only reads order the runs. So nodes without inputs read a value of the first node, and
    # the last node reads a value of every node (below).
    for v in runnable:
        if not reads[v]:
            reads[v] = (begun,)
    for earlier, later in pairwise(problem.ordered):
        reads[later] += (token(earlier),)
    if boundary >= 0:
        reads[boundary] = (begun, *(token(v) for v in problem.forward))
        over = token(boundary)
        for v in problem.backward:
            reads[v] += (over,)
    reads[tail] += tuple(token(v) for v in runnable)
    pinned = {*problem.once, head, tail, boundary}
    order = list(problem.order)
    if boundary >= 0:
        order.insert(len(order) - len(problem.backward), boundary)
    return ScheduleCore(
        cost=(*problem.cost, *(0,) * (count - n)),
        extra=(*problem.extra, *(0,) * (count - n)),
        once=tuple(int(v in pinned) for v in range(count)),
        reads=tuple(reads),
        maker=tuple(maker),
        size=tuple(size),
        capacity=0 if problem.capacity is None else problem.capacity - problem.resident,
        start=(head, *order, tail),
        nodes=n,
        boundary=boundary,
    )
