"""One step and its plan, which pictures, pages and exports share."""

from __future__ import annotations

import pytest

import remat
from tests.report.blocks import stacked


@pytest.fixture(scope="session")
def joint() -> remat.JointGraph:
    return stacked(drop=0.1)


@pytest.fixture(scope="session")
def plan(joint: remat.JointGraph) -> remat.Plan:
    planned = remat.plan(joint, 0.4)
    assert planned.recompute_cost > 0, "reports show something that runs again"
    return planned


@pytest.fixture(scope="session")
def peak_plan(joint: remat.JointGraph) -> remat.Plan:
    """A plan that fixes the order in which operators run."""
    return remat.plan(joint, remat.Peak(0.3))
