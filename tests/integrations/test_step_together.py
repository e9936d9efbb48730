"""Graphs of a step that is compiled piece by piece, planned together once the step exceeds its budget."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.errors import BudgetWarning
from remat.integrations import step_tally, step_together
from remat.integrations.partition_options import PartitionOptions
from remat.integrations.step_together import _group
from remat.planning.search.effort import DEFAULT
from remat.planning.set_planner import SetPlanner
from tests.integrations.blocks import Block, Blocks, by_block, made, measured, step, whole

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:.torch.jit:DeprecationWarning", "ignore:The .grad attribute of a Tensor"
    ),
]


@pytest.mark.parametrize(
    ("how", "lower"), [("blocks", "eager"), ("breaks", "eager"), ("breaks", "inductor")]
)
def test_a_budget_that_the_first_step_exceeds_holds_from_the_second_step_on(
    how: str, lower: str
) -> None:
    model, x = made(how), torch.randn(1024, 64)
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    limit = 9 * 2**20 if how == "blocks" else 11 * 2**20
    options = {"budget": remat.Peak(limit), "lower": lower}
    f = by_block(model, options) if how == "blocks" else whole(model, options)
    texts: list[str] = []
    # Graphs that come from a cache are traced in a step of their own, and fused code may take more than was estimated.
    for _ in range(4):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(f, x)
        texts += [str(w.message) for w in said if issubclass(w.category, BudgetWarning)]
    assert 1 <= len(texts) <= (3 if lower == "inductor" else 1)
    for text in texts:
        first = re.search(r"a step takes [^(]*\((\d+) bytes", text)
        assert first
        assert int(first[1]) > limit
    assert "planned together now" in texts[-1]
    found = torch.autograd.grad(f(x).sum(), [*model.parameters()])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    made_before = len(remat.plans())
    taken, figures = measured(model, f, x)
    assert (taken <= limit, figures) == (True, [])
    with torch.no_grad():
        f(x)
    f(x).sum().backward()
    assert len(remat.plans()) == made_before, "nothing is compiled a third time"


def settled(train: Callable[[], object]) -> int:
    """How many plans a training makes after its first four rounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for _ in range(4):
            train()
        before = len(remat.plans())
        for _ in range(3):
            train()
    return len(remat.plans()) - before


def test_steps_of_two_kinds_are_each_planned_together() -> None:
    model, x = made("blocks"), torch.randn(1024, 64)
    f = by_block(model, {"budget": remat.Peak("9MiB"), "lower": "eager"})

    def train() -> None:
        for mode in (True, False):
            model.train(mode)
            step(f, x)

    assert settled(train) == 0
    for mode in (True, False):
        model.train(mode)
        taken, said = measured(model, f, x)
        assert (taken <= 9 * 2**20, said) == (True, [])


def test_equal_blocks_whose_inputs_have_other_strides_are_compiled_again_as_they_were() -> None:
    """The blocks of a DiT: the first one gets a transposed tensor. Dynamo would make its strides dynamic."""
    model, x = made("blocks"), torch.randn(16, 64, 64)
    options = {"budget": remat.Peak("9MiB"), "lower": "eager"}
    by_block(model, options)

    def step() -> torch.Tensor:
        y = model.blocks[0](x.mT)
        for block in model.blocks[1:]:
            y = block(y.contiguous())
        return y.sum()

    before = len(remat.plans())
    with pytest.warns(BudgetWarning, match="planned together now"):
        step().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        step().backward()
        step().backward()
    plans = remat.plans()[before:]
    assert not any(plan.symbolic for plan in plans)
    assert step_tally.tally_of(9 * 2**20)._peak <= 9 * 2**20


def validating(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def accumulating(model: nn.Module, x: torch.Tensor) -> None:
    for k in (1, 2):
        model(k * x).sum().backward()


def with_one_backward(model: nn.Module, x: torch.Tensor) -> None:
    """Both forwards keep their values until backward."""
    (model(x[:512]).sum() + model(x[512:]).sum()).backward()


def checkpointing(model: nn.Module, x: torch.Tensor) -> None:
    first, *others = model.blocks  # type: ignore[misc]
    x = checkpoint(first, x, use_reentrant=False)
    for block in others:
        x = block(x)
    x.sum().backward()


@pytest.mark.parametrize(
    ("train", "graphs"),
    [(validating, 2), (accumulating, 2), (with_one_backward, 2), (checkpointing, 3)],
)
def test_loops_as_people_write_them_hold_the_budget(
    train: Callable[[nn.Module, torch.Tensor], None], graphs: int
) -> None:
    model, plain, x = made("blocks"), made("blocks"), torch.randn(1024, 64)
    by_block(model, {"budget": remat.Peak("9MiB"), "lower": "eager"})
    before = len(remat.plans())
    train(plain, x)
    with pytest.warns(BudgetWarning, match="planned together now"):
        train(model, x)
    peaks, counts = [], []
    for _ in range(3):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error", BudgetWarning)
            train(model, x)
        peaks.append(step_tally.tally_of(9 * 2**20)._peak)
        counts.append(len(remat.plans()) - before)
    assert max(peaks) <= 9 * 2**20
    kinds = DEFAULT.several.kinds
    assert counts == [counts[0]] * 3, "nothing is compiled a third time"
    assert counts[0] <= (1 + kinds) * graphs
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("collectives", [False, True])
def test_ranks_plan_together_unless_their_graphs_have_collectives(
    collectives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose plans differ would recompute other collectives, and hang."""
    monkeypatch.setattr(PartitionOptions, "with_others", True)
    monkeypatch.setattr(step_together, "is_collective", lambda node: collectives)
    f = by_block(made("blocks"), {"budget": remat.Peak("9MiB"), "lower": "eager"})
    text = "Compile the model as one graph" if collectives else "planned together now"
    with pytest.warns(BudgetWarning, match=text):
        f(torch.randn(1024, 64)).sum().backward()


def with_graphs_for_each_size() -> nn.Module:
    model = made("blocks")
    for block in model.blocks:  # type: ignore[union-attr]
        options = {"budget": remat.Peak("9MiB"), "lower": "eager"}
        block.compile(backend="remat", dynamic=False, options=options)
    return model


def test_two_lengths_hold_where_each_has_graphs_of_its_own() -> None:
    model, figures = with_graphs_for_each_size(), []
    for rows in (1024, 900) * 3:
        taken, said = measured(model, model, torch.randn(rows, 64))
        figures.append((taken <= 9 * 2**20, said))
    assert figures[-2:] == [(True, [])] * 2


def test_a_later_size_that_finds_no_room_runs_on_its_least_peak() -> None:
    """The graphs of the first size were planned together by then."""
    model = with_graphs_for_each_size()
    with pytest.warns(BudgetWarning, match="planned together now"):
        model(torch.randn(1024, 64)).sum().backward()
    with pytest.warns(BudgetWarning, match="No plans within the budget were found"):
        model(torch.randn(2500, 64)).sum().backward()


def test_a_check_at_another_size_before_the_training_leaves_it_static() -> None:
    """Dynamo makes the sizes of the training dynamic, and would keep them so."""
    model, x = made("blocks"), torch.randn(1024, 64)
    f = by_block(model, {"budget": remat.Peak("9MiB"), "lower": "eager"})
    with torch.no_grad():
        f(x[:100])

    def train() -> None:
        # A tensor that was dynamic once remains so for Dynamo, so each batch is a new one.
        out = f(x.clone())  # held during backward, as in the measured step
        out.sum().backward()

    assert settled(train) == 0
    taken, said = measured(model, f, x.clone())
    assert (taken <= 9 * 2**20, said) == (True, [])


def test_validation_at_another_size_leaves_the_plans_of_the_training() -> None:
    model = made("blocks")
    f, limit = by_block(model, {"budget": remat.Peak("9MiB"), "lower": "eager"}), 9 * 2**20

    def train() -> None:
        for _ in range(2):
            f(torch.randn(1024, 64)).sum().backward()
        assert step_tally.tally_of(limit)._peak <= limit
        with torch.no_grad():
            f(torch.randn(100, 64))

    assert settled(train) == 0


def test_models_that_share_a_budget_keep_their_plans() -> None:
    models, x = [made("blocks"), made("blocks")], torch.randn(1024, 64)
    for model in models:
        by_block(model, {"budget": remat.Peak("9MiB"), "lower": "eager"})
    assert settled(lambda: [model(x).sum().backward() for model in models]) == 0


def test_a_later_step_that_exceeds_the_budget_is_planned_together() -> None:
    model, x = made("blocks"), torch.randn(1024, 64)
    f = by_block(model, {"budget": remat.Peak("9MiB"), "lower": "eager"})
    model.blocks[0](x).sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            step(f, x)
    assert any("planned together now" in str(w.message) for w in said)
    taken, figures = measured(model, f, x)
    assert (taken <= 9 * 2**20, figures) == (True, [])


def test_a_step_is_planned_together_where_dynamo_traces_backward() -> None:
    model, x = made("breaks"), torch.randn(1024, 64)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    compiled = torch.compile(
        train, backend="remat", options={"budget": remat.Peak("9MiB"), "lower": "eager"}
    )
    with pytest.warns(BudgetWarning, match="planned together"):
        compiled(x)
    model.zero_grad()
    compiled(x)
    found = [p.grad for p in model.parameters()]
    for a, b in zip(found, torch.autograd.grad(model(x).sum(), [*model.parameters()]), strict=True):
        torch.testing.assert_close(a, b)


def eight(limit: int, lower: str = "eager") -> tuple[Blocks, Callable[..., Any], torch.Tensor]:
    """Eight equal blocks after the two steps in which they are planned, one by one and then together."""
    torch.manual_seed(0)
    model, x = Blocks([Block() for _ in range(8)]), torch.randn(1024, 64).requires_grad_()
    f = by_block(model, {"budget": remat.Peak(limit), "lower": lower})
    with pytest.warns(BudgetWarning, match="planned together now"):
        step(f, x)
    step(f, x)
    model.zero_grad()
    x.grad = None
    return model, f, x


def same_gradients(model: Blocks, f: Callable[..., Any], x: torch.Tensor) -> None:
    """Compare the gradients of a step with those of uncompiled blocks."""
    found = torch.autograd.grad(f(x).sin().sum(), [*model.parameters()])
    with torch.compiler.set_stance("force_eager"):
        right = torch.autograd.grad(f(x).sin().sum(), [*model.parameters()])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_equal_blocks_take_few_plans_that_together_hold_the_budget() -> None:
    limit = 14 * 2**20
    before = len(remat.plans())
    model, f, x = eight(limit)
    plans = remat.plans()[before + 1 :]  # the first one is of a single block
    assert 2 <= len(plans) <= 4
    assert len({p.saved_bytes for p in plans}) > 1
    taken, said = measured(model, f, x)
    assert (0.9 * limit < taken <= limit, said) == (True, [])
    same_gradients(model, f, x)
    assert len(remat.plans()) == before + 1 + len(plans)


@pytest.mark.parametrize("how", ["fewer", "skipped", "twice", "never backward", "evaluated"])
def test_another_number_of_runs_changes_no_gradient(how: str) -> None:
    """Runs take their plans by number, and each keeps its own backward."""
    limit = 14 * 2**20
    model, f, x = eight(limit)
    made_before = len(remat.plans())

    def others(x: torch.Tensor) -> torch.Tensor:
        if how == "twice":
            return f(x) + f(2 * x)
        if how == "never backward":
            model.blocks[0](x)
        if how == "evaluated":
            with torch.no_grad():
                f(x)
            return f(x)
        left = model.blocks[:3] if how == "fewer" else model.blocks[1::2]
        for block in left:
            x = block(x)
        return x + sum(p.sum() for p in model.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)  # two forwards at once take more
        same_gradients(model, others, x)
    assert len(remat.plans()) == made_before
    taken, said = measured(model, f, x)
    assert taken <= limit
    assert not said


def test_random_numbers_of_blocks_with_several_plans_are_those_of_one_plan() -> None:
    class Random(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.3, training=True)

    found = []
    for budget in (14 * 2**20, 2**30):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, x = Blocks([Random() for _ in range(8)]), torch.randn(1024, 64).requires_grad_()
        f = by_block(model, {"budget": remat.Peak(budget), "lower": "eager"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            before = len(remat.plans())
            step(f, x)
            torch.manual_seed(1)
            found.append(torch.autograd.grad(f(x).sum(), [x, *model.parameters()]))
        assert (len(remat.plans()) - before > 2) == (budget < 2**30)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("lower", "holds"), [("eager", True), ("eager", False), ("inductor", True)]
)
def test_the_simulated_step_is_the_counted_one(
    lower: str, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody holds the last output when backward begins, and as fused."""
    own, simulated = SetPlanner.peak_of, list[int]()

    def peak_of(*given: Any) -> int:
        simulated.append(own(*given))
        return simulated[-1]

    monkeypatch.setattr(SetPlanner, "peak_of", peak_of)
    model, x = Blocks([Block() for _ in range(3)]), torch.randn(1024, 64).requires_grad_()
    f = by_block(model, {"budget": remat.Peak("7MiB"), "lower": lower})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):  # graphs from a cache are traced in a step of their own
            out = f(x)
            loss = out.sin().sum()
            if not holds:
                del out
            loss.backward()
            if simulated:
                break
    counted = re.search(r"a step takes [^(]*\((\d+) bytes\)", str(said[-1].message))
    assert counted
    assert simulated[0] == int(counted[1])


def test_plans_that_save_about_as_much_become_one_beyond_four() -> None:
    saved = [1, 2, 10, 11, 30, 31, 60]
    assert [_group(saved, n, 4) for n in saved] == [0, 0, 1, 1, 2, 2, 3]
    assert [_group([5], n, 4) for n in (5, 5)] == [0, 0]
