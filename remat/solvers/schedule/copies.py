"""Represent offload copies as nodes of the schedule problem, so that solvers count the copies' memory.

An offloaded value keeps its memory until its copy to the host has ended. The value takes memory on the device again
when the copy back to the device begins. Three extra nodes for each offloaded value represent the copies. The *away*
node is a second result of the operator that makes the value. The away node holds the offloaded bytes in forward. The
*send* node reads the away node last, and comes after the run during which the copy to the host ends. The *fetch* node
in backward takes memory for the value again, before the run during which the copy back begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.solvers.schedule.problem import ScheduleProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A value that is offloaded between two runs of a schedule.

    Attributes:
        value: the node that makes the value.
        nbytes: bytes that are offloaded.
        freed: position, in the schedule, of the forward run after which the bytes are free.
        fetched: position, in the schedule, of the backward run before which the bytes take memory
            again.
    """

    value: int
    nbytes: int
    freed: int
    fetched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WithCopies:
    """A schedule problem extended by nodes for offload copies, with a schedule of the extended problem.

    Nodes are numbered in this order: the fetch nodes, the nodes of the original problem, the away
    nodes, the send nodes. Each offloaded value has one fetch node, one away node and one send node.

    Attributes:
        problem: the extended problem.
        sequence: the schedule of the extended problem.
        boundary: position in ``sequence`` at which backward begins.
        fetches: number of fetch nodes.
        nodes: number of nodes of the original problem.
    """

    problem: ScheduleProblem
    sequence: tuple[int, ...]
    boundary: int
    fetches: int
    nodes: int

    def invert(self, sequence: Sequence[int], boundary: int) -> tuple[tuple[int, ...], int]:
        """Convert the extended problem's schedule and boundary to a schedule and boundary of the original problem."""
        own = [v - self.fetches for v in sequence]
        before = sum(0 <= v < self.nodes for v in own[:boundary])
        return tuple(v for v in own if 0 <= v < self.nodes), before


def with_copies(
    problem: ScheduleProblem, sequence: Sequence[int], boundary: int, copies: Sequence[Copy]
) -> WithCopies:
    """Add nodes for offload copies to a schedule problem, and their runs to a schedule of the problem."""
    # Only backward nodes read a fetched value here, because `inputs` has one entry for all runs of a node. A forward node
    # that runs again in backward may read fetched values too; these bytes are not counted.
    k, n = len(copies), len(problem)
    late = frozenset(problem.backward)
    fetch_of = {c.value: f for f, c in enumerate(copies)}
    inputs: list[tuple[int, ...]] = [()] * k
    for v, row in enumerate(problem.inputs):
        read = [fetch_of[u] for u in row if u in fetch_of] if v in late else []
        inputs.append((*(u + k for u in row), *read))
    # A search must not move a fetch behind the run before which the copy begins, so that run's node also
    # reads the fetch node. Nor may a send move before the run after which its memory is free, so the send
    # node reads that run's node.
    for f, c in enumerate(copies):
        reader = sequence[c.fetched]
        if reader in late and f not in inputs[reader + k]:
            inputs[reader + k] = (*inputs[reader + k], f)
    away, sends = range(n + k, n + 2 * k), range(n + 2 * k, n + 3 * k)
    inputs += [()] * k
    inputs += [(a, sequence[c.freed] + k) for a, c in zip(away, copies, strict=True)]
    # The offloaded bytes become a second result (`away`) of the value's maker, last read by the send.
    size = list(problem.size)
    for c in copies:
        size[c.value] -= c.nbytes
    nbytes = [c.nbytes for c in copies]
    part_of = [-1 if p < 0 else p + k for p in problem.part_of]
    nothing = [0] * k
    names = [problem.names[c.value] for c in copies]
    changed = ScheduleProblem(
        names=(
            *(f"{name}:fetch" for name in names),
            *problem.names,
            *(f"{name}:away" for name in names),
            *(f"{name}:send" for name in names),
        ),
        inputs=tuple(inputs),
        cost=(*nothing, *problem.cost, *nothing, *nothing),
        size=(*nbytes, *size, *nbytes, *nothing),
        part_of=(
            *(-1 for _ in copies),
            *part_of,
            *(problem.maker(c.value) + k for c in copies),
            *(-1 for _ in copies),
        ),
        extra=(*nothing, *problem.extra, *nothing, *nothing),
        **{
            label: tuple(v + k for v in getattr(problem, label))
            for label in ("ordered", "at_start", "at_boundary", "to_end")
        },
        once=(*range(k), *(v + k for v in problem.once), *sends),
        forward=(*(v + k for v in problem.forward), *sends),
        backward=(*range(k), *(v + k for v in problem.backward)),
        capacity=problem.capacity,
        resident=problem.resident,
        unit=problem.unit,
    )
    sends_after: dict[int, list[int]] = {}
    fetches_before: dict[int, list[int]] = {}
    for f, c in enumerate(copies):
        sends_after.setdefault(c.freed, []).append(sends[f])
        fetches_before.setdefault(c.fetched, []).append(f)
    runs: list[int] = []
    for at, v in enumerate(sequence):
        runs += [*fetches_before.get(at, ()), v + k, *sends_after.get(at, ())]
    return WithCopies(
        problem=changed, sequence=tuple(runs), boundary=boundary + k, fetches=k, nodes=n
    )
