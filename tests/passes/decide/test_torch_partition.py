"""PyTorch's own decision as a pass: what it saves, within bytes, and never what draws twice."""

from __future__ import annotations

import pytest

import remat
from remat.errors import BudgetError
from remat.passes.decide.min_cut import MinCut
from remat.passes.decide.torch_partition import TorchPartition
from remat.planning.pipelines import PREPARE, SPLIT, PassManager
from remat.running.differences import first_difference
from remat.running.trial import Trial
from remat.units import Budget
from tests.models import build


def pipeline(share: float) -> PassManager:
    return PassManager((*PREPARE, MinCut(), TorchPartition(budget=Budget(share=share)), *SPLIT))


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    step = build("gpt2")
    return remat.capture(step.model, step.args, step.kwargs)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_it_is_pytorch_s_decision_within_the_budget(joint: remat.JointGraph, share: float) -> None:
    plan = remat.plan(joint, pipeline=pipeline(share))
    assert plan.solver == "torch-partition"
    assert 0.8 * plan.capacity <= plan.saved_bytes <= plan.capacity
    ours = remat.plan(joint, share, cost="roofline")
    assert ours.capacity == plan.capacity
    assert ours.recompute_cost <= plan.recompute_cost


def test_at_budget_one_it_saves_the_bytes_of_the_cut(joint: remat.JointGraph) -> None:
    assert (
        remat.plan(joint, pipeline=pipeline(1.0)).saved_bytes
        == remat.plan(joint, 1, "cut").saved_bytes
    )


def test_its_text_reads_back() -> None:
    made = PassManager((TorchPartition(budget=Budget(share=0.4)),))
    assert "torch-partition" in str(made)
    assert PassManager.parse(str(made)) == made


def test_what_pytorch_would_draw_twice_is_refused() -> None:
    step = build("randn_like")
    joint = remat.capture(step.model, step.args, step.kwargs)
    with pytest.raises(BudgetError, match="what is random twice"):
        remat.plan(joint, pipeline=pipeline(0.2))


def test_halves_that_run_on_it_make_the_same_gradients(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, pipeline=pipeline(0.3))
    trial, n = Trial.of(joint), joint.num_fwd_outputs
    wanted = trial.run_joint(joint)
    assert first_difference(wanted, trial.run_halves(plan.forward, plan.backward, n)) is None
