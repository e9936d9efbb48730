"""The program with every module by itself: for what counting equal modules cannot say.

Which of two equal modules gets what can matter while backward is within one of them. This program
knows each module and each moment, and so it is large: of many choices it sees those on the lower
hull of memory and time, and its answer is the best of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remat.sac.estimate.calls import Bytes
from remat.sac.estimate.modules import ModuleTree
from remat.sac.solve.choices import Choice, rerun_peak
from remat.sac.solve.module_classes import Decision, ModuleClass
from remat.sac.solve.peaks import moments_of_interest
from remat.solvers.pulp_cbc import load_pulp

#: Choices in all modules together beyond which only those on the hulls are looked at.
MOST_CHOICES = 2_000


def seen(found: Sequence[ModuleClass]) -> dict[int, tuple[Choice, ...]]:
    """The choices that are looked at, by module."""
    whole = sum(len(c.members) * len(c.choices) for c in found) <= MOST_CHOICES
    return {k: (c.choices if whole else _hull(c.choices)) for c in found for k in c.members}


def _hull(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices on the lower convex hull of memory and time."""
    hull: list[Choice] = []
    for c in choices:
        while len(hull) > 1 and _above(hull[-2], hull[-1], c):
            hull.pop()
        hull.append(c)
    return tuple(hull)


def _above(a: Choice, b: Choice, c: Choice) -> bool:
    """Whether ``b`` lies on or above the line from ``a`` to ``c``."""
    return (b.recompute_ps - a.recompute_ps) * (a.kept_bytes - c.kept_bytes) >= (
        c.recompute_ps - a.recompute_ps
    ) * (a.kept_bytes - b.kept_bytes)


class Expanded:
    """A PuLP model with one binary variable for each module and choice.

    Args:
        tree: the modules.
        options: what may be chosen, by module.
        plain: bytes alive by moment without checkpointing.
        budget: bytes; None: minimise the peak instead of time.
    """

    def __init__(
        self,
        tree: ModuleTree,
        options: Mapping[int, tuple[Choice, ...]],
        plain: Bytes,
        budget: int | None,
    ) -> None:
        pulp = load_pulp()
        self._options = options
        self.model = pulp.LpProblem("every_module", pulp.LpMinimize)
        new = getattr(self.model, "add_variable", pulp.LpVariable)
        self._picks = {
            k: [new(f"z{k}_{j}", cat=pulp.LpBinary) for j in range(len(o))]
            for k, o in options.items()
        }
        scale = max(1.0, float(plain.max(initial=1)) / 2**20)
        peak = new("peak", 0) if budget is None else None
        limit = 0.0 if budget is None else budget / scale
        terms = [
            (z, len(tree.modules[k].calls) * o.recompute_ps / 1e6)
            for k, zs in self._picks.items()
            for z, o in zip(zs, options[k], strict=True)
        ]
        self.model += pulp.LpAffineExpression(terms) if peak is None else 1.0 * peak
        gains = self._gains(tree, new, scale)
        top = [] if peak is None else [(peak, -1.0)]
        for t in moments_of_interest(tree, options, plain):
            row = [(g, -1.0) for k, i, g in gains if _active(tree, k, i, t)]
            self.model += pulp.LpAffineExpression(row + top) <= limit - float(plain[t]) / scale
        for k, i, _ in gains:
            call, stats = tree.modules[k].calls[i], tree.modules[k].stats
            assert stats is not None
            row = [(g, -1.0) for m, n, g in gains if m != k and _active(tree, m, n, call.back)]
            for z, o in zip(self._picks[k], options[k], strict=True):
                own = rerun_peak(call, stats, o.stored) + call.input_bytes - call.activation_bytes
                row.append((z, own / scale))
            at = float(plain[call.back]) / scale
            self.model += pulp.LpAffineExpression(row + top) <= limit - at
        for k in options:
            chain = [z for a in (k, *tree.ancestors(k)) for z in self._picks.get(a, ())]
            self.model += pulp.LpAffineExpression([(z, 1) for z in chain]) <= 1

    def decision(self) -> Decision:
        """What was chosen, after it was solved."""
        return {
            k: self._options[k][j]
            for k, zs in self._picks.items()
            for j, z in enumerate(zs)
            if (z.varValue or 0.0) > 0.5
        }

    def _gains(self, tree: ModuleTree, new: Any, scale: float) -> list[tuple[int, int, Any]]:
        """A variable for what each call frees: rows over moments stay short."""
        pulp = load_pulp()
        found = []
        for k, zs in self._picks.items():
            for i, call in enumerate(tree.modules[k].calls):
                gain = new(f"g{k}_{i}")
                most = call.activation_bytes - call.input_bytes
                row = [
                    (z, (most - o.kept_bytes) / scale)
                    for z, o in zip(zs, self._options[k], strict=True)
                ]
                self.model += pulp.LpAffineExpression([*row, (gain, -1.0)]) == 0
                found.append((k, i, gain))
        return found


def _active(tree: ModuleTree, k: int, i: int, moment: int) -> bool:
    call = tree.modules[k].calls[i]
    return call.end <= moment <= call.back
