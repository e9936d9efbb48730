"""Aim at a peak: find a candidate within a limit, measure the candidate's peak, and correct the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from remat.planning.search.effort import DEFAULT
from remat.planning.search.pool import Measure, T


def aim(
    ask: Callable[[int], T | None],
    measure: Measure,
    wanted: int,
    *,
    start: int,
    rounds: int,
    last: T | None = None,
) -> Iterator[T]:
    """Yield candidates whose measured peak approaches a wanted peak.

    A candidate's measured peak differs from the limit within which the candidate was found, by similar bytes for
    similar candidates. The next limit is therefore the last limit plus the bytes by which the last measured peak is
    below the wanted peak.

    Args:
        ask: function that finds a candidate whose ``peak_bytes`` are within a limit; a result of None ends the search.
        measure: function that returns the peak of a candidate in bytes.
        wanted: the limit on the peak by ``measure``, in bytes.
        start: the limit on the peak for the first candidate, in bytes.
        rounds: maximum number of candidates to yield.
        last: a candidate that is known already.
    """
    limit = start
    # `low`: the highest limit whose candidate was within `wanted`; `high`: the lowest one whose candidate was not.
    low, high = 0, math.inf
    for index in range(rounds):
        candidate = ask(limit)
        if candidate is None:
            return
        yield candidate
        if index == rounds - 1:
            return  # measuring takes time
        room, same, last = (
            wanted - measure(candidate),
            last is not None and candidate.decision == last.decision,
            candidate,
        )
        if 0 <= room <= DEFAULT.aiming.near * wanted or (room > 0 and not candidate.cost):
            return
        if room < 0:
            # A search within this candidate's peak may find the candidate again.
            reached = candidate.peak_bytes or limit
            high = min(high, limit, max(low + 1, reached))
            moved = min(limit + min(room, -(wanted // DEFAULT.aiming.lowered)), reached - 1)
        else:
            low, moved = max(low, limit), limit + room
        if high - low <= wanted // DEFAULT.aiming.close:
            return
        # Peaks jump where operators stop fusing. So a limit that is not between `low` and `high` is replaced by their
        # midpoint.
        is_stuck = same and room > 0 and high < math.inf
        limit = moved if low < moved < high and not is_stuck else (low + int(high)) // 2
