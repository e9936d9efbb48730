"""Find the Pareto-optimal items by bytes and cost, their lower convex hull, and their knee."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from remat.errors import ProblemError

T = TypeVar("T")


def pareto(items: Iterable[T], of: Callable[[T], tuple[int, int]]) -> list[T]:
    """Return the Pareto-optimal items by their (bytes, cost), fewest bytes first; the first of equal items is kept."""
    front: list[T] = []
    for item in sorted(items, key=of):
        if not front or of(item)[1] < of(front[-1])[1]:
            front.append(item)
    return front


def lower_hull(front: Iterable[T], of: Callable[[T], tuple[int, int]]) -> list[T]:
    """Return the vertices of the lower convex hull of the items that `pareto` returned, fewest bytes first."""
    hull: list[T] = []
    for item in front:
        while len(hull) > 1:
            (a_bytes, a_cost), (b_bytes, b_cost), (c_bytes, c_cost) = map(of, (*hull[-2:], item))
            if (b_cost - a_cost) * (c_bytes - a_bytes) < (c_cost - a_cost) * (b_bytes - a_bytes):
                break
            hull.pop()  # on or above the line between its neighbours
        hull.append(item)
    return hull


def knee(points: Sequence[tuple[int, int]], by: str) -> int:
    """Return the index of the point beyond which more bytes lower the cost only a little.

    Bytes and cost are scaled to [0, 1] over the points. If all points have equal bytes or equal
    costs, the last index is returned.

    Args:
        points: (bytes, cost) of Pareto-optimal items, fewest bytes first.
        by: ``"origin"``: the point nearest to (least bytes, least cost). ``"chord"``: the point
            farthest below the line from the first to the last point.

    Raises:
        ProblemError: ``by`` is neither of the two.
    """
    if by not in ("origin", "chord"):
        raise ProblemError(f"by is {by!r}; expected 'origin' or 'chord'")
    (least, most_cost), (most, least_cost) = points[0], points[-1]
    wide, high = most - least, most_cost - least_cost
    if wide == 0 or high == 0:
        return len(points) - 1

    def distance(k: int) -> float:
        x, y = (points[k][0] - least) / wide, (points[k][1] - least_cost) / high
        # The chord is the line x + y = 1, so the point farthest below has the least x + y.
        return x * x + y * y if by == "origin" else x + y

    return min(range(len(points)), key=distance)
