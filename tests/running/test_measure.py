"""Measured memory: the tracker compared with counts by hand, and the simulation with the tracker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat.errors import CaptureError, ProblemError
from remat.graph.memory.storages import Sizes
from remat.running.measure import (
    Measured,
    StorageTracker,
    allocated_bytes,
    as_before,
    measure_step,
)
from tests.models import build
from tests.passes.programs import SIZE, Model, Program, programs


def compiled(model: Any, budget: float) -> Any:
    torch._dynamo.reset()
    # Costs of another device leave out workspaces of the CPU's operators, which storages do not show.
    options = {"budget": budget, "lower": "eager", "solver": "greedy", "cost": "roofline:h100"}
    return torch.compile(model, backend="remat", options=options)


def unused_bytes(plan: remat.Plan, measured: Measured) -> int:
    """Return the bytes of inputs that the graph lacks, because the step does not read them."""
    taken = Sizes().of_all(n for n in plan.forward.graph.nodes if n.op == "placeholder")
    return measured.input_bytes - sum(taken.values())


def test_the_tracker_counts_storages_not_tensors() -> None:
    a = torch.ones(4, 4)
    tracker = StorageTracker()
    tracker.add(a)
    tracker.add(a.T)
    assert tracker.current == 64
    with tracker:
        b = a + 1  # 128
        c = b[0]  # a view
        d = (c * 2).sum()  # 144, then 148; the product goes: 132
        assert tracker.current == 64 + 64 + 4
        assert tracker.peak == 64 + 64 + 16 + 4
        del b
        assert tracker.current == 64 + 64 + 4  # the view keeps the storage alive
        del c
        assert tracker.current == 64 + 4
        big, rest = torch.zeros(8, 8).sort(dim=1)  # floats and indices
        assert tracker.peak == 64 + 4 + 256 + 256 + 512
    del big, rest, d
    assert tracker.current == 64


@pytest.mark.parametrize(
    ("name", "budget"),
    [("gpt2", 0.1), ("checkpointed", 0.1), ("mutated_buffer", 0.8)],
)
def test_the_simulated_peak_is_the_measured_one(name: str, budget: float) -> None:
    step = build(name)
    measured = measure_step(compiled(step.model, budget), step.args, step.kwargs)
    plan = remat.plans()[-1]
    assert unused_bytes(plan, measured) == 0
    assert plan.peak_bytes == measured.peak_bytes


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(), budget=st.floats(0, 1, width=16))
def test_the_simulated_peak_of_random_programs(program: Program, budget: float) -> None:
    torch.manual_seed(0)
    model = Model(program)
    measured = measure_step(compiled(model, budget), (torch.randn(SIZE, SIZE),))
    plan = remat.plans()[-1]
    assert plan.peak_bytes == measured.peak_bytes - unused_bytes(plan, measured)


def test_a_peak_in_forward_is_measured() -> None:
    """Forward makes a large matrix that backward does not need; backward is small."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sum() + torch.zeros(64, 64).add(1).mean()

    x = torch.ones(2, requires_grad=True)
    measured = measure_step(f, (x,))
    assert measured.peak_bytes >= 8 + 2 * 4 * 64 * 64
    assert measured.input_bytes == 8


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    kept = gradient.clone()
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    state = torch.get_rng_state()
    measure_step(model, (x,))
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, kept)
    assert all(torch.equal(b, buffers[k]) for k, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)


class Adapted(nn.Module):
    """Module with a frozen weight and an adapter, as in LoRA."""

    def __init__(self, dtype: torch.dtype, update: str = "") -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(64, 64).to(dtype), requires_grad=False)
        self.up = nn.Parameter(torch.ones(64, 2))
        self.down = nn.Parameter(torch.ones(2, 64))
        self.register_buffer("calls", torch.zeros(3))
        self.update = update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        if self.update == "data":
            self.frozen.data.add_(1)
        elif self.update:
            with torch.no_grad():
                self.frozen.add_(1)
        return (x @ self.frozen.float() + x @ self.up @ self.down).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_frozen_parameters_are_not_copied(dtype: torch.dtype) -> None:
    model = Adapted(dtype)
    inputs = [*model.parameters(), *model.buffers()]
    tracker = StorageTracker()
    tracker.add(model.frozen)
    with torch.no_grad(), tracker, as_before(inputs, torch.device("cpu")):
        assert tracker.current < 2 * model.frozen.nbytes, "no copy is alive while the step runs"
        model.calls.add_(1)
    assert model.calls.tolist() == [0, 0, 0]


@pytest.mark.parametrize("update", ["data", "no_grad"])
def test_a_step_that_writes_to_a_frozen_parameter_is_refused(update: str) -> None:
    model, x = Adapted(torch.bfloat16, update), torch.ones(4, 64)
    with pytest.raises(
        ProblemError, match=r"written to 1 of 1 frozen parameters \(of shape \(64, 64"
    ):
        measure_step(model, (x,))
    assert model.calls.tolist() == [0, 0, 0], "all else is put back"
    model.update = ""
    measure_step(model, (x,))


def test_what_is_resident_counts() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()

    x, other = torch.ones(4, requires_grad=True), torch.ones(100)
    alone, both = measure_step(f, (x,)), measure_step(f, (x,), resident=(other,))
    assert both.peak_bytes - alone.peak_bytes == 400


def test_a_step_without_backward_is_refused() -> None:
    with pytest.raises(CaptureError, match="no output of the step requires a gradient"):
        measure_step(torch.sin, (torch.ones(2),))


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ProblemError, match="'storages' or 'allocator' for a step on cpu"):
        measure_step(torch.sin, (torch.ones(2, requires_grad=True),), by="guess")


def test_cuda_allocates_blocks() -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [allocated_bytes(n, cuda) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert allocated_bytes(513, cpu) == 513
