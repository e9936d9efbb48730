"""The comparison of solvers: a table made from solved cases."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from remat.units import columns

PROPERTY = "remat.solved"
"""Under this name a test report carries `Solved.as_property`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """One solver's checked result on one case.

    Attributes:
        solver: its name in the run.
        case: the case's name.
        value: what its choice is worth; of a step problem, what its schedule costs.
        optimum: the greatest value of any choice, or the least cost of any schedule.
        elapsed_s: seconds it took.
        least: the value is a cost: less is better.
    """

    solver: str
    case: str
    value: int
    optimum: int
    elapsed_s: float
    least: bool = False

    @property
    def score(self) -> int:
        """More is better."""
        return -self.value if self.least else self.value

    def as_property(self) -> str:
        """As text, which passes through any report; integers of any size survive."""
        return json.dumps(asdict(self))

    @classmethod
    def from_property(cls, text: str) -> Solved:
        """Read back `as_property`."""
        return cls(**json.loads(text))


def table(results: Iterable[Solved]) -> list[str]:
    """Compare solvers over the cases, as lines of text.

    Columns: cases solved; wins, cases where no other solver's answer is better; worst and mean gap
    to the optimum, as a share of it; total time. A case that a solver solved twice counts
    once, with the lower value and the longer time. Best first: by wins, mean gap, name.
    """
    scores: dict[str, dict[str, Solved]] = {}
    for result in results:
        cases = scores.setdefault(result.solver, {})
        known = cases.get(result.case)
        if known is None or _worse(result) > _worse(known):
            cases[result.case] = result
    best: dict[str, int] = {}
    for cases in scores.values():
        for case, result in cases.items():
            best[case] = max(best.get(case, result.score), result.score)

    rows = []
    for solver, cases in scores.items():
        wins = sum(result.score == best[case] for case, result in cases.items())
        gaps = [_gap(result) for result in cases.values()]
        total_s = sum(result.elapsed_s for result in cases.values())
        mean = sum(gaps) / len(gaps)
        cells = (solver, str(len(cases)), str(wins), f"{max(gaps):.3%}", f"{mean:.3%}")
        rows.append(((-wins, mean, solver), (*cells, f"{total_s:.3f} s")))
    rows.sort()
    header = ("solver", "cases", "wins", "worst gap", "mean gap", "total time")
    return columns([header, *(cells for _, cells in rows)])


def _worse(result: Solved) -> tuple[int, float]:
    return -result.score, result.elapsed_s


def _gap(result: Solved) -> float:
    return abs(result.optimum - result.value) / result.optimum if result.optimum else 0.0
