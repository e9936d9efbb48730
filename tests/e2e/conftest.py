"""Every test compiles from scratch: nothing that Dynamo kept of an earlier test is reused.

The other fixtures are those of the doors into torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import remat
from tests.e2e.doors import Mlp, NewPlans


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp().train()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(128, 64)


@pytest.fixture
def new_plans() -> NewPlans:
    """The plans made since the test started."""
    before = len(remat.plans())
    return lambda: remat.plans()[before:]
