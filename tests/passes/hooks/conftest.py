"""The step that most tests of hooks look at."""

from __future__ import annotations

import pytest

from remat.graph.joint import JointGraph
from tests.graphs import joint_of
from tests.passes.hooks.hooked import ARGS, product


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    return joint_of(product, *ARGS)
