"""Copies to the host and back beside a schedule: when each must have been made, and who waits for it.

Each direction of the link is a queue. A value is sent from its last use in forward on, in the order of
those uses, and its memory is free once it has been sent; it is fetched in the order of first uses in
backward, and takes memory from the moment its fetch begins. Copies run beside the runs of the schedule.
Where memory, or a run that needs a value, cannot wait any longer, the schedule waits for the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value that is away from the device between two runs.

    Attributes:
        nbytes: its bytes.
        ready: the run of forward after which it may be sent.
        needed: the run of backward before which it must be back.
        send: time of the copy to the host.
        fetch: time of the copy back.
    """

    nbytes: int
    ready: int
    needed: int
    send: int
    fetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Runs that waited for the link, which was busy without a break until then.

    Attributes:
        begin: where the first copy of that stretch began: behind this run of forward, or, for fetches,
            where the last one ended: before this run of backward.
        at: the run before which (forward), or after which (backward), the schedule waited.
        time: for how long.
    """

    begin: int
    at: int
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the copies of a schedule stand.

    Attributes:
        freed: for each transfer, the run of forward after which its memory is free at the latest.
        fetched: for each transfer, the run of backward before which its fetch begins.
        bytes_alive: bytes alive at each run.
        sending: waits of forward.
        fetching: waits of backward.
    """

    freed: tuple[int, ...]
    fetched: tuple[int, ...]
    bytes_alive: tuple[int, ...]
    sending: tuple[Wait, ...]
    fetching: tuple[Wait, ...]

    @property
    def exposed_time(self) -> int:
        """Exposed transfer time: the schedule waits so long for the link."""
        return sum(w.time for w in (*self.sending, *self.fetching))


def place(
    times: Sequence[int],
    boundary: int,
    bytes_alive: Sequence[int],
    transfers: Sequence[Transfer],
    capacity: int | None,
) -> Placement:
    """Place copies to minimise the exposed transfer time of a schedule within a capacity.

    What has been sent is freed as soon as the runs beside it have taken as long; sooner, with a wait,
    only where memory is needed. Fetches mirror that. Everything sent has arrived when forward ends, and
    nothing is fetched before backward begins. For these queues no placement waits less: whatever a
    run needs freed, the head of the queue is done first, and starting it earlier delays nothing.

    Args:
        times: time of each run.
        boundary: the first run of backward.
        bytes_alive: bytes at each run; a transferred value counts up to ``ready`` and from ``needed`` on.
        transfers: what is sent and fetched.
        capacity: bytes that may be alive; None: any number. Where that many are not enough even when
            everything waits, ``bytes_alive`` of the answer says so.
    """
    n = len(times)
    alive = list(bytes_alive)
    order = sorted(range(len(transfers)), key=lambda i: (transfers[i].ready, i))
    queue = [(transfers[i].ready, transfers[i].nbytes, transfers[i].send, i) for i in order]
    head = alive[:boundary]
    freed, sending = _through(times[:boundary], head, queue, capacity)
    order = sorted(range(len(transfers)), key=lambda i: (-transfers[i].needed, -i))
    queue = [(n - 1 - t.needed, t.nbytes, t.fetch, i) for i in order for t in (transfers[i],)]
    tail = alive[: boundary - 1 if boundary else None : -1]
    mirrored, waits = _through(
        times[: boundary - 1 if boundary else None : -1], tail, queue, capacity
    )
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
    """Exposed transfer time of a schedule whose copies stand at given places, by the queues of `place`.

    Args:
        times: time of each run.
        boundary: the first run of backward.
        transfers: what is sent and fetched.
        freed: for each transfer, the run of forward after which its memory is free; not before ``ready``.
        fetched: for each transfer, the run of backward before which its fetch begins; not after ``needed``.
    """
    n, of = len(times), range(len(transfers))
    order = sorted(of, key=lambda i: (transfers[i].ready, i))
    queue = [(transfers[i].ready, transfers[i].send, freed[i]) for i in order]
    order = sorted(of, key=lambda i: (-transfers[i].needed, -i))
    back = [(n - 1 - transfers[i].needed, transfers[i].fetch, n - 1 - fetched[i]) for i in order]
    return _exposed_time(times[:boundary], queue) + _exposed_time(times[boundary:][::-1], back)


def _exposed_time(times: Sequence[int], queue: Sequence[tuple[int, int, int]]) -> int:
    """Exposed time of a queue of (run behind which it enters, time, run after which it has left)."""
    now = idle_from = exposed_time = entered = 0
    due: dict[int, int] = {}  # by runs: when all that leave behind them have left
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
    queue: Sequence[tuple[int, int, int, int]],
    capacity: int | None,
) -> tuple[dict[int, int], list[Wait]]:
    """Sends a queue of (run behind which it enters, bytes, time, which) through one direction.

    ``alive`` gets the bytes of what has not left yet added.

    Returns:
        The run after which each has left, and the waits.
    """
    now = idle_from = held = entered = begin = 0
    inside: deque[tuple[int, int, int, int]] = deque()
    left: dict[int, int] = {}
    waits: list[Wait] = []
    last = len(times) - 1
    for at in range(len(times) + 1):
        room = capacity if at <= last else -1  # at the end everything has left
        while inside:
            end, nbytes, which, begun = inside[0]
            full = room is not None and held > room - (alive[at] if at <= last else 0)
            if end > now and not full:
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
