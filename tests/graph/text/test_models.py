"""Real architectures are written and read back whole."""

from __future__ import annotations

import pytest
import torch

import remat
from tests.graph.text.checks import assert_same_plans, read_back, read_back_half
from tests.models import build

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("llama", "eager"),
        ("gpt2", "inductor"),
        ("resnet", "inductor"),
        ("checkpointed", "inductor"),
        ("mutated_buffer", "eager"),
    ],
)
def test_a_model_is_read_back(name: str, lower: str) -> None:
    torch._dynamo.reset()
    step = build(name)
    joint = remat.capture(step.model, step.args, step.kwargs, lower=lower)
    parsed = read_back(joint)
    assert_same_plans(parsed, joint, 0.3)
    plan = remat.plan(parsed, 0.3)
    read_back_half(plan.forward)
    read_back_half(plan.backward)
