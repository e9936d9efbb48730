"""Modules whose saved tensors wait in the host's memory: gradients, memory, and which are chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat
from remat.errors import PlanError, ProblemError
from remat.graph.costs import Roofline
from remat.running.measure import measure_step
from remat.sac import ModulePlan, SACPlan, apply, remove
from tests.sac.planned import Stack, all_equal, gradients, sac_plan


def offloading(*names: str) -> SACPlan:
    """A plan that offloads some modules."""
    modules = tuple(
        ModulePlan(
            name=name,
            ops=(),
            stored=(),
            stored_bytes=0,
            discarded_bytes=0,
            recompute_ms=0,
            offloaded=True,
        )
        for name in names
    )
    return sac_plan(*modules)


def test_gradients_are_those_without() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.linspace(-1, 1, 32).view(4, 8)
    wanted = gradients(model, x)
    apply(model, offloading("layers.0", "layers.1"))
    assert all_equal(gradients(model, x), wanted)
    with pytest.raises(PlanError, match="follows a plan already"):
        apply(model, offloading("layers.0"))
    remove(model)
    assert all_equal(gradients(model, x), wanted)


class Shares(nn.Module):
    """Saves views of one memory, one of them larger than that."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.w).chunk(3, -1)
        wide = q[:, :1].expand(-1, 512).sin()
        a = (q * 2).tanh()
        b = a * a.detach()
        c = v * k
        return b.sum() + (c.exp() * q).sum() + wide.sum()


def test_views_come_back_as_they_were_saved() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Shares()), torch.randn(6, 8)
    model(x).backward()
    right = model[0].w.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    apply(model, offloading("0"))
    model(x).backward()
    assert torch.equal(model[0].w.grad, right)  # type: ignore[arg-type]


class Conjugated(nn.Module):
    """Saves tensors that are conjugated and negated views."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.constant = torch.randn(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x.to(torch.complex64) @ self.w).exp().conj()
        return (y * self.w[0] * y.imag.sin() * self.constant).abs().sum()


class WritesUnseen(nn.Module):
    """Writes to what was saved in ways that no version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = (x @ self.w).unsafe_split(4, 1)
        c = a.sigmoid_() * b.tanh_()
        d, e = (c @ self.w[:4]).unsafe_chunk(2, 1)
        return (d.exp_() * e.sigmoid_()).sum()


@pytest.mark.parametrize(
    "make", [Conjugated, WritesUnseen, lambda: Recurrent(nn.GRU), lambda: Recurrent(nn.LSTM)]
)
def test_gradients_are_those_without_whatever_is_saved(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(make()), torch.randn(6, 8)
    wanted = gradients(model, x)
    apply(model, offloading("0"))
    assert all_equal(gradients(model, x), wanted)


class Recurrent(nn.Module):
    """A recurrent network whose gates are pieces of one memory."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell = kind(8, 8, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0].square().sum()


def test_under_transforms_everything_stays() -> None:
    model = apply(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), offloading("0"))
    x = torch.randn(3, 2, 4)
    assert torch.equal(torch.vmap(model)(x), model(x))


class WritesToItsInput(nn.Module):
    """Reads its input and then changes it."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w
        x.add_(1)
        return y


class Around(nn.Module):
    """Hands on a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = WritesToItsInput()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.clone(), self.w).sum()


def test_what_was_written_to_since_is_an_error_as_without() -> None:
    model = apply(Around(), offloading("inner"))
    with pytest.raises(PlanError, match="written to in place since"):
        model(torch.ones(4)).backward()


def test_what_is_saved_leaves_the_device() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU()) for _ in range(6))
    )
    x = torch.randn(512, 64)
    plain = measure_step(model, (x,), by="allocator").peak_bytes
    apply(model, offloading(*map(str, range(6))))
    assert (
        measure_step(model, (x,), by="allocator").peak_bytes < plain * 0.7
    )  # inputs of the modules stay


def test_modules_are_offloaded_where_copies_are_faster_than_running_again() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU()) for _ in range(6))
    )
    x = torch.randn(512, 64)
    tree = remat.checkpointing.estimate(model, (x,))
    plans = {
        link: remat.checkpointing.plan(tree, memory=0.7, offload=link)
        for link in (None, "1kB/s", "10000GB/s")
    }
    assert plans["1kB/s"].modules == plans[None].modules
    fast = plans["10000GB/s"]
    assert any(m.offloaded for m in fast.modules)
    assert fast.recompute_ms < plans[None].recompute_ms
    assert fast.peak_bytes <= fast.budget_bytes
    assert fast.offloaded_bytes > 0
    assert "offloaded" in fast.explain()
    assert SACPlan.from_json(fast.to_json()) == fast
    wanted = gradients(model, x)
    checked = remat.checkpointing.check(model, fast, (x,))
    assert checked.peak_bytes <= fast.peak_bytes
    assert checked.gradient_distance == 0
    scope = {"model": model}
    exec(fast.code(), scope)
    assert all_equal(gradients(model, x), wanted)


def test_a_link_that_cannot_be_read() -> None:
    with pytest.raises(ProblemError, match="expected the link to the host"):
        remat.checkpointing.plan(Stack(), (torch.ones(4, 8),), memory=0.5, offload="fast")


def test_a_cost_model_goes_by_its_name() -> None:
    model, x = Stack(), torch.linspace(-1, 1, 32).view(4, 8)
    named = remat.checkpointing.plan(model, (x,), memory=1.0, cost="roofline:h100", fake=True)
    made = remat.checkpointing.plan(model, (x,), memory=1.0, cost=Roofline(), fake=True)
    assert named == made
    with pytest.raises(ProblemError, match="rooflin"):
        remat.checkpointing.plan(model, (x,), memory=0.9, cost="rooflin:h100")
    with pytest.raises(ProblemError, match="expected the name of a cost model"):
        remat.checkpointing.estimate(model, (x,), cost=3)  # type: ignore[arg-type]
