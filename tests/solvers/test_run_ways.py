"""Answers to problems with ways: believed in nothing, and asked for like any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

import remat
from remat.errors import SolverError
from remat.solvers.run_ways import run_ways
from remat.testing.ways import ways_cases

CASES = {case.name: case for case in ways_cases()}
SENT = CASES["a-slow-link-and-dear-layers"].problem
#: Forward, then backward.
ONCE = (0, 1, 2, 3, 4, 5)


class Claims(remat.Solver):
    """Answers what it is told to."""

    name = "claims"
    answer: ClassVar[Any] = remat.WaysAnswer(ONCE, {0: -1})

    def solve_ways(self, problem: Any, *, time_limit: float | None = None) -> Any:
        return type(self).answer


def forever() -> Iterator[int]:
    while True:
        yield 0


def test_the_answer_is_recomputed() -> None:
    found = run_ways(Claims(), SENT)
    ours = remat.solve(SENT)
    assert (found.cost, found.waited) == (ours.cost, ours.waited)
    assert found.cost == CASES["a-slow-link-and-dear-layers"].optimum == 75
    assert dict(found.ways) == dict(ours.ways) == {0: -1}
    assert found.peak_bytes == 15
    assert (found.solver, ours.solver) == ("claims", "auto")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ONCE, r"'claims' returned tuple: return WaysAnswer\(sequence, ways\)"),
        (remat.WaysAnswer((0, 2, 1), {}), "returned a schedule that cannot run"),
        (remat.WaysAnswer((0, 0.5), {}), "returned 0.5 as run 1, where a node's number is due"),  # type: ignore[arg-type]
        (remat.WaysAnswer(forever(), {}), "returned more than 384 runs, 64 for each node"),
        (remat.WaysAnswer(ONCE, {}), "peak of 16 bytes, 1 over the capacity of 15"),
        (remat.WaysAnswer(ONCE, {0: 3}), "'a' has way 3; expected one of"),
        (remat.WaysAnswer(ONCE, {0: -1, 77: -1}), "a way for node 77, but the nodes are 0 to 5"),
        (remat.WaysAnswer(ONCE, {0: None}), "returned the way None for node 0"),  # type: ignore[dict-item]
        (remat.WaysAnswer(ONCE, [0]), "ways of type list, where a mapping is due"),  # type: ignore[arg-type]
        (remat.WaysAnswer(ONCE, {0: -1}, 99), "returned a schedule that cannot run"),
        (remat.WaysAnswer(ONCE, {0: -1}, None, 76), "costs at least 76, but its own costs 75"),
    ],
)
def test_wrong_answers_are_refused_with_the_solver_s_name(
    answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Claims, "answer", answer)
    with pytest.raises(SolverError, match=message):
        run_ways(Claims(), SENT)


def test_a_stranger_s_bound_is_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Claims, "answer", remat.WaysAnswer(ONCE, {0: -1}, None, 60))
    found = run_ways(Claims(), SENT)
    assert (found.bound, found.claimed_bound) == (0, 60)
    assert found.status is remat.Status.FEASIBLE


def test_a_solver_without_the_method_says_so() -> None:
    with pytest.raises(SolverError, match="'milp' does not solve problems with ways"):
        remat.solve(SENT, solver="milp")


def test_it_runs_in_a_process_of_its_own() -> None:
    apart = remat.solve(SENT, isolation="process")
    here = remat.solve(SENT)
    assert (apart.sequence, dict(apart.ways), apart.cost) == (
        here.sequence,
        dict(here.ways),
        here.cost,
    )
