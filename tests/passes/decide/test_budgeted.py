"""One objective at every budget: the least cost within the bytes, and more bytes never cost more."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.graph.costs import Roofline
from remat.passes.core.state import State
from remat.passes.decide.budgeted import Knapsack, SolveGraph
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry
from remat.solvers.graph.cut import CutSolver
from remat.solvers.graph.problem import GraphProblem, evaluate
from remat.solvers.run import run
from remat.units import Budget


class Block(nn.Module):
    """A block of a small GPT, dropout and layer norm (operators of several results) included."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        a = torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
        x = x + F.dropout(self.out(a), 0.1, training=True)
        return x + self.down(F.gelu(self.up(self.second(x))))


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Inductor's decompositions import old code
        return remat.capture(nn.Sequential(Block(), Block()), (torch.randn(2, 64, 32),))


@pytest.fixture(scope="module")
def state(joint: remat.JointGraph) -> State:
    return prepare(joint)


def cost_at(state: State, share: float, solver: str, cost: str = "roofline") -> int:
    model = registry().cost_model(cost)
    deciding = SolveGraph(solver=registry().solver(solver), budget=Budget(share=share), cost=model)
    limits = deciding.limits(state)
    found, provenance = deciding.decide(state, limits)
    done = evaluate(state.lowered(model).problem, found.saved)
    assert (done.recompute_cost, done.saved_bytes) == (found.cost, found.saved_bytes)
    assert done.saved_bytes <= (limits.capacity or 0)
    assert provenance.recompute_bound <= done.recompute_cost
    return done.recompute_cost


@pytest.mark.parametrize(
    ("solver", "cost"), [("auto", "roofline"), ("auto", "flops"), ("lagrangian", "roofline-fused")]
)
@pytest.mark.slow
def test_more_budget_never_costs_more(state: State, solver: str, cost: str) -> None:
    costs = [cost_at(state, k / 37, solver, cost) for k in range(38)]
    assert all(a >= b for a, b in pairwise(costs))
    assert costs[-1] <= cost_at(state, 1.0, "cut", cost)


def test_at_budget_one_the_bytes_are_those_of_the_cut(joint: remat.JointGraph) -> None:
    cut, plan = remat.plan(joint, 1, "cut"), remat.plan(joint, 1)
    assert plan.saved_bytes <= cut.saved_bytes == plan.full_bytes == cut.full_bytes
    assert remat.plan(joint, 1, "lagrangian").recompute_cost < cut.recompute_cost
    assert plan.recompute_cost <= cut.recompute_cost  # too little is gained here to leave the cut
    more = remat.plan(joint, remat.Saved(10 * plan.full_bytes))
    assert more.recompute_cost <= plan.recompute_cost


class Forgetful(remat.Solver):
    """Optimal within a percent: at odd capacities it falls back on fewer bytes."""

    name = "forgetful"

    def solve_graph(self, problem: GraphProblem, **kwargs: object) -> remat.Answer:
        assert problem.capacity is not None
        spare = 0 if problem.capacity % 3 == 0 else problem.capacity // 300
        best = run(registry().solver("auto"), problem.within(problem.capacity - spare))
        return remat.Answer(best.saved, min(best.cost, best.bound) * 995 // 1000)


def test_whole_shares_are_in_order_whatever_the_solver_s_tolerance(state: State) -> None:
    model = Roofline()

    def costs(solver: remat.Solver) -> list[int]:
        made = [
            SolveGraph(solver=solver, budget=Budget(share=k / 1000), cost=model)
            for k in range(440, 470)
        ]
        return [p.decide(state, p.limits(state))[0].cost for p in made]

    found = costs(Forgetful())
    assert all(a >= b for a, b in pairwise(found))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("solver", ["greedy", "dp"])
def test_knapsack_solvers_decide_graphs_in_one_way(
    state: State, joint: remat.JointGraph, solver: str, share: float
) -> None:
    asked = registry().solver(solver)
    options = {"solver": asked, "budget": Budget(share=share), "cost": Roofline()}
    passes = Knapsack(**options), SolveGraph(**options)  # type: ignore[arg-type]
    limits, same = (p.limits(state) for p in passes)
    by_pass, by_graph = (p.decide(state, limits)[0] for p in passes)
    assert by_pass.saved == by_graph.saved
    assert limits == same
    problem = state.lowered(Roofline()).problem.within(limits.capacity or 0)
    bare = run(asked, problem)
    assert evaluate(problem, by_pass.saved).recompute_cost <= bare.cost, "what is known only helps"
    row, other = remat.compare(joint, (solver,), (share, 0.1), cost="roofline").rows
    assert [float(r.budget) for r in (row, other)] == [share, 0.1]
    assert (
        row.recompute_cost
        == by_pass.cost
        == remat.plan(joint, share, solver, cost="roofline").recompute_cost
    )


def test_a_cut_without_rules_recomputes_nothing_that_costs(state: State) -> None:
    problem = state.lowered(Roofline()).problem
    bare = run(CutSolver(), problem)
    assert bare.cost == 0
    assert bare.saved_bytes <= sum(problem.size)
    least = run(CutSolver(), problem.within(bare.saved_bytes - 1))
    assert least.saved_bytes < bare.saved_bytes
