"""Why a plan cannot save less: what the error and the plan say."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from remat.errors import BudgetError
from remat.passes.decide.least_causes import MOST_NAMES
from remat.units import some_of
from tests.graphs import joint_of, weight

T = torch.Tensor


def _operator(name: str) -> Callable[[T], T]:
    def call(x: T) -> T:
        return x.sin()

    made = torch.library.custom_op(f"remat_least::{name}", call, mutates_args=())
    made.register_fake(torch.empty_like)
    made.register_autograd(lambda ctx, g: g)
    return made


noise, other = _operator("noise"), _operator("other")


def undeclared(x: T, w: T) -> T:
    return other(noise(torch.mm(x, w)).sin()).exp().sum()


def tagged(x: T, w: T) -> T:
    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        save = op is torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def region(x: T, w: T) -> T:
        return torch.mm(torch.mm(x, w).sin(), w).exp()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    made: T = checkpoint(region, x, w, use_reentrant=False, context_fn=contexts)
    return made.sum()


def refilled(x: T, w: T) -> T:
    return torch.mm((x + 1).sin(), w).exp().sum()


def drawn(x: T, w: T) -> T:
    return torch.mm(torch.nn.functional.dropout(x, 0.5), w).exp().sum()


@cache
def captured(step: Callable[[T, T], T]) -> remat.JointGraph:
    x = torch.randn(16, 16) if step is refilled else weight(16, 16)
    return joint_of(step, x, weight(16, 16))


def refusal(joint: object, **options: bool) -> str:
    with pytest.raises(BudgetError) as caught:
        remat.plan(joint, "saved:2B", **options)  # type: ignore[call-overload]
    return str(caught.value)


@pytest.mark.parametrize(
    ("step", "options", "said", "unsaid"),
    [
        (
            undeclared,
            {},
            ["not declared pure (", "remat_least::noise", "remat_least::other", "declare_pure"],
            "MUST_SAVE",
        ),
        (
            tagged,
            {},
            ["because values are tagged MUST_SAVE; raise", "or loosen what is tagged MUST_SAVE"],
            "declare_pure",
        ),
        (refilled, {"reread_inputs": False}, ["because reread_inputs=False"], "MUST_SAVE"),
        (
            drawn,
            {},
            ["because random operators need the state of their generator"],
            "declare_pure",
        ),
    ],
)
def test_the_reason_is_named_and_no_other(
    step: Callable[[T, T], T], options: dict[str, bool], said: list[str], unsaid: str
) -> None:
    text = refusal(captured(step), **options)
    assert [part for part in said if part not in text] == []
    assert unsaid not in text


def test_several_graphs_under_one_budget() -> None:
    text = refusal([captured(undeclared), captured(tagged)])
    assert "remat_least::noise" in text
    assert "loosen what is tagged MUST_SAVE" in text


def test_a_share_that_was_raised_says_so_and_why() -> None:
    joint = captured(undeclared)
    plan = remat.plan(joint, 0.1)
    assert plan.capacity == plan.least_bytes
    (line,) = (r for r in plan.explain().splitlines() if r.split()[0] == "raised")
    assert f"0.1 of {plan.full_bytes / 1024:.3g} KiB is " in line
    assert f"; {plan.least_bytes / 1024:.3g} KiB is the least possible, because 2 values" in line
    again = remat.plan(joint, plan=remat.Plan.from_json(plan.to_json()))
    assert line in again.explain().splitlines()
    assert "raised" not in remat.plan(joint, 1).explain()


def test_many_names_are_counted() -> None:
    assert some_of(("a", "b", "c"), MOST_NAMES) == "a, b, c"
    assert some_of(tuple("abcde"), MOST_NAMES) == "a, b, c and 2 more"
