"""Plans that offload: their figures, that numbers stay the same, and which options are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import PlanError, ProblemError, RematError
from remat.graph.costs import links
from remat.graph.costs.links import LINKS, Link
from remat.graph.memory.host_copies import OFFLOAD, RELOAD, WAIT_COPIED
from remat.running.measure import measure_step

#: A link so fast that small models gain by it, and costs as those of the CPU that tests run on.
OPTIONS: dict[str, Any] = {"cost": "roofline:epyc", "offload": "10GB/s"}


class Blocks(nn.Module):
    """Residual blocks of two products each."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x.square().mean()


@cache
def blocks(depth: int = 3) -> remat.JointGraph:
    torch.manual_seed(0)
    return remat.capture(Blocks(depth=depth), (torch.randn(16, 8, 48),), lower="eager")


@cache
def offloading() -> remat.Plan:
    return remat.plan(blocks(), remat.Peak(0.2), **OPTIONS)


def gradients(
    model: nn.Module, step: Callable[[torch.Tensor], torch.Tensor], batch: int = 16
) -> list[Any]:
    model.zero_grad()
    step(rows(batch)).backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters()]


def rows(batch: int = 16) -> torch.Tensor:
    return torch.randn(batch, 8, 48, generator=torch.Generator().manual_seed(1))


def test_a_compiled_step_has_the_gradients_of_eager_and_the_simulated_peak() -> None:
    model = Blocks()
    torch.compiler.reset()
    options = {"budget": remat.Peak(0.2), "lower": "eager", **OPTIONS}
    compiled = torch.compile(model, backend="remat", options=options)
    torch.testing.assert_close(gradients(model, compiled), gradients(model, model), rtol=0, atol=0)
    plan = remat.plans()[-1]
    assert plan.offloads
    assert plan.host_bytes
    assert measure_step(compiled, (rows(),), by="storages").peak_bytes == plan.peak_bytes


def test_inductor_compiles_copies_and_the_allocator_finds_the_known_peak() -> None:
    model = Blocks(depth=1)
    torch.compiler.reset()
    options = {"budget": remat.Peak(0.9), **OPTIONS, "cost": "roofline-fused:epyc"}
    compiled = torch.compile(model, backend="remat", options=options)
    got, wanted = gradients(model, compiled), gradients(model, model)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    plan = remat.plans()[-1]
    assert plan.offloads
    assert plan.host_bytes
    assert measure_step(compiled, (rows(),), by="allocator").peak_bytes == plan.peak_bytes


def test_offloading_never_costs_more_than_doing_without() -> None:
    without = remat.plan(blocks(), remat.Peak(0.2), cost="roofline:epyc")
    plan = offloading()
    assert plan.recompute_cost + plan.exposed_time < without.recompute_cost
    assert plan.before_after.more is not None
    assert plan.before_after.more < (without.before_after.more or 0)
    assert 0 <= plan.recompute_bound <= without.recompute_bound
    assert plan.gap >= 0


def test_a_frontier_with_offloading_lies_below_the_one_without(tmp_path: Path) -> None:
    joint, slow = blocks(depth=2), {**OPTIONS, "offload": "2GB/s"}
    without = remat.frontier(joint, cost="roofline:epyc", by="peak")
    found = remat.frontier(joint, by="peak", **slow)
    gains = []
    for p in without.points:
        within = [q.recompute_cost for q in found.points if q.peak_bytes <= p.peak_bytes]
        gains.append(p.recompute_cost - min(within))
    assert min(gains) >= 0
    assert max(gains) > 0
    assert found.points[0].peak_bytes <= remat.plan(joint, remat.Peak(0.0), **slow).peak_bytes
    cheapest = next(p for p in found.points if p not in without.points)
    plan = found.plan(cheapest)
    assert plan.offloads
    assert plan.peak_bytes == cheapest.peak_bytes
    assert plan.recompute_cost + plan.exposed_time == cheapest.recompute_cost
    found.plot(tmp_path / "both.svg", others=[without])
    assert "offload 2 GB/s" in (tmp_path / "both.svg").read_text()
    with pytest.raises(ProblemError, match="a frontier by what is saved does not offload"):
        remat.frontier(joint, **slow)


def test_fit_offloads() -> None:
    model = Blocks(width=64, depth=4)

    def fit(**options: Any) -> remat.Fit:
        return remat.fit(
            model,
            lambda batch: (torch.randn(batch, 16, 64),),
            memory="1650KiB",
            optimizer="sgd",
            batches=[8],
            lower="eager",
            cost="roofline:epyc",
            **options,
        )

    offloaded, without = fit(offload="10GB/s"), fit()
    assert offloaded.best is not None
    assert without.best is not None
    assert (offloaded.best.recompute_s or 0) < (without.best.recompute_s or 0)
    assert '"offload": "10 GB/s"' in offloaded.code
    with pytest.raises(ProblemError, match="a step of several ranks does not offload"):
        fit(offload="10GB/s", ranks=2)


def test_saved_plans_keep_their_offloads() -> None:
    plan = offloading()
    sent = {n.meta["packed_from"] for n in plan.forward.graph.nodes if n.target is OFFLOAD}
    assert set(plan.offloaded) == sent
    assert sent
    assert sent <= set(plan.saved)
    again = remat.plan(blocks(), plan=remat.Plan.from_json(plan.to_json()))
    assert str(again.forward.graph) == str(plan.forward.graph)
    assert str(again.backward.graph) == str(plan.backward.graph)
    for figure in ("offloads", "offloaded", "exposed_time", "link", "peak_bytes", "saved_bytes"):
        assert getattr(again, figure) == getattr(plan, figure)
    text = plan.explain()
    assert "over 10 GB/s; exposed transfer time: " in text
    assert all(f"{name}  " in text for name in plan.offloaded)
    assert remat.plan(blocks(), 0.5).offloaded == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.5, "offload": "25GB/s"}, "nothing is tagged for offloading; expected a budget on the peak"),
        ({"budget": "saved:1MiB", "offload": "25GB/s"}, "expected a budget on the peak"),
        ({"offload": "fast"}, "'fast'; expected the link to the host"),
        ({"offload": "0GB/s"}, "expected the link to the host"),
        ({"offload": "25Gb/s"}, "A small b stands for bits"),
        ({"offload": "1.2.3GB/s"}, "expected the link to the host"),
        ({"offload": 1e300}, "expected the link to the host"),
        ({"offload": 10**400}, "expected the link to the host"),
        ({"offload": "900"}, "'900'; expected .* a number without a unit must be at least 1e\\+06"),
        ({"offload": 900}, "is 900; expected"),
        ({"offload": "pcie5", "hooks": "bf16"}, "leave one of them out"),
        ({"offload": "pcie5", "cost": "flops"}, "expected one that gives times"),
        ({"offload": "measured"}, "no CUDA device whose link could be timed; give the rate: '25GB/s'"),
        ({"host_memory": "much"}, "host_memory is 'much'; expected the bytes"),
        ({"host_memory": -1}, "host_memory is -1; expected the bytes"),
        ({"host_memory": 0.5}, "host_memory is 0.5; expected the bytes"),
        ({"host_memory": True}, "host_memory is True; expected the bytes"),
        ({"host_memory": "1GiB", "hooks": "cpu-offload"}, "beside hooks or a pipeline"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    if "measured" in options.values() and torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(RematError, match=message) as raised:
        remat.plan(blocks(), **{"budget": remat.Peak(0.5), **options})
    assert raised.value.option in options


class Torn(nn.Module):
    """Blocks in two graphs."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.one, self.two = Blocks(depth=depth), Blocks(depth=depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.one(x)
        torch._dynamo.graph_break()
        return self.two(x).square().mean()


@cache
def torn() -> list[remat.JointGraph]:
    return remat.capture(Torn(), (rows(batch=64),), lower="eager", fullgraph=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it behind a graph break
def test_graphs_of_one_step_share_a_peak() -> None:
    without = remat.plan(torn(), remat.Peak(0.0), cost=OPTIONS["cost"])
    plans = remat.plan(torn(), remat.Peak(without.peak_bytes), **OPTIONS)
    assert plans.host_bytes > 0
    assert plans.recompute_cost + plans.exposed_time < without.recompute_cost
    assert plans.peak_bytes <= without.peak_bytes
    assert "offloaded" in repr(plans)

    model = Torn()
    torch.compiler.reset()
    options = {"plan": remat.PlanSet.from_json(plans.to_json()), "lower": "eager"}
    compiled = torch.compile(model, backend="remat", options=options)
    got, wanted = gradients(model, compiled, 64), gradients(model, model, 64)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    for figure in ("peak_bytes", "host_bytes"):
        assert [getattr(p, figure) for p in remat.plans()[-2:]] == [
            getattr(p, figure) for p in plans
        ]
    for other, message in (
        ({"budget": f"peak:{plans.peak_bytes - 1}B"}, "is peak:.*, and peak_bytes of its plans"),
        ({"budget": "saved:64B"}, "is saved:64B, and saved_bytes of its plans together is"),
        ({"passed_bytes": -1}, "passed_bytes is -1, expected 0 or more"),
        ({"capacity": -1}, "capacity is -1, expected 0 or more"),
    ):
        data = {**json.loads(plans.to_json()), **other}
        with pytest.raises(PlanError, match=message):
            remat.PlanSet.from_json(json.dumps(data))


def test_a_plan_that_offloads_is_not_packed_once_more() -> None:
    with pytest.raises(PlanError, match="leave hooks out"):
        remat.plan(blocks(), plan=offloading(), hooks="bf16")


def test_a_link_has_a_name_or_a_rate() -> None:
    assert Link.parse("PCIe5") == Link(name="pcie5", bytes_per_s=LINKS["pcie5"])
    assert str(Link.parse("pcie4")) == "pcie4 (32 GB/s)"
    assert Link.parse("25GB/s").time_ps(25_000) == 1_000_000
    for given in ("25GB/s", 25e9):
        link = Link.parse(given)
        assert (str(link), link.bytes_per_s) == ("25 GB/s", 25_000_000_000)
    for link in (Link.parse("pcie5"), Link.parse("1kB/s"), Link.parse("1.23456789GB/s")):
        assert Link.parse(str(link)) == link
    for wrong in (True, 0, -1.0, math.nan, math.inf):
        with pytest.raises(ProblemError, match="expected the link to the host"):
            Link.parse(wrong)
    with pytest.raises(ProblemError, match="0 bytes per second; expected 1 to"):
        Link(bytes_per_s=0)


def test_a_measured_link_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links.measured_rate(torch.device("cpu"), 1 << 22) > 0
    monkeypatch.setattr(links, "this_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(links, "measured_rate", lambda device: 24_987_654_321)
    link = Link.parse("measured")
    assert str(link) == "measured (24 GB/s)"
    assert Link.parse(str(link)) == link
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with pytest.raises(ProblemError, match="no CUDA device"):
            Link.parse("measured")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside a GPU need one")
def test_copies_of_a_gpu_come_back_as_they_were() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    host = WAIT_COPIED(OFFLOAD(x), x)
    back = WAIT_COPIED(RELOAD(host, x.device), host)
    assert host.is_pinned()
    assert torch.equal(back, x)


def test_tagged_values_are_offloaded_within_an_estimated_peak() -> None:
    """All candidates offload the tagged values, and a search by prices still has decisions to start from."""
    torch.compiler.reset()
    model = Blocks(depth=2)
    options = {
        "budget": remat.Peak(0.5),
        "policies": {"*": "offload"},
        "cost": "roofline-fused:epyc",
    }
    compiled = torch.compile(model, backend="remat", options=options)
    got, wanted = gradients(model, compiled), gradients(model, model)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert remat.plans()[-1].offloads


def test_bounds_of_a_ladder_hold_for_plans_that_offload() -> None:
    joint, options = blocks(depth=2), {**OPTIONS, "offload": "2GB/s"}
    points = remat.frontier(joint, by="peak", **options).points
    peaks = [p.peak_bytes for p in points[:: max(1, len(points) // 4)]]
    for row in remat.compare(joint, "auto", [*map(remat.Peak, map(str, peaks))], **options).rows:
        within = [p.recompute_cost for p in points if p.peak_bytes <= (row.peak_bytes or 0)]
        assert (row.recompute_bound or 0) <= min([row.recompute_cost or 0, *within])
