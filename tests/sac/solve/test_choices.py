"""Optimal operators to store: the published example, brute force, and invalid budgets."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.errors import BudgetError, ProblemError
from remat.sac.estimation.stats import SACStats, group
from remat.sac.estimation.tradeoff import greedy_order
from remat.sac.solve.choices import get_optimal_checkpointing_policy_per_module
from tests.sac.planned import example


@pytest.mark.parametrize(
    ("budget", "stored"),
    [
        (0, [0, 4]),
        (100 / 420, [0, 4, 5, 7]),
        (120 / 420, [0, 3, 4]),
        (200 / 420, [0, 2, 4, 5, 7]),
        (220 / 420, [0, 3, 4, 5, 7]),
        (320 / 420, [0, 2, 3, 4, 5, 7]),
        (1, [0, 1, 2, 3, 4, 5, 7]),
    ],
)
def test_the_example(budget: float, stored: list[int]) -> None:
    decided = get_optimal_checkpointing_policy_per_module(example(), budget)
    assert [i for i, x in enumerate(decided) if x] == stored


@st.composite
def modules(draw: st.DrawFn) -> SACStats:
    """Draw modules of up to twelve operators with every kind of shared decision."""
    n = draw(st.integers(1, 12))
    indices = st.lists(st.integers(0, n - 1), max_size=3, unique=True).map(sorted)
    views, random = draw(indices), draw(indices)
    writing = draw(st.lists(st.integers(0, n - 1), max_size=4, unique=True))
    first = {}
    for op in sorted(writing):
        # The first operator on a storage writes to nothing that an earlier one made.
        choices = [op, *(i for i in range(op) if i not in first)]
        first[op] = draw(st.sampled_from(choices))
    numbers = st.integers(0, 60)
    return SACStats(
        func_names=[f"op{i}" for i in range(n)],
        runtimes=[draw(numbers) / 4 for _ in range(n)],
        memory=[0 if i in views or i in first else draw(numbers) for i in range(n)],
        view_like_ops=views,
        rand_ops=random,
        saved_autograd_ops=[],
        inplace_ops=sorted(first.items()),
        force_store_random=draw(st.booleans()),
    )


def allowed(stats: SACStats, x: tuple[int, ...]) -> bool:
    """Return whether stored operators respect views, in-place groups and random groups."""
    views = set(stats.view_like_ops)
    drawn = [x[i] for i in stats.rand_ops if i not in views]
    if any(x[i] for i in views) or len(set(drawn)) > 1:
        return False
    if stats.force_store_random and not all(drawn):
        return False
    return all(
        x[op] == 1 if op == first or first in views else x[op] == x[first]
        for op, first in stats.inplace_ops
        if op not in views
    )


def best(stats: SACStats, nbytes: int) -> float | None:
    """Return the most runtime that storing can avoid, over all sets; None if no set fits."""
    n = len(stats)
    found = [
        sum(t for t, x in zip(stats.runtimes, choice, strict=True) if x)
        for choice in product((0, 1), repeat=n)
        if sum(m for m, x in zip(stats.memory, choice, strict=True) if x) <= nbytes
        and allowed(stats, choice)
    ]
    return max(found, default=None)


@settings(max_examples=60, deadline=None)
@given(modules(), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
def test_brute_force_agrees(stats: SACStats, budget: float) -> None:
    nbytes = -int(-budget * sum(stats.memory) // 1)
    most = best(stats, nbytes)
    if most is None:
        with pytest.raises(BudgetError, match=r"Raise the budget by \d+ bytes"):
            get_optimal_checkpointing_policy_per_module(stats, budget)
        return
    decided = tuple(get_optimal_checkpointing_policy_per_module(stats, budget))
    assert allowed(stats, decided)
    assert sum(m for m, x in zip(stats.memory, decided, strict=True) if x) <= nbytes
    avoided = sum(t for t, x in zip(stats.runtimes, decided, strict=True) if x)
    assert avoided == pytest.approx(most)


def test_a_random_view_ties_nothing_to_the_random_operators() -> None:
    stats = SACStats(
        func_names=[f"op{i}" for i in range(8)],
        runtimes=[1.0] * 8,
        memory=[1] + [0] * 7,
        view_like_ops=[6],
        rand_ops=[0, 6],
        saved_autograd_ops=[],
        inplace_ops=[(1, 1), (2, 2), (3, 3), (7, 6)],
        force_store_random=False,
    )
    assert get_optimal_checkpointing_policy_per_module(stats, 0)[0] == 0


@settings(max_examples=50, deadline=None)
@given(modules())
def test_the_greedy_order_has_every_operator_once(stats: SACStats) -> None:
    grouping, order = group(stats), greedy_order(stats)
    in_items = [i for item in (*grouping.free, *grouping.stored) for i in item.ops]
    assert sorted([*in_items, *grouping.recomputed]) == list(range(len(stats)))
    assert {c.op_idx for c in order.msps_meta} == {item.ops[0] for item in grouping.free}
    rates = [c.msps for c in order.msps_meta]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("budget", [-0.1, 1.5, "half", None, True, float("nan")])
def test_budgets_that_cannot_be_meant(budget: object) -> None:
    with pytest.raises(ProblemError, match="memory_budget must be"):
        get_optimal_checkpointing_policy_per_module(example(), budget)  # type: ignore[arg-type]


def test_statistics_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ProblemError, match="sac_stats is a NoneType; expected the SACStats"):
        get_optimal_checkpointing_policy_per_module(sac_stats=None, memory_budget=0.5)  # type: ignore[arg-type]
    broken = example()
    broken.memory.pop()
    with pytest.raises(ProblemError, match="memory has 7 entries for 8 operators"):
        get_optimal_checkpointing_policy_per_module(broken, 0.5)
    broken = example()
    broken.rand_ops.append(99)
    with pytest.raises(ProblemError, match="operator 99 is named, but there are only 8"):
        group(broken)
