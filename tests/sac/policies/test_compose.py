"""Composition of policies, and invalid answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from remat.errors import PolicyError, ProblemError
from remat.sac import compose, context_fn
from remat.sac.policies.compose import Policy
from tests.sac.planned import checkpointed

aten = torch.ops.aten
MUST_SAVE, PREFER_SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
PREFER_RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE
PREFER_OFFLOAD = CheckpointPolicy.PREFER_CPU_OFFLOAD


class Says:
    """Policy that always gives the same answer, and counts its calls."""

    def __init__(self, name: str, answer: Any) -> None:
        self.name, self.answer, self.asked = name, answer, 0

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return self.answer

    def __str__(self) -> str:
        return self.name


def says(*answers: Any) -> list[Says]:
    return [Says(f"p{i}", a) for i, a in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ((PREFER_SAVE, MUST_RECOMPUTE), MUST_RECOMPUTE),
        ((MUST_SAVE, PREFER_RECOMPUTE, MUST_SAVE), MUST_SAVE),
        ((PREFER_RECOMPUTE, PREFER_SAVE), PREFER_SAVE),
        ((PREFER_RECOMPUTE, PREFER_OFFLOAD, PREFER_SAVE), PREFER_OFFLOAD),
        ((PREFER_RECOMPUTE, PREFER_RECOMPUTE), PREFER_RECOMPUTE),
        ((PREFER_SAVE,), PREFER_SAVE),
    ],
)
def test_verdicts(answers: tuple[CheckpointPolicy, ...], verdict: CheckpointPolicy) -> None:
    policies = says(*answers)
    assert compose(*policies)(None, aten.sin.default) is verdict
    assert [p.asked for p in policies] == [1] * len(policies)


def test_two_that_insist_on_different_things_are_refused() -> None:
    policies = says(PREFER_SAVE, MUST_SAVE, MUST_RECOMPUTE)
    with pytest.raises(PolicyError) as caught:
        compose(*policies)(None, aten.mm.default)
    assert "aten.mm.default: policy 'p1' says MUST_SAVE, policy 'p2' says MUST_RECOMPUTE" in str(
        caught.value
    )
    assert [p.asked for p in policies] == [1, 1, 1]


def test_lists_of_operators() -> None:
    both = compose([aten.mm.default, aten.sin.default], *says(PREFER_RECOMPUTE))
    assert both(None, aten.sin.default) is MUST_SAVE
    assert both(None, aten.cos.default) is PREFER_RECOMPUTE
    with pytest.raises(PolicyError, match=r"'save aten.sin.default' says MUST_SAVE"):
        compose([aten.sin.default], *says(MUST_RECOMPUTE))(None, aten.sin.default)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [[aten.mm]],
            "'aten.mm' stands for several operators; name one of them, as aten.mm.default",
        ),
        ([[torch.mm]], "expected operators to save"),
        (["aten.mm.default"], "expected a policy or a list of operators"),
        ([None], "expected a policy or a list of operators"),
        ([], "nothing to compose"),
    ],
)
def test_what_is_no_policy_is_refused(given: list[Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        compose(*given)


def ran(policy: Any, **options: Any) -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    out: torch.Tensor = checkpointed(
        lambda t: t.sin().exp(), x, contexts=context_fn(policy, **options)
    )
    return out


def saves_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return True


def fails(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    raise LookupError("no such layer")


class Unnamed:
    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return None


@pytest.mark.parametrize("wrap", [lambda p: p, compose, lambda p: compose(compose(p), p)])
@pytest.mark.parametrize(
    ("policy", "says", "cause"),
    [
        (
            saves_all,
            "policy 'saves_all' returned True; expected a torch.utils.checkpoint.CheckpointPolicy: "
            "PyTorch reads True as MUST_SAVE",
            type(None),
        ),
        (fails, "policy 'fails' raised LookupError: no such layer", LookupError),
        (Unnamed(), "policy 'Unnamed' returned None", type(None)),
        (partial(Unnamed()), "policy 'Unnamed' returned None", type(None)),
    ],
)
def test_a_wrong_answer_and_an_error_name_module_operator_and_policy(
    wrap: Callable[[Any], Policy], policy: Policy, says: str, cause: type
) -> None:
    with pytest.raises(PolicyError) as caught:
        ran(wrap(policy), module="encoder.0")
    assert str(caught.value).startswith(f"module 'encoder.0': aten.sin.default: {says}")
    assert isinstance(caught.value.__cause__, cause)


def test_a_region_without_a_name_is_called_by_its_policy() -> None:
    with pytest.raises(PolicyError, match=r"region with policy 'fails': aten.sin.default"):
        ran(fails)


def test_parts_are_renewed_and_told_of_the_end() -> None:
    told: list[str] = []

    class Counts(Says):
        def fresh(self) -> Counts:
            told.append("fresh")
            return Counts(self.name, self.answer)

        def end(self) -> None:
            told.append(f"end {self.asked}")

    ran(compose(Counts("a", PREFER_SAVE), compose(Counts("b", PREFER_RECOMPUTE))))
    assert told == ["fresh", "fresh", "end 2", "end 2"]
