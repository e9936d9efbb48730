"""Ways to keep a value from forward to backward: as it is, packed, or in the host's memory.

To a schedule of the step problem come ways for the values that it carries over the boundary.
``evaluate_ways`` is the one yardstick: it follows the runs, the packing and the copies, in integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from remat.errors import ProblemError
from remat.solvers.schedule_problem import (
    ScheduleEvaluation,
    ScheduleProblem,
    evaluate_schedule,
)
from remat.solvers.transfers import Placement, Transfer, place

#: The way of a value that is sent to the host; 0 and up are packings, and what has no way is kept.
OFFLOADED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One way to pack a value.

    Attributes:
        name: what the pair is called.
        nbytes: bytes once it is packed.
        pack: time of packing.
        unpack: time of unpacking.
        pack_peak: bytes that packing has alive beside the value, what it makes included.
        unpack_peak: bytes that unpacking has alive, what it is given and what it makes included.
    """

    name: str
    nbytes: int
    pack: int
    unpack: int
    pack_peak: int
    unpack_peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysProblem:
    """A step problem whose values may also be packed or offloaded.

    Attributes:
        step: the step problem; its costs are times, its capacity bounds the device's memory.
        times: time of one run of each node, backward's own included.
        packings: for each node, the ways to pack its value.
        send: for each node, time of its copy to the host; -1: it must not be offloaded.
        fetch: for each node, time of the copy back; likewise.

    Raises:
        ProblemError: a field has another length than there are nodes, or a number is no int of 0 or more.
    """

    step: ScheduleProblem
    times: tuple[int, ...]
    packings: tuple[tuple[Packing, ...], ...]
    send: tuple[int, ...]
    fetch: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.step, ScheduleProblem):
            raise ProblemError(
                f"WaysProblem.step is of type {type(self.step).__name__}; expected a ScheduleProblem"
            )
        n = len(self.step)
        for label in ("times", "packings", "send", "fetch"):
            given = getattr(self, label)
            if not isinstance(given, (tuple, list)):
                raise ProblemError(
                    f"WaysProblem.{label} is of type {type(given).__name__}; expected a tuple with one entry for "
                    "each node of the step"
                )
            if len(given) != n:
                raise ProblemError(
                    f"WaysProblem.{label} has {len(given)} entries, expected {n}, one for "
                    "each node of the step"
                )
        for label, least in (("times", 0), ("send", -1), ("fetch", -1)):
            for i, x in enumerate(getattr(self, label)):
                if type(x) is not int or x < least:
                    raise ProblemError(
                        f"WaysProblem.{label}[{i}] ('{self.step.names[i]}') is {x!r}; expected an int of "
                        f"{least} or more"
                    )
        for i, both in enumerate(zip(self.send, self.fetch, strict=True)):
            if min(both) < 0 <= max(both):
                raise ProblemError(
                    f"WaysProblem.send[{i}] ('{self.step.names[i]}') is {both[0]} and fetch[{i}] is {both[1]}; "
                    "expected the times of both copies, or -1 twice: it must not be offloaded"
                )
        for i, row in enumerate(self.packings):
            if not isinstance(row, (tuple, list)) or not all(isinstance(p, Packing) for p in row):
                raise ProblemError(
                    f"WaysProblem.packings[{i}] ('{self.step.names[i]}') is {row!r}; expected a tuple of Packing"
                )
            for f in fields(Packing)[1:] if row else ():
                for p in row:
                    x = getattr(p, f.name)
                    if type(x) is not int or x < 0:
                        raise ProblemError(
                            f"WaysProblem.packings[{i}] ('{self.step.names[i]}') has {f.name}={x!r}; "
                            "expected an int of 0 or more"
                        )

    @property
    def overhead_free(self) -> int:
        """Cost of every node once."""
        return sum(self.step.cost)

    def ways_of(self, node: int) -> tuple[int, ...]:
        """The ways that a value has beside being kept."""
        ways = range(len(self.packings[node]))
        return (*ways, OFFLOADED) if self.send[node] >= 0 else tuple(ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A schedule that was followed once, for many evaluations of ways.

    Attributes:
        sequence: its runs.
        done: what it takes and costs with everything kept.
        idle: for each value that is carried over the boundary, its last use before and its first after.
        between: bytes alive between the run before each position and the run there.
    """

    sequence: tuple[int, ...]
    done: ScheduleEvaluation
    idle: dict[int, tuple[int, int]]
    between: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysEvaluation:
    """What a schedule with ways takes and costs.

    Attributes:
        cost: what runs again, packing and waiting together.
        packing: time of packing and unpacking.
        peak_bytes: most bytes alive on the device.
        bytes_alive: bytes alive at each run, without packing's own moments.
        offloaded: the values that are sent, in the order of ``placement``.
        placement: where copies stand, by positions of the schedule.
    """

    cost: int
    packing: int
    peak_bytes: int
    bytes_alive: tuple[int, ...]
    offloaded: tuple[int, ...]
    placement: Placement

    @property
    def waited(self) -> int:
        """Time that runs wait for the link."""
        return self.placement.waited


def follow(problem: WaysProblem, sequence: Sequence[int], boundary: int | None = None) -> Followed:
    """Follows a schedule, all values kept.

    Raises:
        ProblemError: it cannot run.
    """
    step = problem.step
    done = evaluate_schedule(step, sequence, boundary)
    edge = done.boundary
    parts: dict[int, list[int]] = {}
    for i, p in enumerate(step.part_of):
        if p >= 0:
            parts.setdefault(p, []).append(i)
    stays = {*step.to_end, *step.at_start, *step.at_boundary}
    ready: dict[int, int] = {}
    needed: dict[int, int] = {}
    size, inputs, extra = step.size, step.inputs, step.extra
    between = []
    for at, v in enumerate(sequence):
        mine = parts.get(v)
        made = size[v] + (sum(size[i] for i in mine) if mine else 0)
        between.append(done.bytes_alive[at] - made - (extra[v] if extra else 0))
        if at < edge:
            for u in inputs[v]:
                ready[u] = at
            ready[v] = at
            for i in mine or ():
                ready[i] = at
        else:
            for u in inputs[v]:
                if u in ready and u not in needed:
                    needed[u] = at
            for made_again in (v, *(mine or ())):
                if made_again not in needed:
                    ready.pop(made_again, None)  # its later run is what backward reads
    idle = {
        i: (ready[i], needed[i])
        for i in sorted(needed)
        if i not in stays and i in ready and size[i]
    }
    return Followed(sequence=tuple(sequence), done=done, idle=idle, between=tuple(between))


def evaluate_ways(
    problem: WaysProblem,
    followed: Followed,
    ways: Mapping[int, int],
    capacity: int | None,
) -> WaysEvaluation:
    """Follows packing and copies through a schedule.

    Args:
        problem: the problem.
        followed: the schedule.
        ways: the way of each value that is not just kept; a value that is not carried over the
            boundary has none, whatever stands here.
        capacity: bytes within which copies are placed; None: any number.

    Raises:
        ProblemError: a value may not be kept that way.
    """
    step, sequence, done = problem.step, followed.sequence, followed.done
    times = [problem.times[v] for v in sequence]
    used = {v: way for v, way in ways.items() if v in followed.idle}
    for v, way in used.items():
        if way not in problem.ways_of(v):
            raise ProblemError(
                f"'{step.names[v]}' has way {way}; expected one of {problem.ways_of(v)}"
            )
    packed = sorted(v for v, way in used.items() if way >= 0)
    offloaded = tuple(sorted(v for v, way in used.items() if way == OFFLOADED))
    alive, boundary = list(done.bytes_alive), done.boundary
    at_run: Sequence[int] = range(len(sequence))
    away: list[tuple[int, int, int]] = []
    if packed:
        after: dict[int, list[int]] = {}
        before: dict[int, list[int]] = {}
        for v in packed:
            after.setdefault(followed.idle[v][0], []).append(v)
            before.setdefault(followed.idle[v][1], []).append(v)
        arrives = sum(step.size[i] for i in step.at_boundary)
        places: list[int] = []
        times, alive, at_run = [], [], places
        packs: dict[int, int] = {}
        unpacks: dict[int, int] = {}
        for at, v in enumerate(sequence):
            for u in before.get(at, ()):
                unpacks[u] = len(times)
                times.append(problem.packings[u][used[u]].unpack)
                alive.append(followed.between[at])
            places.append(len(times))
            times.append(problem.times[v])
            alive.append(done.bytes_alive[at])
            for u in after.get(at, ()):
                packs[u] = len(times)
                times.append(problem.packings[u][used[u]].pack)
                alive.append(followed.between[at + 1] - (arrives if at + 1 == boundary else 0))
        boundary = boundary + len(packs)
        for v in packed:
            how = problem.packings[v][used[v]]
            alive[packs[v]] += how.pack_peak
            alive[unpacks[v]] += how.unpack_peak - step.size[v]
            away.append((packs[v] + 1, unpacks[v], step.size[v] - how.nbytes))
    transfers = []
    for v in offloaded:
        first, last = (at_run[at] for at in followed.idle[v])
        away.append((first + 1, last, step.size[v]))
        transfers.append(
            Transfer(
                nbytes=step.size[v],
                ready=first,
                needed=last,
                send=problem.send[v],
                fetch=problem.fetch[v],
            )
        )
    placed = place(times, boundary, _without(alive, away), transfers, capacity)
    packing = sum(
        problem.packings[v][used[v]].pack + problem.packings[v][used[v]].unpack for v in packed
    )
    return WaysEvaluation(
        cost=done.cost - problem.overhead_free + packing + placed.waited,
        packing=packing,
        peak_bytes=max(placed.bytes_alive, default=done.peak_bytes),
        bytes_alive=tuple(placed.bytes_alive[at] for at in at_run),
        offloaded=offloaded,
        placement=placed,
    )


def _without(alive: list[int], away: list[tuple[int, int, int]]) -> list[int]:
    """Bytes alive without those that are away, given as (first moment, moment it is back, bytes)."""
    change = [0] * (len(alive) + 1)
    for start, end, nbytes in away:
        change[start] += nbytes
        change[end] -= nbytes
    return [a - gone for a, gone in zip(alive, accumulate(change), strict=False)]
