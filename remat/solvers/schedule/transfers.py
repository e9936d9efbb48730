"""Find when copies to and from the host run during a schedule, and how long the schedule waits for them.

Each direction of the host link is a queue of copies. Values are sent to the host in the order of
their last uses in forward, each after its last use. The memory of a sent value is free once its copy
has ended. Values are fetched from the host in the order of their first uses in backward. A value takes
memory again when its fetch begins. Copies overlap with runs of nodes. The schedule waits for the link
if a run needs a value that is still being fetched, or memory of a value that is still being sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


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
class Wait:
    """A pause of the schedule, until a copy on the host link has ended.

    In forward, the node run ``at`` cannot start until a copy ends: the link to the host has been busy
    without a pause since the end of the node run ``begin``. A wait at the end of forward comes after the last run of
    forward, and ``at`` is this run. In backward, time is mirrored: the schedule waits after the run
    ``at``, and the link stays busy until the run ``begin`` starts.

    Attributes:
        begin: position of the run at which the busy period of the link begins (in forward) or ends
            (in backward).
        at: position of the run next to the wait.
        time: length of the wait, in the unit of the times of runs.
    """

    begin: int
    at: int
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Positions of the copies in a schedule, and the resulting memory and waits.

    Attributes:
        freed: for each transfer, position of the forward run after which its memory is free.
        fetched: for each transfer, position of the backward run before which its fetch begins.
        bytes_alive: bytes alive on the device during each run.
        sending: waits of forward for copies to the host.
        fetching: waits of backward for copies to the device.
    """

    freed: tuple[int, ...]
    fetched: tuple[int, ...]
    bytes_alive: tuple[int, ...]
    sending: tuple[Wait, ...]
    fetching: tuple[Wait, ...]

    @property
    def exposed_time(self) -> int:
        """Exposed transfer time: the total time for which the schedule waits for the link."""
        return sum(w.time for w in (*self.sending, *self.fetching))


def place(
    times: Sequence[int],
    boundary: int,
    bytes_alive: Sequence[int],
    transfers: Sequence[Transfer],
    capacity: int | None,
) -> Placement:
    """Choose when each copy runs in a schedule, so that runs wait for the link as little as the capacity allows.

    The memory of a sent value is free once the runs during its copy have taken as long as the copy. If a
    run needs the memory sooner, the schedule waits. Every copy to the host ends before forward ends, and
    no copy back begins before backward. No other placement with the same order of copies waits less.

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
    alive = list(bytes_alive)
    sends, fetches = _queues(n, transfers)
    head = alive[:boundary]
    freed, sending = _through(times[:boundary], head, sends, capacity)
    # Fetches are sends with time reversed, so both directions share `_through`.
    tail = alive[boundary:][::-1]
    mirrored, waits = _through(times[boundary:][::-1], tail, fetches, capacity)
    return Placement(
        freed=tuple(freed[i] for i in range(len(transfers))),
        fetched=tuple(n - 1 - mirrored[i] for i in range(len(transfers))),
        bytes_alive=(*head, *reversed(tail)),
        sending=tuple(sending),
        fetching=tuple(Wait(begin=n - 1 - w.begin, at=n - 1 - w.at, time=w.time) for w in waits),
    )


def exposed_time_at(
    times: Sequence[int],
    boundary: int,
    transfers: Sequence[Transfer],
    freed: Sequence[int],
    fetched: Sequence[int],
) -> int:
    """Compute the exposed transfer time of a schedule whose copies are placed at given positions.

    ``freed`` and ``fetched`` are as in `Placement`, and the copies queue in the same order as in `place`.
    """
    n = len(times)
    outward, back = _queues(n, transfers)
    sends = [(entry, time, freed[i]) for entry, _, time, i in outward]
    fetches = [(entry, time, n - 1 - fetched[i]) for entry, _, time, i in back]
    return _exposed_time(times[:boundary], sends) + _exposed_time(times[boundary:][::-1], fetches)


def _queues(n: int, transfers: Sequence[Transfer]) -> tuple[list[_Copy], list[_Copy]]:
    """Return the queue of the copies to the host, and the queue of the copies to the device with time reversed."""
    sends = sorted(enumerate(transfers), key=lambda entry: (entry[1].ready, entry[0]))
    fetches = sorted(enumerate(transfers), key=lambda entry: (-entry[1].needed, -entry[0]))
    return (
        [(t.ready, t.nbytes, t.copy_time, i) for i, t in sends],
        [(n - 1 - t.needed, t.nbytes, t.copy_time, i) for i, t in fetches],
    )


def _exposed_time(times: Sequence[int], queue: Sequence[tuple[int, int, int]]) -> int:
    """Compute how long runs wait for copies, each (run after which it queues, duration, deadline run)."""
    now = idle_from = exposed_time = entered = 0
    due: dict[int, int] = {}  # for each run, the time at which the copies due at its end have ended
    for at, time in enumerate(times):
        now += time
        while entered < len(queue) and queue[entered][0] == at:
            _, copying, leaves = queue[entered]
            idle_from = max(idle_from, now) + copying
            due[leaves] = idle_from
            entered += 1
        late = max(0, due.get(at, 0) - now)
        exposed_time, now = exposed_time + late, now + late
    return exposed_time


def _through(
    times: Sequence[int],
    alive: list[int],
    queue: Sequence[_Copy],
    capacity: int | None,
) -> tuple[dict[int, int], list[Wait]]:
    """Find when queued copies end, add their bytes to ``alive``; return the run at which each ends, and the waits."""
    now = idle_from = held = entered = begin = 0
    inside: deque[tuple[int, int, int, int]] = deque()
    left: dict[int, int] = {}
    waits: list[Wait] = []
    last = len(times) - 1
    for at in range(len(times) + 1):
        room = capacity if at <= last else -1  # after the last run, -1 makes every copy end
        while inside:
            end, nbytes, which, begun = inside[0]
            has_no_room = room is not None and held > room - (alive[at] if at <= last else 0)
            if end > now and not has_no_room:
                break
            if end > now:
                waits.append(Wait(begin=begun, at=min(at, last), time=end - now))
                now = end
            inside.popleft()
            held -= nbytes
            left[which] = at - 1
        if at > last:
            break
        alive[at] += held
        now += times[at]
        while entered < len(queue) and queue[entered][0] == at:
            _, nbytes, time, which = queue[entered]
            if idle_from <= now:
                begin = at
            idle_from = max(idle_from, now) + time
            inside.append((idle_from, nbytes, which, begin))
            held += nbytes
            entered += 1
    return left, waits
