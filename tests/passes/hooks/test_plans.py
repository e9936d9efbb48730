"""Plans and pipelines with saved-tensor hooks: what they count, hold and refuse."""

from __future__ import annotations

import pytest
import torch

import remat
from remat.errors import BudgetError, ProblemError
from remat.graph.joint import JointGraph
from remat.passes.hooks.saved_tensor_hooks import PackSaved
from remat.planning.pipelines import prepare
from tests.graphs import joint_of, weight
from tests.passes.hooks.hooked import CAST, Hooks


def test_plans_count_what_is_really_handed_over(joint: JointGraph) -> None:
    plain, packed = remat.plan(joint, 1), remat.plan(joint, 1, hooks="float8")
    assert (plain.saved_bytes, packed.saved_bytes) == (128, 32 + 4)
    assert packed.saved == plain.saved
    assert "36 B" in packed.explain()
    again = remat.plan(joint, plan=remat.Plan.from_json(packed.to_json()), hooks="float8")
    assert again.saved_bytes == packed.saved_bytes


def deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = torch.sin(x @ w)
    return x.sum()


def test_a_budget_on_the_peak_is_held_by_the_packed_step() -> None:
    joint = joint_of(deep, torch.randn(64, 64), weight(64, 64))
    plain = remat.plan(joint, 1)
    packed = remat.plan(joint, 1, hooks="bf16")
    between = (plain.peak_bytes + packed.peak_bytes) // 2
    held = remat.plan(joint, remat.Peak(between), hooks="bf16")
    assert held.peak_bytes <= between
    assert held.recompute_cost <= packed.recompute_cost
    assert remat.plan(joint, remat.Peak(between)).recompute_cost > held.recompute_cost


def test_hooks_that_break_the_budget_are_refused(joint: JointGraph) -> None:
    grows = Hooks(pack=lambda x: (x.clone(), x.clone()), unpack=lambda p: p[0])
    with pytest.raises(BudgetError, match="forward hands over 256 bytes, 128 are allowed"):
        remat.plan(joint, 1, hooks=grows)
    alive = Hooks(pack=CAST[0], unpack=CAST[1], filter="all")
    with pytest.raises(BudgetError, match="was alive anyway"):
        remat.plan(joint, 0, hooks=alive)


def test_hooks_and_a_pipeline_do_not_go_together(joint: JointGraph) -> None:
    pipeline = f"{remat.default_pipeline(1)},saved-tensor-hooks(pair=bf16,min-bytes=64)"
    assert remat.plan(joint, pipeline=pipeline).saved_bytes == 64
    with pytest.raises(ProblemError, match="end the pipeline with the pass"):
        remat.plan(joint, pipeline=pipeline, hooks="bf16")


def test_options_that_cannot_be_meant_are_refused_in_a_pipeline() -> None:
    with pytest.raises(ProblemError, match="filter is 'none'"):
        remat.PassManager.parse("partition,saved-tensor-hooks(filter=none)")
    with pytest.raises(ProblemError, match="ready-made pair"):
        remat.PassManager.parse("partition,saved-tensor-hooks(pair=int4)")


def test_a_graph_that_is_not_split_is_left(joint: JointGraph) -> None:
    result = PackSaved().run(prepare(joint))
    assert not result.modified
    assert result.detail == "not partitioned"
