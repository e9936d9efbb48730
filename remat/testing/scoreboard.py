"""Format a table that compares solvers by their results on the cases of the conformance suite."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from remat.units import columns

#: Explanations of the columns of `table`.
LEGEND = (
    "cases: those that the solver answered; it refused the others, or found no schedule for them",
    "wins: cases for which no other solver has a better answer",
    "gap: distance of the answer from the optimum, relative to the optimum",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A solver's verified result on one case of the conformance suite.

    Attributes:
        solver: name of the solver, as registered or as given to ``--solver``.
        case: name of the case.
        value: value of the solver's items for a knapsack; cost of the solver's answer for a graph or
            schedule problem.
        optimum: greatest value, or least cost, that is possible for the case.
        elapsed_s: seconds that the solver took for the case.
        least: whether ``value`` is a cost, so that the least value is best.
    """

    solver: str
    case: str
    value: int
    optimum: int
    elapsed_s: float
    least: bool = False

    @property
    def score(self) -> int:
        """Value of the solver's answer, or its negated cost; a greater score is better."""
        return -self.value if self.least else self.value

    def as_property(self) -> str:
        """Convert the result to JSON text, which pytest can store as a property of a test report."""
        return json.dumps(asdict(self))

    @classmethod
    def from_property(cls, text: str) -> Solved:
        """Convert the text from `as_property` back to a result."""
        return cls(**json.loads(text))


def table(results: Iterable[Solved]) -> list[str]:
    """Format a table of solvers and their results on all cases, as lines of text; `LEGEND` explains the columns.

    If a solver solved a case twice, the later result counts. The rows are sorted, best first, by wins,
    then by mean gap, then by name.
    """
    scores: dict[str, dict[str, Solved]] = {}
    for result in results:
        scores.setdefault(result.solver, {})[result.case] = result
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


def _gap(result: Solved) -> float:
    return abs(result.optimum - result.value) / result.optimum if result.optimum else 0.0
