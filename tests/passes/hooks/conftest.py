"""The step that most tests of hooks look at."""

from __future__ import annotations

import pytest
import torch

from remat.graph.joint import JointGraph
from tests.graphs import joint_of, weight
from tests.passes.hooks.hooked import ARGS, product


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    return joint_of(product, *ARGS)


@pytest.fixture(scope="module")
def symbolic() -> JointGraph:
    """The same step with symbolic sizes."""
    return joint_of(product, torch.randn(5, 6), weight(6, 8), dynamic=True)
