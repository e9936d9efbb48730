"""What summaries and tables make of rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]


def grouped(rows: Iterable[Row], key: str = "workload") -> dict[str, list[Row]]:
    """The rows by one of their entries."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def geometric_mean(ratios: Iterable[float], floor: float = 0.0) -> float:
    """Geometric mean, each ratio counted as no less than ``floor``; NaN of none."""
    logs = [math.log(max(floor, ratio)) for ratio in ratios]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def above(figures: Row, limits: Mapping[str, float]) -> list[str]:
    """The figures that are above their limits."""
    return [
        f"{name} is {figures[name]:g}, limit {limit:g}"
        for name, limit in limits.items()
        if figures[name] > limit
    ]


def ratio_of(ours: float, theirs: float) -> float:
    """Our figure as a share of theirs; 1 if both are 0."""
    if theirs == 0:
        return 1.0 if ours == 0 else math.inf
    return ours / theirs
