"""Fixtures of the doors into torch.compile, beside those of `tests.hard`."""

from __future__ import annotations

import pytest
import torch

import remat
from tests.e2e.doors import Mlp, NewPlans
from tests.hard.conftest import fresh_dynamo, pytest_collection_modifyitems

__all__ = ["fresh_dynamo", "mlp", "new_plans", "pytest_collection_modifyitems", "x"]


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
