"""The memory of a step as Inductor compiled it: what the plan says is what the allocator sees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise, starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import torch_compat
from remat.errors import BudgetWarning
from remat.graph.memory.liveness import StorageKind, memory_curve
from remat.integrations import budget_loop
from remat.integrations.compiled_memory import read_timeline, write_timeline
from remat.running.measure import measure_step
from remat.running.workspace import workspace_bytes
from tests.small_programs import PROGRAMS
from tests.steps import measure_held

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Block(nn.Module):
    """A residual block with a norm, dropout and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(32, 128), nn.Linear(128, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
        h = nn.functional.scaled_dot_product_attention(h, h, h)
        x = x + h.transpose(1, 2).reshape(x.shape)
        h = self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return (x + nn.functional.dropout(h, 0.1)).square().mean()


class Chain(nn.Module):
    """Products and what is cheap in between: a search for a peak compiles many plans."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(starmap(nn.Linear, pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x)).sin()
        return x.square().mean()


class Images(nn.Module):
    """Convolutions, whose inputs Inductor lays out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, 16, 3, padding=1) for n in (3, 16))
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).sigmoid().mean()


class Pools(nn.Module):
    """Convolutions up and down, of which Inductor makes other kernels at every budget."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.batch_norm(self.down(x).relu(), None, None, training=True)
        y = self.up(nn.functional.max_pool2d(y, 2))
        return nn.functional.interpolate(y, scale_factor=2).sin().mean((2, 3)).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "block": (Block, (4, 16, 32)),
    "chain": (lambda: Chain(32, 128, 32), (256, 32)),
    "layer": (lambda: Chain(32, 128), (256, 32)),
    "images": (Images, (4, 3, 16, 16)),
    "pools": (Pools, (4, 1, 64, 48)),
}


@functools.cache
def compiled(name: str, budget: Any, solver: str = "auto") -> tuple[Any, Any, remat.Plan, int]:
    """A compiled step, its model and input, its plan, and its peak in the allocator."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    kind, shape = MODELS[name]
    step = SimpleNamespace(model=kind(), args=(torch.randn(shape),), kwargs={})
    options = {"budget": budget, "cost": "roofline:h100", "solver": solver}
    fn = torch.compile(step.model, backend="remat", options=options)
    allocated = measure_step(fn, step.args, by="allocator").peak_bytes
    return fn, step, remat.plans()[-1], allocated


@pytest.mark.parametrize(("name", "budget"), [("block", 0.3), ("images", 0.3), ("pools", 1.0)])
def test_the_plan_knows_what_the_compiled_step_takes(name: str, budget: float) -> None:
    fn, step, plan, allocated = compiled(name, budget)
    assert plan.peak_bytes == pytest.approx(allocated, rel=0.01)
    near = 0.08 if name == "block" else 0.3  # of small convolutions it knows little
    assert plan.estimated_peak_bytes == pytest.approx(allocated, rel=near)
    assert plan.saved_bytes == measure_held(fn, step.args)
    assert plan.saved_bytes <= plan.capacity
    assert "as compiled" in plan.explain()


def test_its_timeline_adds_up() -> None:
    plan = compiled("images", 0.3)[2]
    timeline = plan.timeline
    assert timeline.peak_bytes == plan.peak_bytes
    held = [x for x in timeline.lifetimes if x.kind is StorageKind.SAVED]
    assert sum(x.nbytes for x in held) == plan.saved_bytes
    assert all(x.first < timeline.boundary <= x.last for x in held)
    assert {StorageKind.INPUT, StorageKind.GRADIENT} <= {x.kind for x in timeline.lifetimes}
    assert read_timeline(write_timeline(timeline)) == timeline
    simulated = memory_curve(plan.forward, plan.backward, 1).peak_bytes
    assert plan.planned_peak_bytes == simulated


def test_pages_show_the_step_as_compiled(tmp_path: Path) -> None:
    plan = compiled("images", 0.3)[2]
    view = plan.view
    assert view.as_compiled
    kept = [v for v in view.values if v.state == "kept"]
    assert sum(v.nbytes for v in kept) == plan.saved_bytes
    assert {v.name for v in kept} == {k.name for k in view.kept}
    assert all(v.op for v in kept)
    assert max(view.timeline.nbytes()) == plan.peak_bytes
    pytest.importorskip("bokeh")
    plan.explore(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "The grey line is the step <dfn>without remat</dfn>" in page


def test_a_peak_holds_in_the_allocator() -> None:
    # The default plan at budget 1 compiles below its estimate, even below that of the least peak.
    top, low = compiled("chain", 1.0, "lagrangian")[3], compiled("chain", remat.Peak(0.0))[3]
    assert low < top
    plan, allocated = compiled("chain", remat.Peak(low + (top - low) // 4))[2:]
    assert allocated <= (plan.requested.peak_bytes or 0)
    assert plan.recompute_cost > 0


def test_a_peak_is_never_above_that_of_budget_1() -> None:
    """Inductor fuses the plan of the least expected peak here to one that takes more than budget 1's."""
    full = compiled("pools", 1.0)[3]
    with pytest.warns(BudgetWarning, match="A share is held as nearly as can be"):
        low = compiled("pools", remat.Peak(0.0))[3]
    assert low <= full
    assert compiled("pools", remat.Peak(full))[3] <= full


def test_a_peak_that_compiled_code_cannot_keep_to_is_refused() -> None:
    low = compiled("layer", remat.Peak(0.0))[3]
    with pytest.raises(Exception, match=r"as Inductor compiled it, (the least of|above the)"):
        compiled("layer", remat.Peak(low * 19 // 20))


def test_a_step_that_takes_more_than_was_known_is_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if compiled code kept more than was planned: the budget is lowered by that, three times at most."""
    known = budget_loop.held_bytes
    monkeypatch.setattr(budget_loop, "held_bytes", lambda timeline: known(timeline) + 4096)
    torch._dynamo.reset()
    chain = Chain(32, 128, 32)
    fn = torch.compile(chain, backend="remat", options={"budget": 0.5, "epilogue_fusion": True})
    x = torch.randn(256, 32)
    before = len(remat.plans())
    fn(x).backward()
    made = remat.plans()[before:]
    assert len(made) == 1
    assert made[0].saved_bytes <= made[0].capacity
    assert made[0].planned_saved_bytes <= made[0].capacity - 4096


@pytest.mark.filterwarnings("ignore:CUTLASS backend is not supported")  # PyTorch 2.12 for CUDA
def test_code_that_is_not_known_leaves_the_simulated_peak() -> None:
    torch._dynamo.reset()
    options = {"budget": 0.5, "cpp_wrapper": True}
    fn = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="remat", options=options)
    fn(torch.randn(2, 8)).sum().backward()
    plan = remat.plans()[-1]
    assert plan.planned_peak_bytes == 0
    assert plan.peak_bytes == plan.timeline.peak_bytes


def test_pooling_takes_memory_in_another_layout() -> None:
    x = torch.randn(2, 17, 22, 26).to(memory_format=torch.channels_last)
    op = torch.ops.aten._adaptive_avg_pool2d_backward.default
    assert workspace_bytes(op, (torch.randn(2, 17, 5, 7), x), {}, x) == x.nbytes


def test_products_that_take_memory_of_their_own_are_known() -> None:
    torch._dynamo.reset()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scores = x.bfloat16() @ w.bfloat16()
        return (scores @ scores.mT @ scores).float().square().mean()

    args = torch.randn(256, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    fn = torch.compile(f, backend="remat", options={"budget": 0.5})
    allocated = measure_step(fn, args, by="allocator").peak_bytes
    assert remat.plans()[-1].peak_bytes == pytest.approx(allocated, rel=0.001)


class _Planned(BaseException):
    """Ends a compilation before its kernels are compiled."""


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    "name",
    [
        "conv1d",
        "conv1d, transposed",
        "conv2d, patches",
        "conv2d, depthwise",
        "conv3d, strided",
        "upsampling, bilinear",
        "amax, bf16",
        "real view",
        pytest.param(
            "pooling",
            marks=pytest.mark.skipif(
                torch_compat.is_before("2.12"),
                reason="PyTorch 2.11 compiles poolings to other kernels",
            ),
        ),
    ],
)
def test_estimates_know_what_operators_take_inside(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def ended(planned: Any, known: Any) -> bool:
        made.append(planned.plan)
        raise _Planned

    monkeypatch.setattr(budget_loop, "plans_again", ended)
    run, _ = PROGRAMS[name]()
    with pytest.raises(_Planned), torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(run, backend="remat")()
    (plan,) = made
    assert plan.estimated_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
