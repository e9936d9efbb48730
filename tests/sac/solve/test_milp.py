"""The integer program compared with all decisions, and its plans compared with measured steps."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from remat.errors import BudgetError, ProblemError
from remat.sac.estimation.modules import ModuleTree, estimate
from remat.sac.solve.choices import StoredSet, candidates, stored_sets
from remat.sac.solve.milp import _options
from remat.sac.solve.milp import plan as plan_for
from remat.sac.solve.peaks import simulate


class Part(nn.Module):
    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.lin, self.times = nn.Linear(width, width), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x).tanh()
        return torch.cat([x] * self.times, 1).sigmoid()[:, : x.shape[1]] * x


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = Part(width, 2), Part(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(self.one(x).sin())


class Stack(nn.Module):
    def __init__(self, pairs: int, width: int = 8, others: int = 0) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(width) for _ in range(pairs))
        self.others = nn.ModuleList(Part(width, 4) for _ in range(others))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.pairs, *self.others):
            x = module(x)
        return x.square().mean()


@functools.cache
def tree_of(pairs: int, rows: int, width: int = 8, others: int = 0) -> ModuleTree:
    torch.manual_seed(0)
    tree = estimate(Stack(pairs, width, others), (torch.randn(rows, width),))
    # The state of a CPU's generator would take more memory than these small modules.
    return replace(tree, state_bytes=64)


#: Models with few parameters, with as many bytes of parameters as of activations, and with two kinds of modules.
TREES = [(3, 64, 8, 0), (2, 4, 24, 0), (2, 32, 8, 2)]


@functools.cache
def every(made: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (picoseconds, peak) of all decisions over few stored sets."""
    tree = tree_of(*made)
    plain = tree.memory()
    return sorted(
        (sum(c.recompute_ps for c in d.values()), simulate(tree, d, plain).peak_bytes)
        for d in decisions(tree, _options(tree, candidates(tree)))
    )


def least_time(made: tuple[int, ...], budget: int) -> int | None:
    """Return the fewest picoseconds of all decisions that fit; None if no decision fits."""
    return next((time for time, peak in every(made) if peak <= budget), None)


def decisions(
    tree: ModuleTree, options: dict[int, tuple[StoredSet, ...]]
) -> Iterator[dict[int, StoredSet]]:
    """Yield every decision without nesting, over at most three stored sets for each module."""
    names = sorted(options)
    few = [(None, *options[k]) for k in names]
    for picks in itertools.product(*few):
        decision = {k: c for k, c in zip(names, picks, strict=True) if c is not None}
        if not any(tree.modules[k].parent in decision for k in decision):
            yield decision


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.sac.solve.choices.MOST_SETS", 2)


@pytest.mark.parametrize("made", TREES, ids=str)
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
@pytest.mark.usefixtures("few_sets")
def test_no_decision_that_fits_is_faster(made: tuple[int, ...], share: float) -> None:
    tree = tree_of(*made)
    budget = int(share * tree.peak_bytes())
    expected = least_time(made, budget)
    if expected is None:
        with pytest.raises(BudgetError, match="no plan fits"):
            plan_for(tree, memory=budget)
        return
    plan = plan_for(tree, memory=budget, gap=0.0)
    assert plan.peak_bytes <= budget
    assert round(plan.recompute_ms * 1e9) == expected
    near = plan_for(tree, memory=budget)
    assert near.peak_bytes <= budget
    assert round(near.recompute_ms * 1e9) <= 1.005 * expected
    assert plan.bound_ms <= plan.recompute_ms


@pytest.mark.parametrize("made", TREES, ids=str)
@pytest.mark.usefixtures("few_sets")
def test_an_infeasible_budget_is_told_the_least(made: tuple[int, ...]) -> None:
    tree = tree_of(*made)
    with pytest.raises(BudgetError) as caught:
        plan_for(tree, memory=1000)
    assert caught.value.__context__ is None, "how it was found out is no business of the reader's"
    found = re.search(r"gets the step to is (\d+) bytes.*short by (\d+) bytes", str(caught.value))
    assert found is not None
    least, short = map(int, found.groups())
    assert least - short == 1000
    assert plan_for(tree, memory=least).peak_bytes <= least
    assert least_time(made, least - 1) is None


class Again(nn.Module):
    """Model that runs one module three times, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.again = nn.ModuleList(Pair(8) for _ in range(2)), Pair(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            x = self.again(pair(x))
        return self.again(x).square().mean()


@pytest.mark.slow
def test_what_a_module_frees_in_its_other_calls_counts_while_it_runs_again() -> None:
    """Backward reaches the last call first, while the earlier calls' results are still freed."""
    torch.manual_seed(0)
    tree = estimate(Again(), (torch.randn(64, 8),))
    with pytest.raises(BudgetError) as caught:
        plan_for(tree, memory=1000)
    found = re.search(r"gets the step to is (\d+) bytes", str(caught.value))
    assert found is not None
    leasts = {k: c[-1:] for k, c in _options(tree, candidates(tree)).items()}
    plain = tree.memory()
    peaks = [simulate(tree, d, plain).peak_bytes for d in decisions(tree, leasts)]
    assert int(found[1]) == min(peaks)


def test_with_all_choices_the_bound_is_met() -> None:
    """A budget may be short by the backward of one of two equal modules, so counting modules is not enough."""
    tree = tree_of(3, 64)
    for share in (0.66, 0.7, 0.74, 0.78):
        plan = plan_for(tree, memory=int(share * tree.peak_bytes()), gap=0.0)
        assert plan.modules
        assert plan.peak_bytes <= plan.budget_bytes
        assert plan.bound_ms == pytest.approx(plan.recompute_ms, rel=1e-6)
        for module in plan.modules:
            stats = tree[module.name].stats
            assert stats is not None
            again = sum(ms for i, ms in enumerate(stats.runtimes) if i not in module.stored)
            assert module.recompute_ms == pytest.approx(again)


def test_nothing_is_decided_where_the_step_fits() -> None:
    tree = tree_of(3, 64)
    plan = plan_for(tree, memory=tree.peak_bytes())
    assert plan.modules == ()
    assert plan.peak_bytes == plan.plain_peak_bytes == tree.peak_bytes()
    assert plan.recompute_ms == plan.bound_ms == 0


def test_units_restrict_and_fsdp_units_are_not_contained() -> None:
    tree = tree_of(3, 64)
    budget = int(0.8 * tree.peak_bytes())
    inner = plan_for(tree, memory=budget, units=["pairs.*.two"])
    assert {m.name for m in inner.modules} <= {f"pairs.{i}.two" for i in range(3)}
    assert inner.recompute_ms >= plan_for(tree, memory=budget).recompute_ms
    tight = int(0.72 * tree.peak_bytes())
    assert {m.name for m in plan_for(tree, memory=tight, units=["pairs.?"]).modules} <= {
        f"pairs.{i}" for i in range(3)
    }
    found = plan_for(tree, memory=budget, fsdp_units=["pairs.*.one"])
    assert not {m.name for m in found.modules} & {f"pairs.{i}" for i in range(3)}
    with pytest.raises(ProblemError, match="units: no module is called 'pears'"):
        plan_for(tree, memory=budget, units=["pears"])
    with pytest.raises(ProblemError, match=r"'pairs\.0\.one\.lin' cannot .*: it has no children"):
        plan_for(tree, memory=budget, units=["pairs.0.one.lin"])
    with pytest.raises(ProblemError, match="units is the text 'pairs'"):
        plan_for(tree, memory=budget, units="pairs")


def test_more_ranks_leave_more_room() -> None:
    tree = tree_of(2, 4, 24)
    budget = int(0.98 * tree.peak_bytes())
    alone, together = (plan_for(tree, memory=budget, world_size=n) for n in (1, 4))
    assert together.recompute_ms < alone.recompute_ms
    assert together.world_size == 4
    assert together.plain_peak_bytes == tree.peak_bytes(4)


def test_forty_equal_modules_are_within_the_gap() -> None:
    tree = tree_of(40, 16)
    plan = plan_for(tree, memory=int(0.7 * tree.peak_bytes()))
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.recompute_ms <= 1.005 * plan.bound_ms


def test_no_policy_is_used_that_takes_more_time_than_it_saves() -> None:
    """A policy takes time for each operator, stored or not."""
    tree = tree_of(3, 64)
    budget = int(0.8 * tree.peak_bytes())
    free = plan_for(tree, memory=budget, gap=0.0)
    dear = plan_for(replace(tree, policy_ms=1.0), memory=budget, gap=0.0)
    assert any(m.stored for m in free.modules)
    assert [m.name for m in dear.modules] == [m.name for m in free.modules]
    assert not any(m.stored or m.stored_bytes for m in dear.modules)
    assert dear.peak_bytes <= free.peak_bytes
    assert dear.recompute_ms == pytest.approx(
        sum(sum(tree[m.name].operators.runtimes) for m in dear.modules)
    )
    assert "plain checkpointing" in dear.explain()


def test_choices_are_better_the_more_they_keep() -> None:
    stats = tree_of(1, 64)["pairs.0"].stats
    assert stats is not None
    found = stored_sets(stats, sum(stats.memory) + 1)
    kept = [c.kept_bytes for c in found]
    assert kept == sorted(kept, reverse=True)
    assert [c.recompute_ps for c in found] == sorted(c.recompute_ps for c in found)
    assert stored_sets(replace(stats, inplace_ops=[(1, 1)]), 0) == ()


def test_what_is_refused() -> None:
    tree = tree_of(1, 64)
    with pytest.raises(ProblemError, match="world_size must be 1 or more ranks, got 0"):
        plan_for(tree, memory=10, world_size=0)
    with pytest.raises(ProblemError, match="gap must be at least 0 and below 1, got 1"):
        plan_for(tree, memory=10, gap=1)
