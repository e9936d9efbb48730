"""Bytes alive at once, against counting by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import remat
from remat.graph.memory.liveness import (
    StorageKind,
    Timeline,
    memory_curve,
    own_outputs,
    saved_storages,
    timeline,
)
from remat.graph.problems.lowering import Decision
from remat.planning.pipelines import prepare, split
from tests.graphs import joint_of, weight
from tests.models import build


def timeline_of(plan: remat.Plan) -> Timeline:
    return timeline(plan.forward, plan.backward, own_outputs(plan.forward))


@functools.cache
def one_product(budget: float) -> remat.Plan:
    joint = joint_of(lambda x, w: torch.mm(x.cos(), w).sum(), weight(4, 4), weight(4, 4))
    return remat.plan(joint, budget)


def test_peak_in_forward() -> None:
    """The input (64 bytes), the first sum (4), big and its exponential (16 KiB each)."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        big = torch.zeros(64, 64)
        return x.sum(), (big + 1).exp().sum()

    joint = joint_of(f, weight(4, 4))
    plan = remat.plan(joint, 1)
    step = timeline_of(plan)
    assert step.peak_point < step.boundary
    assert step.peak_bytes == 64 + 4 + 2 * 4 * 64 * 64


def test_saved_storages_leave_out_inputs_and_outputs() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (x @ w).tanh()
        return h, (h @ w).exp().sum()

    joint = joint_of(f, weight(4, 4), weight(4, 4))
    plan = remat.plan(joint, 1)
    n = joint.num_fwd_outputs
    assert "tanh" in plan.saved
    assert {"mm_1", "exp"} & set(plan.saved)
    assert list(saved_storages(plan.forward, n).values()) == [64]
    assert list(saved_storages(plan.forward, n, count_outputs=True).values()) == [64, 64]
    assert plan.saved_bytes == 64
    assert remat.plan(joint, 1, count_outputs=True).saved_bytes == 128


def test_timeline_of_one_product() -> None:
    """At the peak: both inputs (128 bytes), the loss (4), the gradient of w, mm_2, sin and neg (64 each)."""
    plan = one_product(1)
    step = timeline_of(plan)
    assert step.program_points[step.peak_point] == "neg"
    assert step.peak_point >= step.boundary
    assert plan.peak_bytes == step.peak_bytes == 388
    forward, backward = step.program_points[: step.boundary], step.program_points[step.boundary :]
    assert forward == ("cos", "mm", "sum_1")
    assert backward[-3:] == ("sin", "neg", "mul")
    assert step.nbytes()[:3] == (192, 256, 260)
    assert step.nbytes(StorageKind.INPUT) == (128,) * len(step.program_points)
    assert step.peak_bytes == memory_curve(plan.forward, plan.backward, 1).peak_bytes
    (cos,) = (x for x in step.lifetimes if x.node == "cos")
    assert (cos.first, cos.nbytes, step.program_points[cos.last]) == (0, 64, "mm_1")
    assert cos.last >= step.boundary, "a saved value lives to its last use"
    kinds = {(x.node, x.kind) for x in step.lifetimes}
    assert ("cos", StorageKind.SAVED) in kinds
    assert ("mm", StorageKind.TEMPORARY) in kinds
    assert ("sum_1", StorageKind.OUTPUT) in kinds
    assert ("tangents_1", StorageKind.TANGENT) in kinds
    assert sum(kind is StorageKind.GRADIENT for _, kind in kinds) == 2
    at_peak = step.alive(step.peak_point)
    assert sum(x.nbytes for x in at_peak) == step.peak_bytes
    assert [x.nbytes for x in at_peak] == sorted((x.nbytes for x in at_peak), reverse=True)
    assert {"sin", "neg"} < {x.node for x in at_peak}
    assert not {"cos", "tangents_1"} & {x.node for x in at_peak}


def test_a_recomputed_value_lives_once_in_each_half() -> None:
    """With no budget nothing is kept of `cos`, and both runs of it are short."""
    plan = one_product(0)
    assert plan.recomputed == ("cos",)
    step = timeline_of(plan)
    first, second = (x for x in step.lifetimes if x.node == "cos")
    assert first.last < step.boundary <= second.first
    assert (first.kind, second.kind) == (StorageKind.TEMPORARY, StorageKind.RECOMPUTED)


def test_lifetimes_name_the_line_of_the_user() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.mm(x, w).tanh()
        return nn.functional.layer_norm(h, (4,)).sum()

    step = timeline_of(remat.plan(joint_of(f, weight(4, 4), weight(4, 4)), 1))
    source = {x.node: x.source for x in step.lifetimes}
    assert source["tanh"].startswith("test_liveness.py:")
    assert source["tanh"].endswith("h = torch.mm(x, w).tanh()")
    assert source["native_layer_norm"].endswith("return nn.functional.layer_norm(h, (4,)).sum()")
    assert source["primals_1"] == ""


@pytest.mark.parametrize("name", ["mutated_buffer", "checkpointed"])
@pytest.mark.slow
def test_the_quick_peak_is_the_peak_of_the_timeline(name: str) -> None:
    step = build(name)
    joint = remat.capture(step.model, step.args, step.kwargs, lower="eager")
    for budget in (0, 0.5, 1):
        plan = remat.plan(joint, budget)
        drawn = timeline_of(plan)
        assert own_outputs(plan.forward) == joint.num_fwd_outputs
        peak = memory_curve(plan.forward, plan.backward, joint.num_fwd_outputs).peak_bytes
        assert drawn.peak_bytes == peak == plan.peak_bytes
        assert drawn.nbytes() == tuple(
            map(sum, zip(*(drawn.nbytes(kind) for kind in StorageKind), strict=True))
        )
        # What is saved stands between the halves; outputs that are saved too count as outputs.
        assert drawn.nbytes(StorageKind.SAVED)[drawn.boundary] <= plan.saved_bytes
        assert drawn.nbytes(StorageKind.SAVED)[drawn.boundary - 1] == plan.saved_bytes


def test_what_is_made_again_beside_its_kept_twin_counts() -> None:
    """Forward returns the values of a sort; backward needs the indices and sorts again."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = x.neg().sort(dim=1).values  # exact, so that the indices may be computed again
        return values, values.exp().sum()

    plan = remat.plan(joint_of(f, weight(8, 8)), 0)
    assert "sort" in plan.recomputed
    step = timeline_of(plan)
    again = [x for x in step.lifetimes if x.node == "sort" and x.first >= step.boundary]
    assert sorted(x.nbytes for x in again) == [256, 512]  # values and indices
    kept = [x for x in step.lifetimes if x.node == "sort" and x.kind is StorageKind.OUTPUT]
    assert [(x.nbytes, x.last) for x in kept] == [(256, len(step.program_points) - 1)]


def test_a_view_of_an_earlier_run_is_of_its_memory() -> None:
    """The sine runs a third time behind the last run of its transpose, which looks at the second."""
    joint = joint_of(lambda x: (x * 2).sin().T.exp().sum(), weight(4, 4))
    decision = Decision(
        saved=("exp", "mul"),
        forward_order=("mul", "sin", "exp", "sin", "exp", "sin", "sum_1"),
        backward_order=("mul_1", "cos", "mul_2", "mul_3"),
    )
    done = split(replace(prepare(joint), decision=decision))
    assert done.forward is not None
    assert done.backward is not None
    step = timeline(done.forward, done.backward, joint.num_fwd_outputs)
    assert step.program_points[1:8] == (
        *("sin_again", "permute_again", "exp_again"),
        *("sin_again_1", "permute", "exp", "sin"),
    )
    found = {x.node: (x.first, x.last) for x in step.lifetimes}
    assert "permute" not in found
    assert found["sin_again"] == (1, 3)
    assert found["sin_again_1"] == (4, 6)
    assert found["sin"] == (7, 7)


def test_a_half_without_operators() -> None:
    """A forward that only hands its input on."""
    forward, backward = fx.Graph(), fx.Graph()
    with FakeTensorMode():
        x, y = torch.empty(4, 4), torch.empty(2)
    given = forward.placeholder("primals_1")
    given.meta["val"] = x
    forward.output((given,))
    tangent = backward.placeholder("tangents_1")
    tangent.meta["val"] = y
    backward.output((tangent,))
    halves = fx.GraphModule({}, forward), fx.GraphModule({}, backward)
    step = timeline(*halves, 1)
    assert step.program_points == ("", "")
    assert step.nbytes() == (64, 72)
    assert step.peak_bytes == memory_curve(*halves, 1).peak_bytes
