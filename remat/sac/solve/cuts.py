"""Cutting planes: what a budget demands of how often each choice is taken.

The program counts choices per class of equal modules, and `remat.sac.solve.module_classes` gives
those that free most to the first modules. The budget holds at a moment if the ``q`` largest gains cover
what is missing, where ``q`` members are between forward and backward at that moment. The sum of the
``q`` largest of some numbers is at most ``q·θ`` plus what each has above ``θ``, for every ``θ ≥ 0``, and
for one ``θ`` it is equal: a cut for each moment, with the ``θ`` at which the last decision failed, is
valid for all decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat.sac.estimate.modules import ModuleTree
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.module_classes import Decision, ModuleClass, below, columns
from remat.sac.solve.peaks import rerun_peak


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCut:
    """``gains @ counts >= need`` in bytes, over all choices (`remat.sac.solve.module_classes.columns`)."""

    gains: Ints
    need: int

    def missing(self, counts: Ints) -> int:
        """Bytes by which counts violate it; 0 or below if they do not."""
        return self.need - int(self.gains @ counts)


class CutMaker:
    """Makes cuts for one step."""

    def __init__(self, tree: ModuleTree, found: Sequence[ModuleClass], plain: Ints) -> None:
        self._tree, self._found, self._plain = tree, found, plain
        self._below, self._columns = below(found), columns(found)

    def at(self, moment: int, budget: int, decision: Decision | None = None) -> BudgetCut:
        """The budget at one moment.

        Args:
            moment: the moment.
            budget: bytes.
            decision: one that is over the budget there; None: none is known.
        """
        gains, known = self._freed(moment, decision or {})
        return BudgetCut(gains=gains, need=int(self._plain[moment]) - budget - known)

    def rerun(
        self, c: int, i: int, budget: int, decision: Decision | None = None
    ) -> BudgetCut | None:
        """The budget while a module runs again in one of its calls; None if it has equals."""
        one = self._found[c]
        if len(one.members) > 1:
            return None
        module = self._tree.modules[one.members[0]]
        call = module.calls[i]
        gains, known = self._freed(call.back, decision or {})
        peaks = [rerun_peak(call, module.operators, choice.stored) for choice in one.choices]
        gains[self._columns[c]] += call.freeable_bytes - np.array(peaks) - one.gains[:, i]
        return BudgetCut(gains=gains, need=int(self._plain[call.back]) - budget - known)

    def everywhere(self, moments: Sequence[int], budget: int) -> list[BudgetCut]:
        """All that a budget demands where each class is a module by itself."""
        calls = [len(self._tree.modules[one.members[0]].calls) for one in self._found]
        reruns = [self.rerun(c, i, budget) for c, n in enumerate(calls) for i in range(n)]
        return [*(self.at(t, budget) for t in moments), *(cut for cut in reruns if cut)]

    def _freed(self, moment: int, decision: Decision) -> tuple[Ints, int]:
        """What each choice frees at a moment above its threshold, and the sum of thresholds."""
        gains = np.zeros(self._columns[-1].stop if self._columns else 0, dtype=np.int64)
        thresholds: dict[int, int] = {}
        known = 0
        for c, one in enumerate(self._found):
            if len(one.members) == 1:
                calls = self._active(one.members[0], moment)
                gains[self._columns[c]] = one.gains[:, calls].sum(axis=1)
                continue
            active = [k for k in one.members if self._active(k, moment)]
            if c not in thresholds:
                self._threshold(c, active, decision, thresholds)
            covered = self._covered(one.parent, moment)
            known += thresholds[c] * sum(k not in covered for k in active)
            if active:
                gains[self._columns[c]] = np.maximum(one.gains[:, 0] - thresholds[c], 0)
        return gains, known

    def _active(self, k: int, moment: int) -> list[int]:
        """The calls of a module that are between forward and backward at a moment."""
        calls = self._tree.modules[k].calls
        return [i for i, call in enumerate(calls) if call.end <= moment <= call.back]

    def _covered(self, parent: int, moment: int) -> set[int]:
        """Modules below one that is active itself: its threshold stands for theirs."""
        if parent < 0 or len(self._found[parent].members) == 1:
            return set()
        active = {k for k in self._found[parent].members if self._active(k, moment)}
        return {
            d
            for d in range(len(self._tree.modules))
            if any(a in active for a in self._tree.ancestors(d))
        }

    def _threshold(
        self, c: int, active: Sequence[int], decision: Decision, out: dict[int, int]
    ) -> None:
        """Chooses the threshold of a class, and of those below it: their sum is at most its own."""
        members = self._found[c].members
        if not active or len(active) == len(members):
            self._set(c, 0, out)
            return
        last = active[-1]
        self._below_last(c, last, self._value(last, decision), decision, out)

    def _below_last(
        self, c: int, last: int, own: int, decision: Decision, out: dict[int, int]
    ) -> None:
        out[c] = own
        parts = self._below[c]
        inside = {
            d: [k for k in self._found[d].members if last in self._tree.ancestors(k)] for d in parts
        }
        if last in decision:  # any split will do
            most = {d: int(self._found[d].gains[:, 0].max()) * len(inside[d]) for d in parts}
            whole = sum(most.values()) or 1
            for d in parts:
                share = own * most[d] // whole // max(1, len(inside[d]))
                self._below_last(d, last, share, {last: decision[last]}, out)
            return
        for d in parts:
            worst = min(inside[d], key=lambda k: self._value(k, decision), default=None)
            value = 0 if worst is None else self._value(worst, decision)
            self._below_last(d, last if worst is None else worst, value, decision, out)

    def _set(self, c: int, value: int, out: dict[int, int]) -> None:
        out[c] = value
        for d in self._below[c]:
            self._set(d, value, out)

    def _value(self, k: int, decision: Decision) -> int:
        """Bytes that a decision frees in a module and those below it."""
        return sum(
            self._tree.modules[m].calls[0].freeable_bytes - choice.kept_bytes
            for m, choice in decision.items()
            if m == k or k in self._tree.ancestors(m)
        )
