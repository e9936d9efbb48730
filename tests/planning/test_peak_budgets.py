"""Budgets on the peak, and what other budgets say of it: no plan is above its peak, and what is named helps."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import BudgetError
from remat.planning import planner
from remat.planning.frontier import Frontier
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search import proposals
from remat.planning.search.candidates import Candidate
from remat.planning.search.pool import Limits
from remat.planning.search.proposals import PROPOSERS
from remat.planning.search.search import Proposer, Search
from remat.solvers.graph.lagrangian import Lagrangian
from remat.units import Budget
from tests.graphs import joint_of
from tests.models import build
from tests.planning.test_frontier import SOLVERS, blocks, rows


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(blocks(), rows())


@pytest.fixture(scope="module")
def frontiers(joint: remat.JointGraph) -> dict[str, Frontier]:
    return {solver: remat.frontier(joint, solver) for solver in SOLVERS}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_a_plan_is_never_above_its_peak(
    joint: remat.JointGraph, frontiers: dict[str, Frontier], solver: str, share: float
) -> None:
    peaks = [p.peak_bytes for p in frontiers[solver].points]
    assert min(peaks) < max(peaks), "the budget has something to decide"
    allowed = int(min(peaks) + share * (max(peaks) - min(peaks)))
    plan = remat.plan(joint, remat.Peak(allowed), solver)
    assert plan.peak_bytes <= allowed
    assert Budget.parse(plan.budget).peak_bytes == allowed
    unbounded = remat.plan(joint, 1.0, solver)
    if unbounded.peak_bytes <= allowed:  # nothing has to give way, and more bytes may cost less
        assert plan.recompute_cost <= unbounded.recompute_cost
        return
    fits = [p.recompute_cost for p in frontiers[solver].points if p.peak_bytes <= allowed]
    assert plan.recompute_cost <= min(fits), "no worse than the points that were looked at"


def test_a_peak_that_nothing_meets_is_an_error_that_names_what_is_proven(
    joint: remat.JointGraph, frontiers: dict[str, Frontier]
) -> None:
    with pytest.raises(BudgetError, match="which is infeasible") as caught:
        remat.plan(joint, remat.Peak(2), "auto")
    named = re.search(
        r"every schedule of this step has a peak of at least (\d+) bytes", str(caught.value)
    )
    assert named is not None
    proven = int(named[1])
    least = remat.plan(joint, remat.Peak(0.0), "auto").peak_bytes
    assert proven < least <= min(p.peak_bytes for p in frontiers["auto"].points)
    assert remat.plan(joint, remat.Peak(least), "auto").peak_bytes == least
    with pytest.raises(BudgetError, match="no plan was found within it") as caught:
        remat.plan(joint, remat.Peak(proven), "auto")
    for told in (f"({least} bytes)", f"no schedule has less than {proven} bytes"):
        assert told in str(caught.value)
    with pytest.raises(BudgetError, match="infeasible"):
        remat.plan(joint, remat.Peak(proven - 1), "auto")


@pytest.mark.parametrize(("solver", "hooks"), [("greedy", None), ("auto", "int8")])
def test_shares_of_the_peak_reach_from_the_least_found_to_that_of_budget_1(
    joint: remat.JointGraph, solver: str, hooks: str | None
) -> None:
    full = remat.plan(joint, 1.0, solver, hooks=hooks)
    least, half, most = (
        remat.plan(joint, budget, solver, hooks=hooks)
        for budget in (remat.Peak(0), "peak:0.5", remat.Peak(1))
    )
    assert (half.budget, half.requested.label) == ("peak:0.5", "peak 0.5")
    assert least.peak_bytes < full.peak_bytes
    assert 2 * half.peak_bytes <= least.peak_bytes + full.peak_bytes
    assert most.peak_bytes <= full.peak_bytes
    assert most.recompute_cost <= full.recompute_cost


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.5)
        return x.sum()


@cache
def dropping(lower: Any = "eager") -> remat.JointGraph:
    return remat.capture(Dropping(), (torch.randn(256, 32),), lower=lower)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_peak_that_a_byte_budget_reaches_costs_no_more(lower: Any) -> None:
    cost = "roofline:h100" if lower == "eager" else "auto"
    for nbytes in (96_142, 157_303, 192_252, 227_202):
        # A CPU's costs would show that the search counts one generator state (5,056 bytes) too many.
        by_bytes = remat.plan(dropping(lower), remat.Saved(nbytes), cost=cost)
        by_peak = remat.plan(dropping(lower), remat.Peak(by_bytes.peak_bytes), cost=cost)
        assert by_peak.peak_bytes <= by_bytes.peak_bytes
        assert by_peak.recompute_cost <= by_bytes.recompute_cost


def test_a_peak_of_what_hooks_pack_costs_no_more_than_bytes_that_reach_it() -> None:
    for nbytes in (157_303, 227_202):
        packed = remat.plan(dropping(), remat.Saved(nbytes), hooks="int8")
        by_peak = remat.plan(dropping(), remat.Peak(packed.peak_bytes), hooks="int8")
        assert by_peak.peak_bytes <= packed.peak_bytes
        cheapest = remat.plan(dropping(), 1.0, hooks="int8")
        if cheapest.peak_bytes <= packed.peak_bytes:
            assert by_peak.recompute_cost == cheapest.recompute_cost


class Moody(Lagrangian):
    """Promises nothing twice."""

    name = "moody"
    deterministic = False


def test_a_plan_within_a_peak_says_whether_it_repeats() -> None:
    full = remat.plan(dropping(), 1.0, "lagrangian").peak_bytes
    allowed = remat.Peak(full * 9 // 10)
    assert remat.plan(dropping(), allowed, "lagrangian").deterministic
    assert not remat.plan(dropping(), allowed, Moody()).deterministic


@pytest.fixture(scope="module")
def resnet() -> remat.JointGraph:
    """Decomposed as for Inductor, with simulated peaks."""
    step = build("resnet")
    joint = remat.capture(step.model, step.args, step.kwargs, lower="inductor")
    return dataclasses.replace(joint, lower="eager")


def test_a_ratio_is_the_cheapest_plan_within_its_bytes_whatever_its_peak(
    resnet: remat.JointGraph,
) -> None:
    cost = "roofline-fused"
    full = remat.plan(resnet, 1.0, cost=cost)
    planner = Planner.of(resnet, PlanRequest.of(cost=cost))
    plans, warned = [], []
    for ratio in (0.02, 0.07, 0.1, 0.13, 0.2, 0.5, 0.9):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = remat.plan(resnet, ratio, cost=cost)
        assert plan.saved_bytes <= plan.capacity < full.capacity
        assert plan.recompute_cost == planner.search.decisions.at(plan.capacity).cost
        more = plan.before_after.more
        assert more is not None
        above = plan.peak_bytes > full.peak_bytes
        in_vain = more > 0.01 and plan.peak_bytes > 0.99 * full.peak_bytes
        assert [w.category for w in caught] == [remat.PeakWarning] * (above or in_vain)
        warned.append(bool(caught))
        plans.append(plan)
    assert any(warned)
    assert not all(warned)
    costs = [p.recompute_cost for p in plans]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("solver", ["dp", "lagrangian"])
def test_no_search_changes_what_a_named_solver_decides(
    resnet: remat.JointGraph, solver: str
) -> None:
    planner = Planner.of(resnet, PlanRequest.of(solver=solver))
    own = planner.search.decisions.at(planner.context.full_bytes // 4)
    plan = remat.plan(resnet, remat.Saved(planner.context.full_bytes // 4), solver)
    assert plan.solver == solver
    assert (plan.recompute_cost, plan.saved_bytes) == (own.cost, own.saved_bytes)


class Nothing(remat.Solver):
    """Save as little as possible, whatever the budget."""

    name = "nothing"

    def solve(
        self, problem: remat.KnapsackProblem, *, time_limit: float | None = None
    ) -> list[int]:
        return []


def test_named_solvers_within_a_peak_have_plans_of_their_own(joint: remat.JointGraph) -> None:
    full = remat.plan(joint, 1.0)
    least = remat.plan(joint, remat.Peak(0.0))
    lowest = remat.plan(joint, remat.Peak(0.0), Nothing())
    limit = (lowest.peak_bytes + full.peak_bytes) // 2
    assert least.peak_bytes < lowest.peak_bytes
    plans = {s: remat.plan(joint, limit, s) for s in ("auto", "greedy", "lagrangian", Nothing())}
    assert all(p.peak_bytes <= limit for p in plans.values())
    costs = {getattr(s, "name", s): p.recompute_cost for s, p in plans.items()}
    assert costs["auto"] <= min(costs.values())
    assert costs["nothing"] > costs["auto"], "the search of auto does not stand in for it"
    assert plans["greedy"].solver == "greedy"
    rows = remat.compare(joint, ("auto", "greedy"), limit).rows
    assert [r.recompute_cost for r in rows] == [costs["auto"], costs["greedy"]]


def test_a_named_solver_without_a_plan_within_a_peak_names_its_least(
    joint: remat.JointGraph,
) -> None:
    least = remat.plan(joint, remat.Peak(0.0)).peak_bytes
    with pytest.raises(
        BudgetError, match=r"found within it by 'nothing'.* give budget=[0-9]+"
    ) as e:
        remat.plan(joint, least, Nothing())
    named = int(str(e.value).split("give budget=")[1].split(".")[0])
    assert remat.plan(joint, named, Nothing()).peak_bytes <= named


def test_what_a_warning_of_the_peak_names_helps(joint: remat.JointGraph) -> None:
    full = remat.plan(joint)
    assert (full.budget, full.saved) == ("1", remat.plan(joint, 1).saved)
    with pytest.warns(remat.PeakWarning) as told:
        plan = remat.plan(joint, 0.0)
    text = str(told[0].message)
    assert told[0].filename == __file__
    for nbytes in (plan.peak_bytes, full.peak_bytes):
        assert f"({nbytes} bytes)" in text
    assert plan.peak_bytes > full.peak_bytes
    named = re.search(r"as text (peak:[0-9.]+),", text)
    assert named is not None
    assert remat.plan(joint, named[1]).peak_bytes <= full.peak_bytes


def test_bytes_beyond_those_of_budget_1_may_peak_higher(joint: remat.JointGraph) -> None:
    full = remat.plan(joint, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = remat.plan(joint, remat.Saved(2 * full.full_bytes))
        compared = remat.compare(joint, "lagrangian", (0.0, 0.3, 1.0))
        remat.frontier(joint)
    assert more.recompute_cost <= full.recompute_cost
    assert [r.reason for r in compared.rows] == [None, None, None]
    assert compared.rows[0].peak_bytes == remat.plan(joint, 0.0, "lagrangian").peak_bytes


def test_a_search_that_finds_nothing_is_repeated_with_lower_limits(
    joint: remat.JointGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches of U-Nets find nothing within some limits, although they find schedules within lower ones."""
    prices, orders = proposals.by_prices, proposals.by_node_orders
    least, full = (remat.plan(joint, remat.Peak(share)).peak_bytes for share in (0.0, 1.0))
    limit = (least + full) // 2

    def cost_if_it_fails(*, always: bool) -> int:
        def failing(proposer: Proposer) -> Proposer:
            def propose(
                search: Search, limits: Limits, seeds: Sequence[Candidate]
            ) -> Iterator[Candidate]:
                if not (always or limits.peak_bytes == limit):
                    yield from proposer(search, limits, seeds)

            return propose

        failed = {prices: failing(prices), orders: failing(orders)}
        monkeypatch.setattr(proposals, "by_prices", failed[prices])
        monkeypatch.setattr(proposals, "by_node_orders", failed[orders])
        listed = tuple(failed.get(p, p) for p in PROPOSERS)
        monkeypatch.setattr(proposals, "PROPOSERS", listed)
        plan = remat.plan(joint, limit)
        assert plan.peak_bytes <= limit
        return plan.recompute_cost

    assert cost_if_it_fails(always=False) < cost_if_it_fails(always=True)


def test_explain_tells_which_candidates_were_found_and_why_one_was_chosen(
    joint: remat.JointGraph,
) -> None:
    plan = remat.plan(joint, remat.Peak(0.3))
    text = plan.explain()
    assert re.search(
        r"searched +\d+ candidates, .*\d+ by prices.*; \d+ rounds? by prices and \d+ rounds? by node orders; "
        r"chosen: .*, the cheapest within",
        text,
    )
    assert remat.Plan.from_json(plan.to_json()).search == plan.search
    assert not remat.plan(joint, 0.3).search, "a solver decides alone within saved bytes"


def test_ratio_0_costs_no_more_than_its_bytes() -> None:
    torch.manual_seed(0)
    blocks = (
        m
        for _ in range(3)
        for m in (nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32))
    )
    joint = remat.capture(nn.Sequential(*blocks), (torch.randn(256, 32),), lower="eager")
    least = remat.plan(joint, remat.Peak(0.0))
    assert least.recompute_cost <= remat.plan(joint, least.peak_bytes).recompute_cost * 1.005


def test_without_the_kernel_a_budget_on_the_peak_says_so_once(
    joint: remat.JointGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "missing", lambda: "no compiler: install one")
    planner.warn_without_kernel.cache_clear()
    said = r"solver 'native' cannot run: no compiler: install one\. .* within a peak"
    with pytest.warns(remat.PeakWarning, match=said):
        remat.plan(joint, remat.Peak(0.5))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="solver 'native'")
        remat.plan(joint, remat.Peak(0.5))
        planner.warn_without_kernel.cache_clear()
        remat.plan(joint, 0.5)
