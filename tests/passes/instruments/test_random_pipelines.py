"""Every pass of the default pipeline, checked with numbers on random training steps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import remat
from remat.graph.text import parse_joint, print_joint
from remat.passes.instruments import OptBisect, VerifyEach
from remat.planning.pipelines import initial_state
from tests.passes.programs import Program, captured, programs


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    program=programs(max_lines=8),
    budget=st.sampled_from([0, 0.3, 0.6, 1]),
    solver=st.sampled_from(["greedy", "lagrangian"]),
    limit=st.sampled_from([-1, -1, 0, 3, 6]),
)
@pytest.mark.slow
def test_every_pass_keeps_numbers_and_tells_the_truth(
    program: Program, budget: float, solver: str, limit: int
) -> None:
    """Wherever optional passes are left out, too; and on the graph as text gives it back."""
    joint = captured(program)
    manager = remat.default_pipeline(budget, solver, "flops")
    for graph in (joint, parse_joint(print_joint(joint))):
        state = initial_state(graph, in_place=False, count_outputs=False)
        watch = [OptBisect(limit), VerifyEach(numbers=True)]
        assert manager.run(state, in_place=True, instruments=watch).backward is not None
