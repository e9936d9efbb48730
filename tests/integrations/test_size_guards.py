"""Budgets in bytes hold for every size of a step with dynamic shapes: larger ones are planned anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.errors import BudgetError, PlanError
from remat.graph.storages import growth
from remat.torch_compat import functorch_config, inductor_config
from tests.e2e.doors import aot

T = torch.Tensor


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nets share the code that Dynamo compiles, which it compiles eight times at most."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*layers)


def held_bytes(f: Callable[[T], T], x: T, model: nn.Module) -> int:
    """Bytes that forward hands to backward, by storage; parameters and the input are alive anyway."""
    own = {v.untyped_storage().data_ptr() for v in (*model.parameters(), x)}
    found: dict[int, int] = {}

    def pack(value: T) -> T:
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        out = f(x)
    out.sum().backward()
    own.add(out.untyped_storage().data_ptr())
    return sum(nbytes for at, nbytes in found.items() if at not in own)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_bytes_hold_for_every_batch_and_only_larger_ones_are_planned_anew(lower: str) -> None:
    model = net()
    f = torch.compile(model, backend="remat", options={"budget": "saved:40KiB", "lower": lower})
    before = len(remat.plans())
    planned = {}
    for batch in (16, 24, 96, 20, 90, 512, 100, 16):
        x = torch.randn(batch, 32)
        assert held_bytes(f, x, model) <= 40 * 1024, batch
        planned[batch] = len(remat.plans()) - before
    assert planned[20] == planned[90] == planned[96]
    assert planned[16] == planned[100] == planned[512]


@pytest.mark.parametrize("by", ["aot", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_partitioner_by_itself_guards_its_plans_too(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, partition = net(), remat.partitioner("40KiB")
    backend = "inductor" if by == "inductor" else aot(partition)
    planned = []
    told = {"custom_partitioner_fn": partition} if by == "inductor" else {}
    with inductor_config.patch(told), functorch_config.patch(enable_autograd_cache=True):
        for _ in range(2):  # under Inductor the second time from AOTAutograd's cache
            torch.compiler.reset()
            f = torch.compile(model, backend=backend)
            before = len(remat.plans())
            for batch in (16, 24, 512, 100):
                assert held_bytes(f, torch.randn(batch, 32), model) <= 40 * 1024, batch
            planned.append(len(remat.plans()) - before)
    assert planned == ([3, 0] if by == "inductor" else [3, 3])


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("budget", ["saved:40KiB", remat.Peak("200KiB")])
def test_a_saved_plan_is_refused_at_sizes_at_which_it_takes_more(budget: Any, lower: str) -> None:
    model = net()

    def compiled(**options: Any) -> Callable[[T], T]:
        torch.compiler.reset()
        options["lower"] = lower
        return torch.compile(model, backend="remat", dynamic=True, options=options)

    compiled(budget=budget)(torch.randn(24, 32)).sum().backward()
    plan = remat.plans()[-1].to_json()
    f = compiled(plan=plan)
    for batch in (16, 24):
        f(torch.randn(batch, 32)).sum().backward()
    for g in (f, compiled(plan=plan)):
        with pytest.raises(
            torch._dynamo.exc.BackendCompilerFailed, match=r"saved plan .*at these sizes"
        ) as caught:
            g(torch.randn(512, 32))
        assert isinstance(caught.value.inner_exception, PlanError)


def test_a_saved_plan_under_a_share_is_for_all_sizes() -> None:
    model = net()
    options: dict[str, Any] = {"budget": 0.5, "lower": "eager"}
    f = torch.compile(model, backend="remat", dynamic=True, options=options)
    f(torch.randn(24, 32)).sum().backward()
    plan = remat.plans()[-1].to_json()
    torch.compiler.reset()
    f = torch.compile(
        model, backend="remat", dynamic=True, options={"plan": plan, "lower": "eager"}
    )
    for batch in (512, 16):
        f(torch.randn(batch, 32)).sum().backward()


def test_a_budget_with_room_is_planned_once_for_all_sizes_that_fit() -> None:
    f = torch.compile(
        net(), backend="remat", dynamic=True, options={"budget": "saved:1MiB", "lower": "eager"}
    )
    before = len(remat.plans())
    for batch in (16, 20, 64, 96):
        f(torch.randn(batch, 32)).sum().backward()
    assert len(remat.plans()) == before + 1
    assert remat.plans()[-1].growth == 1


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_peaks_in_bytes_hold_or_are_refused(lower: str) -> None:
    f = torch.compile(
        net(), backend="remat", options={"budget": remat.Peak("200KiB"), "lower": lower}
    )
    for batch in (16, 24, 48):
        f(torch.randn(batch, 32)).sum().backward()
        assert remat.plans()[-1].peak_bytes <= 200 * 1024
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"peak( of)? 200 KiB"
    ) as caught:
        f(torch.randn(1024, 32))
    assert isinstance(caught.value.inner_exception, BudgetError)


def test_sizes_that_are_marked_dynamic_are_guarded_too() -> None:
    model = net()
    f = torch.compile(model, backend="remat", options={"budget": "saved:40KiB", "lower": "eager"})
    for batch in (16, 512):
        x = torch.randn(batch, 32)
        torch._dynamo.mark_dynamic(x, 0)
        assert held_bytes(f, x, model) <= 40 * 1024


def test_shares_are_planned_once() -> None:
    for budget in (0.5, remat.Peak(0.5)):
        torch.compiler.reset()
        options: dict[str, Any] = {"budget": budget, "lower": "eager"}
        f = torch.compile(net(), backend="remat", dynamic=True, options=options)
        before = len(remat.plans())
        for batch in (16, 512):
            f(torch.randn(batch, 32)).sum().backward()
        assert len(remat.plans()) == before + 1


def test_growth_is_that_of_the_fastest_value() -> None:
    def attention(x: T) -> T:
        return F.softmax(x @ x.T, -1).sin().sum()

    def grown(f: Callable[[T], T], *, dynamic: bool) -> float:
        torch.compiler.reset()
        f = torch.compile(f, backend="remat", dynamic=dynamic, options={"lower": "eager"})
        f(torch.randn(8, 4, requires_grad=True)).backward()
        return remat.plans()[-1].growth

    assert grown(attention, dynamic=False) == 0
    assert grown(attention, dynamic=True) == pytest.approx(2)
    assert grown(lambda x: x.sin().exp().sum(), dynamic=True) == pytest.approx(2)  # both sizes grow
    assert growth([torch.randn(3), 4]) == 0
