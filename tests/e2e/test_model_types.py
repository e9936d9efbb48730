"""Model types of `transformers`: a recipe of each trains two steps as it does without us."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import torch
from torch import nn

from tests.model_type_steps import LIMIT, Bench, Case, Result, errors
from tests.model_types import Built, make


@functools.cache
def bench(name: str) -> Bench:
    return Bench(make(name))


def run(name: str, shapes: str, budget: float) -> Result:
    """Runs a case that must work, in one graph that serves both batches."""
    result = bench(name).run(Case(lower="eager", shapes=shapes, budget=budget))
    assert result.failed is None
    assert not result.wrong, result
    assert (result.plans, result.breaks, result.again) == (1, 0, 0)
    # What runs once must be saved at every budget: a share below the least possible is that.
    assert result.saved_bytes <= max(budget * result.full_bytes, result.least_bytes)
    return result


def test_two_steps_are_the_same_at_every_budget() -> None:
    assert bench("mixtral").is_random(), "these steps have dropout"
    full, least = (run("mixtral", "static", budget) for budget in (1.0, 0.2))
    assert least.same_bits
    assert least.saved_bytes < full.saved_bytes
    assert least.replayed > 0


def test_two_steps_of_different_sizes() -> None:
    """At one budget: PyTorch traces them ten times as long as those of one size."""
    result = run("gpt2", "dynamic", 0.2)
    assert result.saved_bytes < result.full_bytes
    assert result.replayed > 0


# The bench itself, which benchmarks use too ---------------------------------------------------------


def test_one_wrong_gradient_is_seen() -> None:
    (first, second), limit = bench("mixtral").eager["static"], LIMIT["eager"]
    name, least = min(first.gradients.items(), key=lambda item: float(item[1].norm()))
    wrong = dataclasses.replace(first, gradients={**first.gradients, name: least * 1.01})
    assert errors([first, second], [first, second])["parameter_error"] == 0
    assert errors([wrong, second], [first, second])["parameter_error"] > 10 * limit
    missing = {k: g for k, g in first.gradients.items() if k != name}
    fewer = dataclasses.replace(first, gradients=missing)
    assert errors([fewer, second], [first, second])["gradient_error"] is None
    drawn = dataclasses.replace(first, random_state=torch.zeros(5056, dtype=torch.uint8))
    assert not errors([drawn, second], [first, second])["same_state"]


class Lossy(nn.Linear):
    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=super().forward(x).exp().sum())


def test_a_step_that_raises_is_a_result() -> None:
    """A step peaks above two bytes; the refusal of that budget is what came of it."""
    batches = ({"x": torch.randn(4, 8)}, {"x": torch.randn(4, 8)})
    built = Built(model=Lossy(8, 8), title="", same=batches, other=batches)
    result = Bench(built).run(Case(lower="eager", shapes="static", budget=2))
    assert result.failed is not None
    assert result.failed.startswith("BudgetError: budget is a peak of 2 B")
    assert not result.wrong
