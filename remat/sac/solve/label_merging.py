"""The program over classes of modules, solved by merging labels (dynamic programming with bounds).

A label is a partial decision: its time, and what it adds to each cut. Labels of modules side by side
are merged by adding them. With prices for the bytes of cuts, the excess of a label is its time minus
the price of its bytes, minus the least such value; excesses add up over modules to the distance of a
decision from the Lagrangian bound. A label is dropped if its excess is above the threshold, or if
another dominates it in time and in every cut. The best label left is then the best decision, for any
prices; those of the linear relaxation leave few labels. Pisinger (1995) solves the multiple-choice
knapsack so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remat.sac.run.lifetimes import Ints
from remat.sac.solve.cuts import BudgetCut
from remat.sac.solve.module_classes import ModuleClass, below, columns

#: Pairs of labels that are merged at once, at most; where there would be more, others must solve it.
MOST_PAIRS = 1_200_000
#: How far above the bound labels are kept at first, relative to it, and by how much that grows.
_FIRST, _GROWTH, _TRIES = 1e-4, 3.0, 10
#: Labels that are kept at each merge where a good decision is wanted and not the best.
_FEW = 128
#: Labels that are compared each with each; else labels that many are compared with, at most, and how
#: many at once.
_BLOCK, _COMPARED, _ROWS = 48, 200, 4096

Floats = npt.NDArray[np.float64]


class TooManyLabelsError(Exception):
    """There are too many labels near the bound.

    Attributes:
        good: counts that meet all cuts, and their time; None where none were found.
    """

    def __init__(self, good: tuple[Ints, int] | None = None) -> None:
        super().__init__()
        self.good = good


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Labels:
    """Labels, and how to read off what was decided: positions of choices, see `columns`."""

    time: Ints
    gains: Ints
    trace: Callable[[int], list[int]]


def cheapest(
    found: Sequence[ModuleClass],
    cuts: Sequence[BudgetCut],
    times: Ints,
    prices: Floats,
    at_least: float = 0.0,
    gap: float = 0.0,
) -> tuple[Ints, int, float]:
    """The counts of least time that meet all cuts.

    Args:
        found: the classes.
        cuts: what the budget demands.
        times: picoseconds of each choice (`remat.sac.solve.module_classes.columns`).
        prices: picoseconds per byte of each cut, not negative.
        at_least: a known lower bound, in picoseconds.
        gap: relative gap at which it may stop.

    Returns:
        The counts, their time, and a lower bound: the same as the time where they are optimal.

    Raises:
        TooManyLabelsError: too many labels are near the bound.
    """
    program = _Program(found, cuts, times, prices)
    bound = max(program.bound, at_least)
    good = program.within(np.inf, _FEW)
    if good is not None and bound >= (1.0 - gap) * good[1]:
        return *good, min(bound, good[1])
    if good is not None:  # nothing slower is of interest
        with contextlib.suppress(TooManyLabelsError):
            best = program.within(float(good[1]))
            if best is not None:
                return *best, best[1]
    most = float(
        sum(
            times[at].max(initial=0) * len(c.members)
            for c, at in zip(found, program.at, strict=True)
        )
    )
    above = _FIRST * max(bound, 0.01 * most)
    with contextlib.suppress(TooManyLabelsError):
        for k in range(_TRIES):
            best = program.within(bound + above * _GROWTH**k)
            if best is not None:
                return *best, best[1]
    raise TooManyLabelsError(good)


class _Program:
    """A program, its Lagrangian bound, and the best counts up to a threshold."""

    def __init__(
        self,
        found: Sequence[ModuleClass],
        cuts: Sequence[BudgetCut],
        times: Ints,
        prices: Floats,
    ) -> None:
        self.found, self.times, self._prices = found, times, prices
        self.needs = np.array([c.need for c in cuts], dtype=np.int64)
        self.gains = np.stack([c.gains for c in cuts], axis=1)
        self.at = columns(found)
        self.below = below(found)
        self.least = [0.0] * len(found)
        for c in reversed(range(len(found))):
            inside = sum(self.found[d].each * self.least[d] for d in self.below[c])
            own = self.worth(times[self.at[c]], self.gains[self.at[c]])
            self.least[c] = min(inside, float(own.min(initial=0.0)))
        self._all = sum(len(found[c].members) * self.least[c] for c in self.below[-1])
        #: Lagrangian lower bound, in picoseconds.
        self.bound = float(self._all + prices @ self.needs)

    def within(self, threshold: float, few: int = 0) -> tuple[Ints, int] | None:
        """The best counts of no more time than a threshold.

        Args:
            threshold: picoseconds.
            few: labels that are kept at each merge, at most, which may lose the best; 0: all.
        """
        above = threshold - self.bound
        above += 1.0 + 1e-9 * (abs(threshold) + abs(self._all))  # sums of floats
        merge = _Merge(of=self, above=above, few=few)
        labels = merge.side_by_side(
            [(merge.one(c), len(self.found[c].members)) for c in self.below[-1]]
        )
        fits = np.flatnonzero((labels.gains >= self.needs).all(1) & (labels.time <= threshold))
        if not len(fits):
            return None
        best = int(fits[np.argmin(labels.time[fits])])
        counts = np.bincount(
            np.array(labels.trace(best), dtype=np.int64), minlength=len(self.times)
        )
        return counts, int(labels.time[best])

    def worth(self, time: Ints, gains: Ints) -> Floats:
        """Time less what the bytes are worth."""
        worth: Floats = time - gains @ self._prices
        return worth


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merge:
    """Merging labels, those dropped that are too far above the bound.

    Attributes:
        of: the program.
        above: how far above the bound labels are kept, in picoseconds.
        few: labels that are kept at each merge, at most; 0: all.
    """

    of: _Program
    above: float
    few: int

    def one(self, c: int) -> _Labels:
        """Labels of one member of a class: one of its choices, or what is chosen below it."""
        of, at = self.of, self.of.at[c]
        inside = self.side_by_side([(self.one(d), of.found[d].each) for d in of.below[c]])
        own = at.stop - at.start
        time = np.concatenate([of.times[at], inside.time])
        gains = np.concatenate([of.gains[at], inside.gains])
        left = np.flatnonzero(of.worth(time, gains) <= of.least[c] + self.above)
        left = left[_unbeaten(time[left], gains[left])]
        left = left[self._fewest(time[left], gains[left])]

        def trace(i: int) -> list[int]:
            j = int(left[i])
            return [at.start + j] if j < own else inside.trace(j - own)

        return _Labels(time=time[left], gains=gains[left], trace=trace)

    def side_by_side(self, parts: Sequence[tuple[_Labels, int]]) -> _Labels:
        """Labels of several members of several classes."""
        whole = _Labels(
            time=np.zeros(1, dtype=np.int64),
            gains=np.zeros((1, len(self.of.needs)), dtype=np.int64),
            trace=lambda i: [],
        )
        for labels, often in parts:
            power, left = labels, often
            while left:
                if left & 1:
                    whole = self._merge(whole, power)
                left >>= 1
                if left:
                    power = self._merge(power, power)
        return whole

    def _fewest(self, time: Ints, gains: Ints) -> Any:
        """Of labels that free about the same, those of least excess, where not all are kept."""
        if not self.few or len(time) <= self.few:
            return slice(None)
        worth = self.of.worth(time, gains)
        order = np.argsort(worth, kind="stable")
        _, first = np.unique(self._rank(time - worth)[order], return_index=True)
        fewest: Ints = order[np.sort(first)][: self.few]
        return fewest

    def _rank(self, bytes_worth: Floats) -> Ints:
        """Which of some steps from the least to the most that bytes are worth."""
        low, high = bytes_worth.min(), bytes_worth.max()
        share = (bytes_worth - low) / max(1.0, high - low)
        step: Ints = (share * (self.few - 1)).astype(np.int64)
        return step

    def _merge(self, a: _Labels, b: _Labels) -> _Labels:
        worth_a, worth_b = self.of.worth(a.time, a.gains), self.of.worth(b.time, b.gains)
        order = np.argsort(worth_b, kind="stable")
        room = worth_a.min() + worth_b[order[0]] + self.above - worth_a
        reach = np.searchsorted(worth_b[order], room, side="right")
        pairs = int(reach.sum())
        if pairs > MOST_PAIRS:
            raise TooManyLabelsError
        left = np.repeat(np.arange(len(reach)), reach)
        right = order[np.arange(pairs) - np.repeat(np.cumsum(reach) - reach, reach)]
        if a is b:
            once = left <= right
            left, right = left[once], right[once]
        time, gains = a.time[left] + b.time[right], a.gains[left] + b.gains[right]
        kept = _unbeaten(time, gains)
        kept = kept[self._fewest(time[kept], gains[kept])]
        left, right = left[kept], right[kept]
        return _Labels(
            time=time[kept],
            gains=gains[kept],
            trace=lambda i: a.trace(int(left[i])) + b.trace(int(right[i])),
        )


def _unbeaten(time: Ints, gains: Ints) -> Ints:
    """Positions of labels that no other dominates in time and in every cut; maybe some more."""
    columns = _different(gains)
    order = np.lexsort((*(-gains[:, i] for i in reversed(columns)), time))
    first = gains[order, columns[0]] if columns else np.zeros(len(order), dtype=np.int64)
    if len(columns) < 2:
        rises = np.ones(len(order), dtype=bool)
        rises[1:] = first[1:] > np.maximum.accumulate(first)[:-1]
        return order[rises]
    return order[_front(gains[order][:, columns], np.arange(len(order)))]


def _front(gains: Ints, at: Ints) -> Ints:
    """Positions, of some in the order of their time, that none before them dominates."""
    if len(at) <= _BLOCK:
        mine = gains[at]
        beats = (mine[None] >= mine[:, None]).all(2)
        left: Ints = at[~np.any(np.tril(beats, -1), axis=1)]
        return left
    half = len(at) // 2
    first, second = _front(gains, at[:half]), at[half:]
    second = second[~_beaten(gains[second], gains[first])]
    return np.concatenate([first, _front(gains, second)])


def _beaten(gains: Ints, by: Ints) -> npt.NDArray[np.bool_]:
    """Which of some gains are dominated by others; of three columns and more, maybe not all."""
    if gains.shape[1] == 2:
        order = np.argsort(-by[:, 0], kind="stable")
        most = np.maximum.accumulate(by[order, 1])
        reach = np.searchsorted(-by[order, 0], -gains[:, 0], side="right")
        beaten: npt.NDArray[np.bool_] = most[np.maximum(reach - 1, 0)] >= gains[:, 1]
        return beaten & (reach > 0)
    found = np.zeros(len(gains), dtype=bool)
    for start in range(0, len(gains), _ROWS):
        rows = gains[start : start + _ROWS, None]
        found[start : start + _ROWS] = np.any(np.all(by[None, :_COMPARED] >= rows, axis=2), axis=1)
    return found


def _different(gains: Ints) -> list[int]:
    """Columns that are neither constant nor equal to one before."""
    seen: dict[bytes, int] = {}
    for i in range(gains.shape[1]):
        column = np.ascontiguousarray(gains[:, i])
        if len(column) and (column != column[0]).any():
            seen.setdefault(column.tobytes(), i)
    return list(seen.values())
