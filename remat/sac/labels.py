"""The program over classes of modules, solved by merging labels: all that may still lead to the best.

A label is what is decided in some modules: its time, and what it adds to each cut. Labels of modules
side by side are merged by adding them. With prices for the cuts' bytes, a label's time less what its
bytes are worth lies above the least of such values, and over all modules these excesses add up to how
far a decision is above the Lagrangian bound: a label in excess of what is tried is dropped, and so is
one that another beats in time and in every cut. The best label within the threshold is then the best
decision, whatever the prices; they come from the linear relaxation, so that few labels are left. The
same is known for the knapsack with multiple choices (Pisinger 1995), whose core this is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.sac.cuts import Cut
from remat.sac.placing import ModuleClass

#: Pairs of labels that are merged at once, at most, with one cut, and a quarter of them with more;
#: where there would be more pairs, others must solve it.
MOST_PAIRS = 1_200_000
#: How far above the bound labels are kept at first, relative to it, and by how much that grows.
_FIRST, _GROWTH, _TRIES = 1e-4, 3.0, 10
#: Labels that a label is compared with, at most, to see whether it is beaten.
_COMPARED = 200

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Counts = tuple[tuple[int, ...], ...]


class TooManyLabelsError(Exception):
    """There are too many labels near the bound."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Labels:
    """Labels, and how to read off what was decided: pairs of a class and a choice."""

    time: Ints
    gains: Ints
    trace: Callable[[int], list[tuple[int, int]]]


def cheapest(
    found: Sequence[ModuleClass],
    cuts: Sequence[Cut],
    times: Sequence[Ints],
    prices: Floats,
    at_least: int,
) -> tuple[Counts, int]:
    """The counts of least time that meet all cuts, and that time.

    Args:
        found: the classes.
        cuts: what the memory demands.
        times: picoseconds of each choice, by class.
        prices: of each cut's bytes; any that are not negative will do.
        at_least: picoseconds that are known to be needed.

    Raises:
        TooManyLabelsError: too many labels are near the bound.
    """
    merging = _Merging(found, cuts, times, prices)
    bound = max(merging.bound, float(at_least))
    most = float(sum(t.max(initial=0) * len(c.members) for t, c in zip(times, found, strict=True)))
    above = _FIRST * max(bound, 0.01 * most)
    for _ in range(_TRIES):
        best = merging.within(bound + above)
        if best is not None:
            return best
        above *= _GROWTH
    raise TooManyLabelsError


class _Merging:
    def __init__(
        self,
        found: Sequence[ModuleClass],
        cuts: Sequence[Cut],
        times: Sequence[Ints],
        prices: Floats,
    ) -> None:
        self._found, self._times, self._prices = found, times, prices
        self._needs = np.array([c.need for c in cuts], dtype=np.int64)
        self._gains = [np.zeros((len(t), len(cuts)), dtype=np.int64) for t in times]
        for i, cut in enumerate(cuts):
            for (c, j), gain in cut.gains.items():
                self._gains[c][j, i] = gain
        self._below: dict[int, list[int]] = {c: [] for c in range(-1, len(found))}
        for c, one in enumerate(found):
            self._below[one.parent].append(c)
        self._least = [0.0] * len(found)
        for c in reversed(range(len(found))):
            inside = sum(self._found[d].each * self._least[d] for d in self._below[c])
            own = self._worth(times[c], self._gains[c])
            self._least[c] = min(inside, float(own.min(initial=0.0)))
        self._all = sum(len(found[c].members) * self._least[c] for c in self._below[-1])
        #: Time that nothing gets below.
        self.bound = float(self._all + prices @ self._needs)

    def within(self, threshold: float) -> tuple[Counts, int] | None:
        """The best counts of no more time than a threshold."""
        above = threshold - self.bound
        above += 1.0 + 1e-9 * (abs(threshold) + abs(self._all))  # sums of floats
        labels = self._side_by_side(
            [(self._one(c, above), len(self._found[c].members)) for c in self._below[-1]], above
        )
        fits = np.flatnonzero((labels.gains >= self._needs).all(1) & (labels.time <= threshold))
        if not len(fits):
            return None
        best = int(fits[np.argmin(labels.time[fits])])
        counts = [[0] * len(t) for t in self._times]
        for c, j in labels.trace(best):
            counts[c][j] += 1
        return tuple(map(tuple, counts)), int(labels.time[best])

    def _worth(self, time: Ints, gains: Ints) -> Floats:
        """Time less what the bytes are worth."""
        worth: Floats = time - gains @ self._prices
        return worth

    def _one(self, c: int, above: float) -> _Labels:
        """Labels of one member of a class: one of its choices, or what is chosen below it."""
        inside = self._side_by_side(
            [(self._one(d, above), self._found[d].each) for d in self._below[c]], above
        )
        own = len(self._times[c])
        time = np.concatenate([self._times[c], inside.time])
        gains = np.concatenate([self._gains[c], inside.gains])
        left = np.flatnonzero(self._worth(time, gains) <= self._least[c] + above)
        left = left[_unbeaten(time[left], gains[left])]

        def trace(i: int) -> list[tuple[int, int]]:
            at = int(left[i])
            return [(c, at)] if at < own else inside.trace(at - own)

        return _Labels(time=time[left], gains=gains[left], trace=trace)

    def _side_by_side(self, parts: Sequence[tuple[_Labels, int]], above: float) -> _Labels:
        """Labels of several members of several classes."""
        whole = _Labels(
            time=np.zeros(1, dtype=np.int64),
            gains=np.zeros((1, len(self._needs)), dtype=np.int64),
            trace=lambda i: [],
        )
        for labels, often in parts:
            power, left = labels, often
            while left:
                if left & 1:
                    whole = self._merge(whole, power, above)
                left >>= 1
                if left:
                    power = self._merge(power, power, above)
        return whole

    def _merge(self, a: _Labels, b: _Labels, above: float) -> _Labels:
        worth_a, worth_b = self._worth(a.time, a.gains), self._worth(b.time, b.gains)
        order = np.argsort(worth_b, kind="stable")
        room = worth_a.min() + worth_b[order[0]] + above - worth_a
        reach = np.searchsorted(worth_b[order], room, side="right")
        pairs = int(reach.sum())
        if pairs > (MOST_PAIRS if len(self._needs) == 1 else MOST_PAIRS // 4):
            raise TooManyLabelsError
        left = np.repeat(np.arange(len(reach)), reach)
        right = order[np.arange(pairs) - np.repeat(np.cumsum(reach) - reach, reach)]
        if a is b:
            once = left <= right
            left, right = left[once], right[once]
        time, gains = a.time[left] + b.time[right], a.gains[left] + b.gains[right]
        kept = _unbeaten(time, gains)
        left, right = left[kept], right[kept]
        return _Labels(
            time=time[kept],
            gains=gains[kept],
            trace=lambda i: a.trace(int(left[i])) + b.trace(int(right[i])),
        )


def _unbeaten(time: Ints, gains: Ints) -> Ints:
    """Positions of labels that no other is better than in time and in every cut; maybe some more."""
    columns = _different(gains)
    order = np.lexsort((*(-gains[:, i] for i in reversed(columns)), time))
    first = gains[order, columns[0]] if columns else np.zeros(len(order), dtype=np.int64)
    if len(columns) < 2:
        rises = np.ones(len(order), dtype=bool)
        rises[1:] = first[1:] > np.maximum.accumulate(first)[:-1]
        return order[rises]
    rest = gains[order][:, columns]
    kept: list[Ints] = []
    best = np.empty((0, len(columns)), dtype=np.int64)
    at = np.arange(len(order))
    while len(at):
        block, at = at[:64], at[64:]
        mine = rest[block]
        beats = (mine[None] >= mine[:, None]).all(2) & (block[None] < block[:, None])
        mine_left = block[~beats.any(1)]
        kept.append(mine_left)
        best = rest[mine_left]
        for strong in best:  # what is left gets shorter, so that later blocks are few
            if sum(map(len, kept)) <= _COMPARED:
                at = at[(rest[at] > strong).any(1)]
    return order[np.concatenate(kept)] if kept else order


def _different(gains: Ints) -> list[int]:
    """Columns that are neither constant nor equal to one before."""
    seen: dict[bytes, int] = {}
    for i in range(gains.shape[1]):
        column = np.ascontiguousarray(gains[:, i])
        if len(column) and (column != column[0]).any():
            seen.setdefault(column.tobytes(), i)
    return list(seen.values())
