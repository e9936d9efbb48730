"""Copies to the host as part of the step problem, so that searches over orders see when memory is free.

A value that is offloaded keeps its memory until it has been sent, and takes memory again from the moment its fetch
begins. For both there is a node of its own: one run that ends the memory in forward, behind the run beside which the copy
ended, and one that begins it anew in backward, before the run beside which the copy back began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.solvers.schedule_problem import ScheduleProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A value that is away between two runs of a schedule.

    Attributes:
        value: its node.
        nbytes: bytes that are away.
        sent: position of the run of forward after which they are free.
        fetched: position of the run of backward before which they are taken again.
    """

    value: int
    nbytes: int
    sent: int
    fetched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WithCopies:
    """A step problem with nodes for copies: those that fetch stand before its own nodes, all others behind them.

    Attributes:
        problem: the problem.
        sequence: the schedule that the copies were placed in, with their runs.
        boundary: position of its first run after the boundary.
        fetches: number of nodes that fetch.
        nodes: number of nodes of the problem without copies.
    """

    problem: ScheduleProblem
    sequence: tuple[int, ...]
    boundary: int
    fetches: int
    nodes: int

    def invert(self, sequence: Sequence[int], boundary: int) -> tuple[tuple[int, ...], int]:
        """A schedule of this problem as one of the problem without copies, and its boundary."""
        own = [v - self.fetches for v in sequence]
        before = sum(0 <= v < self.nodes for v in own[:boundary])
        return tuple(v for v in own if 0 <= v < self.nodes), before


def with_copies(
    problem: ScheduleProblem, sequence: Sequence[int], boundary: int, copies: Sequence[Copy]
) -> WithCopies:
    """Adds copies to a problem, and their runs to a schedule of it.

    What runs of forward that are made again read is not counted while it is away: they are not known here.
    """
    k, n = len(copies), len(problem)
    late = frozenset(problem.backward)
    fetch_of = {c.value: f for f, c in enumerate(copies)}
    inputs: list[tuple[int, ...]] = [()] * k
    for v, row in enumerate(problem.inputs):
        read = [fetch_of[u] for u in row if u in fetch_of] if v in late else []
        inputs.append((*(u + k for u in row), *read))
    for f, c in enumerate(copies):
        reader = sequence[c.fetched]
        if reader in late and f not in inputs[reader + k]:
            inputs[reader + k] = (*inputs[reader + k], f)
    away, sends = range(n + k, n + 2 * k), range(n + 2 * k, n + 3 * k)
    inputs += [()] * k
    inputs += [(a, sequence[c.sent] + k) for a, c in zip(away, copies, strict=True)]
    size = list(problem.size)
    for c in copies:
        size[c.value] -= c.nbytes
    nbytes = [c.nbytes for c in copies]
    part_of = [-1 if p < 0 else p + k for p in problem.part_of or [-1] * n]
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
        extra=(*nothing, *(problem.extra or [0] * n), *nothing, *nothing),
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
    sent: dict[int, list[int]] = {}
    fetched: dict[int, list[int]] = {}
    for f, c in enumerate(copies):
        sent.setdefault(c.sent, []).append(sends[f])
        fetched.setdefault(c.fetched, []).append(f)
    runs: list[int] = []
    for at, v in enumerate(sequence):
        runs += [*fetched.get(at, ()), v + k, *sent.get(at, ())]
    return WithCopies(
        problem=changed, sequence=tuple(runs), boundary=boundary + k, fetches=k, nodes=n
    )
