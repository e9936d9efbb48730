"""Module trees: the estimated memory of a step is the measured memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remat.errors import CaptureError, ProblemError
from remat.running.measure import measure_step
from remat.sac import apply, remove
from remat.sac.estimation.modules import ModuleTree, estimate, loss_only
from remat.sac.solve.milp import plan as plan_for


class Block(nn.Module):
    def __init__(self, width: int = 16, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = F.dropout(torch.tanh(h) * torch.sigmoid(h), self.drop, training=self.training)
        return x + self.down(h)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.norm(self.conv(x))) + x


class Deep(nn.Module):
    """Model with blocks within stages, whose first linear layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(self.first(x))
        for stage in self.stages:
            x = stage(x)
        return {"loss": x.exp().mean(), "last": x}


MODELS = {
    "dropout": (lambda: nn.Sequential(*(Block(drop=0.5) for _ in range(4))), (64, 16)),
    "in place": (lambda: nn.Sequential(*(InPlace() for _ in range(3))), (8, 4, 6, 6)),
    "deep": (Deep, (64, 16)),
}


def example(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return make().train(), torch.randn(shape)


def tree_of(name: str, **options: Any) -> ModuleTree:
    model, x = example(name)
    return estimate(model, (x,), **options)


def measured(model: nn.Module, x: torch.Tensor, by: str = "storages") -> int:
    resident = [*model.parameters(), *model.buffers()]
    return measure_step(loss_only(model), (x,), resident=resident, by=by).peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_peaks_with_and_without_a_plan_are_those_that_are_measured(name: str) -> None:
    model, x = example(name)
    tree = estimate(model, (x,))
    assert tree.peak_bytes() == measured(model, x)
    # No operator returns generator states, so only the allocator counts them. It also counts workspaces.
    tree = replace(tree, state_bytes=0)
    plan = plan_for(tree, memory=int(0.86 * tree.peak_bytes()))
    assert plan.modules
    apply(model, plan)
    peak = measured(model, x)
    remove(model)
    assert peak <= plan.peak_bytes <= plan.budget_bytes
    assert peak >= 0.97 * plan.peak_bytes


def test_states_of_generators_count_where_modules_are_small() -> None:
    """Each checkpointed call keeps 5 KB of generator state: together, more than a tenth of this budget."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(8) for _ in range(12))).train(), torch.randn(128, 8)
    tree = estimate(model, (x,))
    plan = plan_for(tree, memory=int(0.4 * tree.peak_bytes()))
    apply(model, plan)
    assert measured(model, x, "allocator") == plan.peak_bytes <= plan.budget_bytes
    assert len(plan.modules) * tree.state_bytes > 0.1 * plan.budget_bytes


def test_fake_runs_find_the_same_and_leave_the_model_as_it_was() -> None:
    model, x = example("deep")
    before = {k: id(v) for k, v in model.named_parameters()}
    with torch.device("meta"):
        meta = tree_of("deep")
    real, fake = (estimate(model, (x,), fake=f) for f in (False, True))
    assert {k: id(v) for k, v in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())
    assert [m.name for m in real.modules] == [m.name for m in fake.modules]
    assert real.peak_bytes() == fake.peak_bytes() == meta.peak_bytes()
    assert [m.activation_bytes for m in real.modules] == [m.activation_bytes for m in fake.modules]


def test_a_real_run_leaves_statistics_gradients_and_generators_alone() -> None:
    model, x = example("in place")
    leaf = model[0].conv.weight  # type: ignore[union-attr]
    leaf.grad = torch.ones_like(leaf)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    estimate(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


def test_the_tree() -> None:
    tree = tree_of("deep", mode="operator-level-benchmark")
    assert tree.mode == "operator-level-benchmark"
    assert tree.step_ms > 0
    by_name = {m.fqn: m for m in tree.modules}
    assert list(by_name)[:5] == ["", "first", "stages.0", "stages.0.0", "stages.0.0.up"]
    assert tree.modules[by_name["stages.0.0"].parent].fqn == "stages.0"
    assert by_name["first"].is_leaf
    assert by_name["first"].why_not == "it has no children"
    assert len(by_name["first"].calls) == 2
    assert by_name["stages.0"].parameter_bytes == 2 * by_name["stages.0.1"].parameter_bytes
    assert tree["Deep.stages.0"] is tree["stages.0"]
    # tanh(h), sigmoid(h) and h are saved for backward, and `down` saves their product.
    call = by_name["stages.0.0"].calls[0]
    assert call.activation_bytes == 4 * 64 * 48 * 4 - 64 * 48 * 4
    assert call.begin < call.end < tree.forward_end <= call.back


def test_parameters_and_gradients_are_spread_over_ranks() -> None:
    tree = tree_of("deep")
    whole, spread = tree.memory(), tree.memory(4)
    sharded = tree.parameter_bytes + tree.gradients
    assert (whole - spread).tolist() == (sharded - -(-sharded // 4)).tolist()
    assert tree.gradients[-1] == tree.parameter_bytes


def test_what_is_refused() -> None:
    model, x = example("deep")
    with pytest.raises(ProblemError, match=r"model is a function; expected a torch\.nn\.Module"):
        estimate(lambda y: y, (x,))  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="estimate_mode_type is 'guess'"):
        estimate(model, (x,), mode="guess")
    with pytest.raises(CaptureError, match="no output of the step requires a gradient"):
        estimate(model.requires_grad_(False), (x,))
    with pytest.raises(ProblemError, match=r"no module 'stages\.7' ran in this step"):
        tree_of("deep")["stages.7"]
