"""The suite's data: names, certificates, the oracle and the table."""

from __future__ import annotations

import itertools

import pytest

from remat.errors import ProblemError
from remat.solvers import KnapsackProblem
from remat.solvers.bounds import relax
from remat.solvers.reduction import reduce
from remat.testing.cases import SUITE_VERSION, cases
from remat.testing.families import FAMILIES, drawer, family
from remat.testing.oracle import brute_force
from remat.testing.scoreboard import Solved, table


def test_names_are_unique_and_versions_known() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert {case.since for case in cases()} <= set(range(1, SUITE_VERSION + 1))


def test_brute_force_against_combinations() -> None:
    for seed in range(20):
        problem = family("uncorrelated", items=7, span=9, share=5 * seed + 2, seed=seed)
        best = max(
            problem.value_of(chosen)
            for size in range(8)
            for chosen in itertools.combinations(range(7), size)
            if problem.weight_of(chosen) <= problem.capacity
        )
        assert brute_force(problem) == best
    with pytest.raises(ProblemError, match="at most 20 items, got 21"):
        brute_force(KnapsackProblem((1,) * 21, (1,) * 21, 3))


@pytest.mark.parametrize(
    "case", [c for c in cases() if c.certificate is not None], ids=lambda case: case.name
)
def test_certificates_are_derived_anew(case) -> None:
    reduction = reduce(case.problem)
    core = reduction.core
    relaxed = relax(case.problem)
    if relaxed.value == relaxed.bound:
        assert case.certificate == relaxed.bound
        return
    best = {0: 0}  # weight: most value; every state that no lighter one beats
    for weight, value in sorted(zip(core.weights, core.values, strict=True)):
        states = dict(best)
        for w, v in best.items():
            if w + weight <= core.capacity and v + value > states.get(w + weight, -1):
                states[w + weight] = v + value
        best, top = {}, -1
        for w in sorted(states):
            if states[w] > top:
                best[w] = top = states[w]
    lifted = reduction.always_value + reduction.value_unit * max(best.values())
    assert case.certificate == lifted


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_drawn_alike_everywhere(name) -> None:
    first = family(name, items=20, span=50, share=50, seed=1)
    assert first == family(name, items=20, span=50, share=50, seed=1)
    assert first != family(name, items=20, span=50, share=50, seed=2)
    assert all(1 <= w <= 50 for w in first.weights)


def test_the_drawer_is_pinned() -> None:
    draw = drawer(1)
    assert [draw(1, 6) for _ in range(10)] == [1, 6, 5, 2, 3, 3, 4, 5, 1, 1]


def test_the_table_counts_wins_gaps_and_repeats() -> None:
    def solved(solver: str, case: str, value: int, elapsed_s: float = 0.5) -> Solved:
        made = Solved(solver=solver, case=case, value=value, optimum=100, elapsed_s=elapsed_s)
        return Solved.from_property(made.as_property())

    lines = table(
        [
            solved("bad", "one", 50),
            solved("good", "one", 90),
            solved("bad", "two", 100),
            solved("good", "two", 100),
            solved("good", "two", 100, 1.5),
        ]
    )
    assert [line.split() for line in lines[1:]] == [
        ["good", "2", "2", "10.000%", "5.000%", "2.000", "s"],
        ["bad", "2", "1", "50.000%", "25.000%", "1.000", "s"],
    ]
    assert len({len(line) for line in lines}) == 1
    empty = Solved(solver="a", case="empty", value=0, optimum=0, elapsed_s=0.0)
    assert table([empty])[1].split()[3] == "0.000%"
