"""Solvers side by side: what is asked for, one or several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import remat
from remat.errors import ProblemError, SolverError
from remat.experiments.table import Comparison, ExperimentRow, mark_best
from tests.graphs import joint_of, weight


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(lambda x, w: torch.mm(x.cos(), w).exp().sum(), weight(8, 8), weight(8, 8))


@pytest.mark.parametrize(
    ("solvers", "budgets", "rows"),
    [
        ("greedy", "0.5", [("greedy", "0.5")]),
        ("greedy", 0.5, [("greedy", "0.5")]),
        (["greedy"], "8GiB", [("greedy", f"peak:{8 * 2**30}B")]),
        (("greedy", "dp"), (1, remat.Saved(2**20)), [(s, b) for b in ("1", f"saved:{2**20}B") for s in ("greedy", "dp")]),
        ("greedy", remat.Peak("1MiB"), [("greedy", f"peak:{2**20}B")]),
    ],
)  # fmt: skip
def test_one_thing_is_a_list_of_one(
    joint: remat.JointGraph, solvers: Any, budgets: Any, rows: list[tuple[str, str]]
) -> None:
    found = remat.compare(joint, solvers, budgets).rows
    assert [(r.solver, r.budget) for r in found] == rows


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"solvers": 5}, ProblemError, "solvers is 5; expected a list"),
        ({"solvers": ()}, ProblemError, "solvers is empty"),
        ({"budgets": []}, ProblemError, "budgets is empty"),
        ({"solvers": "gredy"}, SolverError, "unknown solver 'gredy'.*did you mean 'greedy'"),
        ({"budgets": "8 gigs"}, ProblemError, "'gigs' is no unit of bytes"),
    ],
)
def test_what_cannot_be_meant(
    joint: remat.JointGraph, options: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        remat.compare(joint, **options)


def test_a_model_is_no_joint_graph() -> None:
    with pytest.raises(ProblemError, match=r"joint is a Linear; .* remat\.capture"):
        remat.compare(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_rows_of_a_budget_share_the_highest_bound() -> None:
    rows = [
        ExperimentRow(solver=solver, budget=budget, capacity=8, recompute_bound=bound)
        for budget, bounds in (("0.5", (3, 7, None)), ("0.2", (9, 8, 2)))
        for solver, bound in zip(("greedy", "dp", "auto"), bounds, strict=True)
    ]
    assert [r.recompute_bound for r in mark_best(rows)] == [7, 7, 7, 9, 9, 9]


def test_budgets_on_the_peak_are_a_ladder_in_the_given_order(joint: remat.JointGraph) -> None:
    budgets = [remat.Peak(0.7), 0.5, remat.Peak(0.2), remat.Peak(0.7), remat.Peak(0.4)]
    rows = remat.compare(joint, ["greedy", "auto"], budgets).rows
    assert [(row.budget, row.solver) for row in rows] == [
        (budget, solver)
        for budget in ("peak:0.7", "0.5", "peak:0.2", "peak:0.4")
        for solver in ("greedy", "auto")
    ]
    for solver in ("greedy", "auto"):
        ladder = sorted(
            (row for row in rows if row.solver == solver and row.budget.startswith("peak")),
            key=lambda row: row.budget,
        )
        assert [r.recompute_cost for r in ladder] == sorted(
            (r.recompute_cost for r in ladder), reverse=True
        )
        assert [r.peak_bytes for r in ladder] == sorted(r.peak_bytes for r in ladder)


class Saving(remat.Solver):
    """Saves the first items that fit, up to a number."""

    name = "saving"

    def __init__(self, most: int) -> None:
        self.most = most

    def solve(self, problem: remat.KnapsackProblem, **options: Any) -> list[int]:
        saved: list[int] = []
        for i, nbytes in enumerate(problem.weights):
            if (
                len(saved) < self.most
                and sum(problem.weights[k] for k in saved) + nbytes <= problem.capacity
            ):
                saved.append(i)
        return saved


def test_two_instances_of_one_solver_each_have_rows_of_their_own() -> None:
    layers = [m for _ in range(3) for m in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
    joint = joint_of(torch.nn.Sequential(*layers), torch.randn(8, 8))
    few, many = remat.compare(joint, (Saving(0), Saving(9)), 0.7, "flops").rows
    assert few.solver == many.solver == "saving"
    assert (few.recompute_cost or 0) > (many.recompute_cost or 0)


def test_a_reason_without_a_plan_stands_below_the_table_once(joint: remat.JointGraph) -> None:
    table = remat.compare(joint, ("greedy", "dp"), ("1B", 0.5))
    lines = str(table).splitlines()
    (note,) = (line for line in lines if "no plan: " in line)
    assert note == lines[-1]
    assert note.startswith("peak 1 B greedy, peak 1 B dp: no plan: budget is a peak of 1 B")
    start = lines[1].index("solver")
    assert {line[start:].split()[0] for line in lines[2:-1]} == {"greedy", "dp"}, "columns align"


def test_a_plan_that_is_not_the_solvers_own_has_a_note() -> None:
    figures: dict[str, Any] = {"budget": "0.5", "saved_bytes": 1, "recompute_cost": 1, "unit": "ps"}
    names = {"ours": "ours", "theirs": "min-cut"}
    rows = [ExperimentRow(solver=s, decided_by=by, **figures) for s, by in names.items()]
    lines = str(Comparison(graph="", cost="", rows=tuple(rows))).splitlines()
    assert [line for line in lines if "min-cut" in line] == lines[-1:]
    assert lines[-1].startswith("0.5 theirs: the plan is that of the pass 'min-cut'")
