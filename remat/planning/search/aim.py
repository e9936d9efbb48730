"""The loop that aims: ask at a limit, measure what is found, and correct the limit by the difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from remat.planning.search.pool import Measure, T

#: A limit that is too high falls by at least the wanted peak divided by this number.
_LOWERED = 1000
#: `aim` stops if two limits, one too low and one too high, differ by at most the wanted peak divided by this number.
_CLOSE = 500
#: `aim` stops if a candidate is below the wanted peak by at most this fraction of it.
NEAR = 0.005


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

    The limits at which candidates are asked for, and the peaks that are measured, differ by similar bytes for similar
    candidates. So each limit is moved by the room that the last candidate leaves.

    Args:
        ask: finds a candidate whose ``peak_bytes`` are within a limit; None ends the search.
        measure: the peak that counts, in bytes.
        wanted: the peak to stay within by ``measure``, in bytes.
        start: the first limit.
        rounds: maximum number of candidates.
        last: a candidate that is known already.
    """
    limit = start
    # `low`: the highest limit whose candidate was within `wanted`; `high`: the lowest one whose candidate was not.
    low, high = 0, math.inf
    for turn in range(rounds):
        found = ask(limit)
        if found is None:
            return
        yield found
        if turn == rounds - 1:
            return  # measuring takes time
        room, same, last = (
            wanted - measure(found),
            last is not None and found.decision == last.decision,
            found,
        )
        if 0 <= room <= NEAR * wanted or (room > 0 and not found.cost):
            return
        if room < 0:
            # A search within this candidate's peak may find the candidate again.
            reached = found.peak_bytes or limit
            high = min(high, limit, max(low + 1, reached))
            moved = min(limit + min(room, -(wanted // _LOWERED)), reached - 1)
        else:
            low, moved = max(low, limit), limit + room
        if high - low <= wanted // _CLOSE:
            return
        # Peaks jump where operators stop fusing. So a limit that is not between `low` and `high` is replaced by their
        # midpoint.
        again = same and room > 0 and high < math.inf
        limit = moved if low < moved < high and not again else (low + int(high)) // 2
