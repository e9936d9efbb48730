"""Find when copies to and from the host run during a schedule, and how long the schedule waits for them.

Each direction of the host link is a queue of copies. Values are sent to the host in the order of their last uses in
forward, each after its last use. The memory of a sent value is free once its copy has ended. Values are fetched from
the host in the order of their first uses in backward. A value takes memory again when its fetch begins. Copies overlap
with runs of nodes. A run waits for the link if the run needs a value still being fetched, or the memory of a value
still being sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value that is offloaded between two runs.

    Attributes:
        nbytes: bytes of the value.
        ready: position of the forward run after which the value may be sent.
        needed: position of the backward run before which the value must be back.
        copy_time: time of each of the two copies, to the host and back to the device, in the unit
            of the times of runs.
    """

    nbytes: int
    ready: int
    needed: int
    copy_time: int


#: A copy in a queue: the position of the run after which it enters the queue, its bytes, its duration, and the index of
#: its transfer.
_Copy = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Positions of the copies in a schedule, and the resulting memory and waits.

    Attributes:
        freed: for each transfer, position of the forward run after which its memory is free.
        fetched: for each transfer, position of the backward run before which its fetch begins.
        bytes_alive: bytes alive on the device during each run.
        exposed_time: exposed transfer time: the total time for which the schedule waits for the link.
    """

    freed: tuple[int, ...]
    fetched: tuple[int, ...]
    bytes_alive: tuple[int, ...]
    exposed_time: int


def place(
    times: Sequence[int],
    boundary: int,
    bytes_alive: Sequence[int],
    transfers: Sequence[Transfer],
    capacity: int | None,
) -> Placement:
    """Choose when each copy runs in a schedule, so that runs wait for the link as little as the capacity allows.

    The memory of a sent value is free once the runs during its copy have taken as long as the copy. If a run needs the
    memory of a sent value sooner, the schedule waits. Every copy to the host ends before forward ends, and no copy back
    begins before backward. No other placement with the same order of copies waits less.

    Args:
        times: time of each run.
        boundary: position of the first run of backward.
        bytes_alive: bytes alive during each run, with those of a transferred value up to its
            position ``ready`` and from its position ``needed`` on.
        transfers: the values that are sent and fetched.
        capacity: bytes that may be alive; None: no limit. If the capacity is too small even when
            the schedule waits for every copy, ``bytes_alive`` of the result exceeds the capacity.
    """
    # Each send starts as early as possible, each fetch ends as late as possible, and neither delays another copy.
    n = len(times)
    sends, fetches = _queues(n, transfers)
    head, tail = list(bytes_alive[:boundary]), list(bytes_alive[boundary:])[::-1]
    freed, sending = _through(times[:boundary], head, sends, capacity)
    # Fetches are sends with time reversed, so both directions share `_through`.
    mirrored, fetching = _through(times[boundary:][::-1], tail, fetches, capacity)
    return Placement(
        freed=tuple(freed[i] for i in range(len(transfers))),
        fetched=tuple(n - 1 - mirrored[i] for i in range(len(transfers))),
        bytes_alive=(*head, *reversed(tail)),
        exposed_time=sending + fetching,
    )


def exposed_time_at(
    times: Sequence[int],
    boundary: int,
    transfers: Sequence[Transfer],
    freed: Sequence[int],
    fetched: Sequence[int],
) -> int:
    """Compute the exposed transfer time of a schedule whose copies are placed at given positions.

    The arguments ``freed`` and ``fetched`` mean the same as in `Placement`, and the copies queue in the same order as
    in `place`.
    """
    n = len(times)
    sends, fetches = _queues(n, transfers)
    mirrored = [n - 1 - position for position in fetched]
    _, sending = _through(times[:boundary], [0] * n, sends, None, freed)
    _, fetching = _through(times[boundary:][::-1], [0] * n, fetches, None, mirrored)
    return sending + fetching


def _queues(n: int, transfers: Sequence[Transfer]) -> tuple[list[_Copy], list[_Copy]]:
    """Return the queue of copies to the host and, with time reversed, the queue of copies to the device."""
    sends = sorted(enumerate(transfers), key=lambda entry: (entry[1].ready, entry[0]))
    fetches = sorted(enumerate(transfers), key=lambda entry: (-entry[1].needed, -entry[0]))
    return (
        [(t.ready, t.nbytes, t.copy_time, i) for i, t in sends],
        [(n - 1 - t.needed, t.nbytes, t.copy_time, i) for i, t in fetches],
    )


def _through(
    times: Sequence[int],
    alive: list[int],
    queue: Sequence[_Copy],
    capacity: int | None,
    latest: Sequence[int] | None = None,
) -> tuple[dict[int, int], int]:
    """Find when queued copies end, and add their bytes to ``alive``; return the run at which each ends, and the time waited.

    Runs wait for the link if the bytes of queued copies exceed the capacity, and at the end of the last run. For each
    transfer, ``latest`` may name an earlier run at whose end the copy must have ended.
    """
    now = idle_from = held = entered = exposed_time = 0
    last = len(times) - 1
    # Copies end in the order of the queue, so a copy ends no later than the copies behind it.
    due = [last if latest is None else latest[which] for *_, which in reversed(queue)]
    due = [*accumulate(due, min)][::-1]
    inside: deque[tuple[int, int, int, int]] = deque()
    left: dict[int, int] = {}
    for at in range(len(times) + 1):
        while inside:
            end, nbytes, which, until = inside[0]
            has_room = at > last or capacity is None or held <= capacity - alive[at]
            if end > now and has_room and at <= until:
                break
            exposed_time += max(0, end - now)
            now = max(now, end)
            inside.popleft()
            held -= nbytes
            left[which] = at - 1
        if at > last:
            break
        alive[at] += held
        now += times[at]
        while entered < len(queue) and queue[entered][0] == at:
            _, nbytes, time, which = queue[entered]
            idle_from = max(idle_from, now) + time
            inside.append((idle_from, nbytes, which, due[entered]))
            held += nbytes
            entered += 1
    return left, exposed_time
