"""Real architectures under ``torch.compile(backend="remat")``: two steps leave behind what eager's do."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import remat
from tests.model_type_steps import LIMIT, Bench, Case, Result, errors
from tests.model_types import make

pytestmark = [
    # Importing Inductor imports a deprecated corner of torch.jit.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    # The models of transformers remember things, and Dynamo says that it looks past that.
    pytest.mark.filterwarnings(
        "ignore:Dynamo detected a call to a .functools.lru_cache.:UserWarning"
    ),
]

#: Routed experts, an encoder with a decoder, and convolutions with dropped paths.
TYPES = ("mixtral", "bart", "convnext")
BUDGETS = (1.0, 0.2)


@functools.cache
def bench(name: str) -> Bench:
    return Bench(make(name))


@functools.cache
def run(name: str, lower: str, shapes: str, budget: float) -> Result:
    """Runs a case that must work, in one graph that serves both batches."""
    result = bench(name).run(Case(lower=lower, shapes=shapes, budget=budget))
    assert result.failed is None
    assert not result.wrong, result
    assert (result.plans, result.breaks, result.again) == (1, 0, 0)
    # What runs once must be saved at every budget: a share below the least possible is that.
    assert result.saved_bytes <= max(budget * result.full_bytes, result.least_bytes)
    return result


@pytest.mark.parametrize("name", TYPES)
def test_two_steps_are_the_same_at_every_budget(name: str) -> None:
    full, least = (run(name, "eager", "static", budget) for budget in BUDGETS)
    assert full.same_bits
    assert least.same_bits
    assert least.saved_bytes < full.saved_bytes
    assert replays_what_it_should(name, least)


@pytest.mark.parametrize("name", ["mixtral", "convnext"])
def test_two_steps_of_different_sizes(name: str) -> None:
    """At one budget: PyTorch traces them ten times as long as those of one size."""
    result = run(name, "eager", "dynamic", 0.2)
    assert result.saved_bytes < result.full_bytes
    assert replays_what_it_should(name, result)


def replays_what_it_should(name: str, result: Result) -> bool:
    """What drops a path draws so few numbers that saving them is cheaper than drawing them again."""
    return (result.replayed > 0) is (name != "convnext")


@pytest.mark.vectorised
def test_two_steps_under_inductor() -> None:
    """Gradients of this model are wrong with Inductor's vectorised ends of loops."""
    run("mamba", "inductor", "static", 0.5)


def test_an_operator_that_is_declared_pure_lets_the_budget_hold() -> None:
    """The products of routed experts are an operator of transformers' own, which must run once."""
    plain = run("mixtral", "eager", "static", 0.2)
    assert plain.saved_bytes == plain.least_bytes > 0.2 * plain.full_bytes
    remat.declare_pure("transformers::grouped_mm_fallback")
    try:
        declared = run.__wrapped__("mixtral", "eager", "static", 0.2)
    finally:
        remat.undeclare_pure("transformers::grouped_mm_fallback")
    assert declared.saved_bytes <= 0.2 * declared.full_bytes


def test_these_steps_have_dropout() -> None:
    assert all(bench(name).is_random() for name in TYPES)


def test_one_wrong_gradient_is_seen() -> None:
    (first, second), limit = bench("convnext").eager["static"], LIMIT["eager"]
    name, least = min(first.gradients.items(), key=lambda item: float(item[1].norm()))
    wrong = dataclasses.replace(first, gradients={**first.gradients, name: least * 1.01})
    assert errors([first, second], [first, second])["parameter_error"] == 0
    assert errors([wrong, second], [first, second])["parameter_error"] > 10 * limit
    missing = {k: g for k, g in first.gradients.items() if k != name}
    fewer = dataclasses.replace(first, gradients=missing)
    assert errors([fewer, second], [first, second])["gradient_error"] is None
    drawn = dataclasses.replace(first, random_state=torch.zeros(5056, dtype=torch.uint8))
    assert not errors([drawn, second], [first, second])["same_state"]


def test_a_step_that_raises_is_a_result() -> None:
    """A step peaks above two bytes; the refusal of that budget is what came of it."""
    result = bench("convnext").run(Case(lower="eager", shapes="static", budget=2))
    assert result.failed is not None
    assert result.failed.startswith("BudgetError: budget is a peak of 2 B")
    assert not result.wrong
