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
        ("gpt2", "inductor"),
        ("resnet", "inductor"),
        ("checkpointed", "eager"),
    ],
)
def test_a_model_is_read_back(name: str, lower: str) -> None:
    torch._dynamo.reset()
    step = build(name)
    joint = remat.capture(step.model, step.args, step.kwargs, lower=lower)
    plan = assert_same_plans(read_back(joint), joint, 0.3)
    read_back_half(plan.forward)
    read_back_half(plan.backward)
