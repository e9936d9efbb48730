"""A peak in bytes over all graphs of a step that is compiled piece by piece: held in the allocator, or said."""

from __future__ import annotations

import gc
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning
from remat.integrations import step_tally
from remat.running import measure
from remat.running.measure import measure_step
from tests.integrations.blocks import Block, Blocks, by_block, made, measured, step, whole

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:.torch.jit:DeprecationWarning", "ignore:The .grad attribute of a Tensor"
    ),
]


@pytest.mark.parametrize("how", ["tied", "breaks"])
def test_a_peak_is_held_over_all_graphs_or_said(how: str) -> None:
    """A block that is called three times, and graph breaks; each below and above what it takes."""
    compiling = whole if how == "breaks" else by_block
    model, x = made(how), torch.randn(1024, 64)
    options = {"budget": remat.Peak("1GiB"), "lower": "eager"}
    most, said = measured(model, compiling(model, options), x)
    assert not said
    above, below = most + most // 100, most - most // 3
    for budget in (above, below):
        torch.compiler.reset()
        model = made(how)
        options["budget"] = remat.Peak(budget)
        taken, said = measured(model, compiling(model, options), x)
        if budget == above:
            assert not said
        if taken > budget:
            assert said
            assert 0.94 * taken <= said[-1] <= 1.02 * taken


def test_a_warning_about_dynamic_sizes_says_what_to_do() -> None:
    model = made("blocks")
    for block in model.blocks:  # type: ignore[union-attr]
        options = {"budget": remat.Peak("9MiB"), "lower": "eager"}
        block.compile(backend="remat", dynamic=True, options=options)
    model(torch.randn(512, 64)).sum().backward()
    with pytest.warns(BudgetWarning, match="dynamic=False"):
        model(torch.randn(1024, 64)).sum().backward()


def test_the_figure_is_that_of_the_allocator_and_is_said_once() -> None:
    """Here the least peak of all plans exceeds the budget."""
    model, x = made("blocks"), torch.randn(1024, 64)
    f = by_block(model, {"budget": remat.Peak("6MiB"), "lower": "eager"})
    with pytest.warns(BudgetWarning, match="those with the least peak run.*the least peak of any"):
        step(f, x)
    taken, said = measured(model, f, x)
    # The warning comes as soon as the count exceeds the budget, and the peak follows.
    assert len(said) == 1
    assert 6 * 2**20 < said[0] <= taken <= 1.01 * said[0]
    assert measured(model, f, x) == (taken, [])


@pytest.mark.parametrize(
    ("lower", "budget", "alone"),  # the last: what the third graph takes where there is room
    [("eager", 15_387_000, 7_645_696), ("inductor", 15_632_000, 7_903_488)],
)
def test_a_later_graph_is_planned_within_what_the_others_leave(
    lower: str, budget: int, alone: int
) -> None:
    model, x = made("breaks"), torch.randn(1024, 64)
    before = len(remat.plans())
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    f = whole(model, {"budget": remat.Peak(budget), "lower": lower})
    taken, said = measured(model, f, x)
    assert (taken <= budget, said) == (True, [])
    plans = remat.plans()[before:]
    assert len(plans) == 3
    left = [plan.requested.peak_bytes or 0 for plan in plans]
    assert left == sorted(left, reverse=True)
    assert left[0] == budget
    assert plans[-1].peak_bytes <= left[-1] < alone
    assert plans[-1].recompute_cost > 0
    for a, b in zip(torch.autograd.grad(f(x).sum(), [*model.parameters()]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_a_graph_that_finds_no_room_runs_on_its_least_peak() -> None:
    model, x = made("breaks"), torch.randn(1024, 64)
    before = len(remat.plans())
    f = whole(model, {"budget": remat.Peak("7MiB"), "lower": "eager"})
    f(x)
    assert len(remat.plans()) == before + 3
    assert remat.plans()[-1].budget == "peak:0"


def test_what_never_runs_backward_is_counted_no_more() -> None:
    model, x = made("blocks"), torch.randn(64, 64)
    f = by_block(model, {"budget": remat.Peak(12_345_678), "lower": "eager"})
    counted = step_tally.tally_of(12_345_678)
    kept = f(x)
    assert counted.runs == 4
    again = f(x)
    assert counted.runs == 8
    del again
    gc.collect()
    assert counted.runs == 4
    loss = kept.sum()
    loss.backward(retain_graph=True)
    assert counted.runs == 4, "it may run backward again"
    loss.backward()
    assert counted.runs == 0
    with torch.no_grad():
        f(x)
    assert counted.runs == 0
    with torch.autograd.graph.saved_tensors_hooks(lambda v: None, lambda v: v):
        del loss, kept
        f(x)
    assert counted.runs == 0


def test_outputs_that_are_gone_take_no_place_in_the_tally() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    f = whole(model, {"budget": remat.Peak(12_345_679), "lower": "eager"})
    kept = []  # detached, so that each output has a storage of its own
    for _ in range(5):
        out = f(x)
        kept.append(out.detach())
        out.sum().backward()
    assert len(step_tally.tally_of(12_345_679)._outputs) <= 2


def test_another_model_under_the_same_budget_does_not_count() -> None:
    """Two models that train one after the other, both still alive."""
    x, budget = torch.randn(1024, 64), 17_200_000  # less than with the weights of both
    models = [made("blocks") for _ in range(2)]
    for model in models:
        f = by_block(model, {"budget": remat.Peak(budget), "lower": "eager"})
        taken, said = measured(model, f, x)
        assert taken < budget < taken + sum(4 * p.numel() for p in model.parameters())
        assert not said


def test_longer_batches_count_at_their_sizes() -> None:
    model = made("blocks")
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(
            backend="remat", dynamic=True, options={"budget": remat.Peak("10MiB"), "lower": "eager"}
        )
    for rows, over in ((256, False), (512, False), (1024, True)):
        taken, said = measured(model, model, torch.randn(rows, 64))
        assert (taken > 10 * 2**20) == over
        assert bool(said) == over
        assert not said or 0.94 * taken <= said[-1] <= 1.1 * taken


def test_a_retained_graph_counts_what_backward_does_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_backward(result: Any) -> None:
        result[1].backward(result[1].detach(), retain_graph=retain)

    monkeypatch.setattr(measure, "run_backward", run_backward)
    model = Blocks([Block()])
    f = whole(model, {"budget": remat.Peak("2800KiB"), "lower": "eager"})
    for retain, warns in ((False, False), (True, True), (True, False)):
        taken, said = measured(model, f, torch.randn(512, 64))
        assert retain == (taken > 2800 * 2**10)
        assert said == ([taken] if warns else [])


def test_sizes_from_the_data_count_at_their_numbers() -> None:
    def step(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        y = x.tanh().exp()
        torch._dynamo.graph_break()
        k = n.item()
        torch._check(k >= 2)
        return (torch.ones(k, 64).sin() @ y.mT).cos().sum(0)  # type: ignore[call-overload,no-any-return]

    x, limit = torch.randn(64, 64, requires_grad=True), 12 * 2**20
    f = torch.compile(
        step, backend="remat", options={"budget": remat.Peak(limit), "lower": "eager"}
    )
    with torch_compat.dynamo_config.patch(capture_scalar_outputs=True):
        for rows, over in ((2000, False), (20_000, True), (40_000, True)):
            args = (x, torch.tensor(rows))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                taken = measure_step(f, args, by="allocator").peak_bytes
            texts = [str(w.message) for w in caught if w.category is BudgetWarning]
            said = [
                int(m[1]) for t in texts if (m := re.search(r"step takes [^(]*\((\d+) bytes", t))
            ]
            assert (taken > limit) == over
            assert bool(said) == over
            # All bytes of a graph grow by one factor, although some do not depend on the data.
            assert not said or 0.94 * taken <= said[-1] <= 1.1 * taken


def test_a_refusal_of_a_graph_before_a_break_names_no_budget() -> None:
    """The step takes more than its first graph, by what the other graphs hold."""
    f = whole(made("breaks"), {"budget": remat.Peak("1200KiB"), "lower": "eager"})
    with pytest.raises(Exception, match="bytes or more: try budget=") as raised:
        f(torch.randn(1024, 64))
    assert "give budget=" not in str(raised.value)
    assert "TORCH_LOGS=graph_breaks" in str(raised.value)


def test_a_plan_of_one_of_several_graphs_says_so() -> None:
    f = whole(made("breaks"), {"budget": remat.Peak("1GiB"), "lower": "eager"})
    f(torch.randn(64, 64)).sum().backward()
    for plan in remat.plans()[-3:]:
        assert plan.explain().splitlines()[1].startswith("  graph         one of several")
    held = dict(remat.plans()[-1].rows)["graph"]
    assert re.search("the others held .*KiB of the given budget, peak 1 GiB", held)
    torch.compiler.reset()
    f = whole(Blocks([Block()]), {"budget": 0.5, "lower": "eager"})
    f(torch.randn(64, 64)).sum().backward()
    assert "graph" not in dict(remat.plans()[-1].rows)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_budget_in_bytes_holds_for_jagged_tensors_of_every_length(lower: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16))
    f = whole(model, {"budget": "48KiB", "lower": lower})
    before = len(remat.plans())
    for lengths, plans in ([3, 5, 9], 1), ([4, 5], 1), ([20, 5, 9], 2):
        parts = [torch.randn(n, 16) for n in lengths]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        found, wanted = (
            torch.autograd.grad(run(x).sin().values().sum(), list(model.parameters()))
            for run in (f, model)
        )
        torch.testing.assert_close(found, wanted)
        made = remat.plans()[before:]
        assert all(plan.peak_bytes <= 48 * 2**10 for plan in made)
        assert len(made) >= plans
    too_small = whole(model, {"budget": "8KiB", "lower": lower})
    torch.compiler.reset()
    with pytest.raises(BudgetError):
        too_small(x)
