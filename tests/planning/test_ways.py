"""Plans that pack and offload: what they come to, what they change, and what they refuse."""

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
from remat.errors import BudgetError, PlanError, ProblemError, RematError
from remat.graph.costs.links import LINKS, Link
from remat.passes.hooks.choices import chosen_by
from remat.running.differences import first_difference
from remat.running.measure import measure_step
from remat.running.trial import Trial
from tests.graphs import joint_of, weight

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
def blocks() -> remat.JointGraph:
    torch.manual_seed(0)
    return remat.capture(Blocks(), (torch.randn(16, 8, 48),), lower="eager")


def test_a_compiled_step_has_the_gradients_of_eager_and_the_simulated_peak() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(16, 8, 48)
    model(x).backward()
    wanted = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    torch.compiler.reset()
    options = {"budget": remat.Peak(0.2), "lower": "eager", **OPTIONS}
    compiled = torch.compile(model, backend="remat", options=options)
    compiled(x).backward()
    assert all(
        torch.equal(p.grad, w)  # type: ignore[arg-type]
        for p, w in zip(model.parameters(), wanted, strict=True)
    )
    plan = remat.plans()[-1]
    assert plan.ways
    assert plan.host_bytes
    assert measure_step(compiled, (x,), by="storages").peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("share", [0.4, 0.0])
def test_inductor_compiles_copies_and_the_allocator_finds_the_known_peak(share: float) -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(16, 8, 48)
    peaks = {}
    for options in ({}, {**OPTIONS, "cost": "roofline-fused:epyc"}):
        torch.compiler.reset()
        model.zero_grad()
        options = {"budget": remat.Peak(share), **options}
        compiled = torch.compile(model, backend="remat", options=options)
        compiled(x).backward()
        plan = remat.plans()[-1]
        peaks[bool(plan.ways)] = plan.peak_bytes
        assert measure_step(compiled, (x,), by="allocator").peak_bytes == plan.peak_bytes
    got = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    model(x).backward()
    for p, g in zip(model.parameters(), got, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-5, atol=1e-6)
    assert plan.host_bytes
    assert peaks[True] <= peaks[False]


def test_ways_never_cost_more_than_doing_without() -> None:
    without = remat.plan(blocks(), remat.Peak(0.2), cost="roofline:epyc")
    plan = ways_plan()
    assert plan.recompute_cost + plan.ways_cost < without.recompute_cost
    assert plan.before_after.more is not None
    assert plan.before_after.more < (without.before_after.more or 0)
    assert 0 <= plan.recompute_bound <= without.recompute_bound
    assert plan.gap >= 0


@cache
def ways_plan() -> remat.Plan:
    return remat.plan(blocks(), remat.Peak(0.2), **OPTIONS)


def test_a_frontier_with_ways_lies_below_the_one_without(tmp_path: Path) -> None:
    slow = {**OPTIONS, "offload": "2GB/s"}
    without = remat.frontier(blocks(), cost="roofline:epyc", by="peak")
    found = remat.frontier(blocks(), by="peak", **slow)
    gains = []
    for p in without.points:
        within = [q.recompute_cost for q in found.points if q.peak_bytes <= p.peak_bytes]
        gains.append(p.recompute_cost - min(within))
    assert min(gains) >= 0
    assert max(gains) > 0
    assert found.points[0].peak_bytes <= remat.plan(blocks(), remat.Peak(0.0), **slow).peak_bytes
    cheapest = next(p for p in found.points if p not in without.points)
    plan = found.plan(cheapest)
    assert plan.ways
    assert plan.peak_bytes == cheapest.peak_bytes
    assert plan.recompute_cost + plan.ways_cost == cheapest.recompute_cost
    found.plot(tmp_path / "both.svg", others=[without])
    assert "offload 2 GB/s" in (tmp_path / "both.svg").read_text()
    with pytest.raises(ProblemError, match="a frontier by what is saved does not offload"):
        remat.frontier(blocks(), **slow)


def test_what_fits_and_what_solvers_come_to_know_ways() -> None:
    row = remat.compare(blocks(), ["auto"], [remat.Peak(0.2)], **OPTIONS).rows[0]
    plan = ways_plan()
    assert (row.recompute_cost, row.peak_bytes) == (
        plan.recompute_cost + plan.ways_cost,
        plan.peak_bytes,
    )
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

    with_ways, without = fit(offload="10GB/s"), fit()
    assert with_ways.best is not None
    assert without.best is not None
    assert (with_ways.best.recompute_s or 0) < (without.best.recompute_s or 0)
    assert '"offload": "10 GB/s"' in with_ways.code
    with pytest.raises(ProblemError, match="a step of several ranks does not offload"):
        fit(offload="10GB/s", ranks=2)


def test_saved_plans_keep_their_ways() -> None:
    plan = ways_plan()
    assert plan.ways
    again = remat.plan(blocks(), plan=remat.Plan.from_json(plan.to_json()))
    assert str(again.forward.graph) == str(plan.forward.graph)
    assert str(again.backward.graph) == str(plan.backward.graph)
    for figure in ("ways", "waited", "link", "peak_bytes", "recompute_cost", "saved_bytes"):
        assert getattr(again, figure) == getattr(plan, figure)
    text = plan.explain()
    assert "offloaded over 10 GB/s" in text
    assert all(f"{way.name}  " in text for way in plan.ways)


def test_older_files_are_read_as_plans_without_ways() -> None:
    plan = ways_plan()
    data = json.loads(plan.to_json())
    for field in ("ways", "waited", "link"):
        del data[field]
    assert remat.Plan.from_json(json.dumps(data)).ways == ()


def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its values are dear to make again, for their bytes."""
    for _ in range(10):
        x = torch.tanh(x @ w)
    return x


def test_packing_is_chosen_where_it_pays_and_says_that_gradients_change() -> None:
    joint = joint_of(products, weight(64, 1024), weight(1024, 1024))
    without = remat.plan(joint, remat.Peak(0.3), cost="roofline:epyc")
    plan = remat.plan(joint, remat.Peak(0.3), cost="roofline:epyc", pack=["float8", "bf16"])
    assert plan.ways
    assert {way.pair for way in plan.ways} <= {"float8", "bf16"}
    assert plan.recompute_cost + plan.ways_cost < without.recompute_cost
    assert plan.host_bytes == 0
    trial = Trial.of(joint)
    got = trial.run_halves(plan.forward, plan.backward, joint.num_fwd_outputs)
    assert first_difference(trial.run_joint(joint), got) is not None
    assert "packed values" in plan.explain()


def test_what_backward_compares_again_is_not_packed() -> None:
    """The masks that it makes of a packed product would not be forward's."""

    def kinked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.tanh(x @ w)
            x = torch.nn.functional.leaky_relu(torch.tanh(x @ w))
        return x

    joint = joint_of(kinked, weight(64, 1024), weight(1024, 1024))
    plan = remat.plan(joint, remat.Peak(0.3), cost="roofline:epyc", pack="float8")
    compared = {n.name for n in chosen_by(plan.backward.graph) if n.op == "placeholder"}
    packed = {way.name for way in plan.ways}
    assert compared
    assert packed
    assert not packed & {name.removesuffix("_packed") for name in compared}


@pytest.mark.parametrize("pair", ["bf16", "float8"])
def test_inductor_compiles_packed_values_and_the_allocator_finds_the_known_peak(pair: str) -> None:
    x, w = weight(64, 1024), (weight(1024, 1024) / 32).detach().requires_grad_()
    found = {}
    for more in ({}, {"pack": [pair]}):
        torch.compiler.reset()
        x.grad = w.grad = None
        options = {"budget": remat.Peak(0.3), "cost": "roofline-fused:epyc", **more}
        compiled = torch.compile(products, backend="remat", options=options)
        compiled(x, w).sum().backward()
        plan = remat.plans()[-1]
        found[bool(more)] = plan, x.grad, w.grad
        assert measure_step(compiled, (x, w), by="allocator").peak_bytes == plan.peak_bytes
    (_, *exact), (packed, *rounded) = found[False], found[True]
    assert {way.pair for way in packed.ways} == {pair}
    assert packed.peak_bytes <= 1.005 * packed.peak_limit
    for a, b in zip(exact, rounded, strict=True):
        assert 0 < float((a - b).norm() / a.norm()) < {"bf16": 0.01, "float8": 0.1}[pair]


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        first, second = torch.tanh(x @ w).split([24, 40], 1)
        x = nn.functional.dropout(torch.cat([second, first], 1), 0.3, training=True)
    return x @ w


def pooled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = nn.functional.max_pool2d(torch.relu(nn.functional.conv2d(x, w, padding=1)), 3, 1, 1)
    return x.flatten(1)


STEPS: dict[str, Callable[[], remat.JointGraph]] = {
    "dropped": lambda: joint_of(dropped, weight(64, 64), weight(64, 64)),
    "pooled": lambda: joint_of(pooled, weight(2, 4, 16, 16), weight(4, 4, 3, 3)),
}


@pytest.mark.parametrize("name", STEPS)
def test_offloading_changes_nothing(name: str) -> None:
    joint = STEPS[name]()
    trial = Trial.of(joint)
    for share in (0.6, 0.2):
        plan = remat.plan(joint, remat.Peak(share), cost="roofline:epyc", offload="100GB/s")
        assert plan.ways
        got = trial.run_halves(plan.forward, plan.backward, joint.num_fwd_outputs)
        assert first_difference(trial.run_joint(joint), got) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.5, "offload": "25GB/s"}, "expected a budget on the peak"),
        ({"budget": "saved:1MiB", "pack": "bf16"}, "expected a budget on the peak"),
        ({"offload": "fast"}, "'fast'; expected the link to the host"),
        ({"offload": "0GB/s"}, "expected the link to the host"),
        ({"offload": "25Gb/s"}, "a small b stands for bits"),
        ({"offload": "1.2.3GB/s"}, "expected the link to the host"),
        ({"offload": 1e300}, "expected the link to the host"),
        ({"offload": 10**400}, "expected the link to the host"),
        ({"pack": [["bf16"]]}, "expected names of ready-made pairs"),
        ({"pack": "bf16,"}, "pack has ''"),
        ({"pack": ""}, r"pack has ''; .* \(bf16, float8, int8\), .* or \[\] to pack nothing"),
        ({"pack": [""]}, "pack has ''"),
        ({"pack": ["zip"]}, "pack has 'zip'; expected names of ready-made pairs"),
        ({"pack": ["cpu-offload"]}, "give offload"),
        ({"pack": [("own", "pair")]}, "pairs of your own, .* are for hooks="),
        ({"offload": "900"}, "is 900 bytes per second; expected .* '900GB/s'"),
        ({"offload": 900}, "is 900 bytes per second"),
        ({"offload": "pcie5", "hooks": "bf16"}, "leave one of them out"),
        ({"offload": "pcie5", "cost": "flops"}, "expected one that gives times"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RematError, match=message):
        remat.plan(blocks(), **{"budget": remat.Peak(0.5), **options})


class Torn(nn.Module):
    """Blocks in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Blocks(), Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.one(x)
        torch._dynamo.graph_break()
        return self.two(x).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it behind a graph break
def test_graphs_of_one_step_share_a_peak() -> None:
    torch.manual_seed(0)
    model, x = Torn(), torch.randn(16, 8, 48)
    joints = remat.capture(model, (x,), lower="eager", fullgraph=False)
    assert len(joints) == 2
    without = remat.plan(joints, remat.Peak(0.0), cost=OPTIONS["cost"])
    plans = remat.plan(joints, remat.Peak(0.0), **OPTIONS)
    assert plans.host_bytes > 0
    assert plans.recompute_cost + plans.ways_cost < without.recompute_cost
    assert plans.peak_bytes <= without.peak_bytes
    assert "offloaded" in repr(plans)
    lower = remat.Peak(without.peak_bytes - 20_000)
    with pytest.raises(BudgetError):
        remat.plan(joints, lower, cost=OPTIONS["cost"])
    plans = remat.plan(joints, lower, **OPTIONS)
    assert plans.peak_bytes <= without.peak_bytes - 20_000

    model(x).backward()
    wanted = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    torch.compiler.reset()
    options = {"plan": remat.PlanSet.from_json(plans.to_json()), "lower": "eager"}
    compiled = torch.compile(model, backend="remat", options=options)
    compiled(x).backward()
    assert [p.host_bytes > 0 for p in remat.plans()[-2:]] == [p.host_bytes > 0 for p in plans]
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, gradient)  # type: ignore[arg-type]


def test_an_edited_way_is_refused() -> None:
    plan = ways_plan()
    edited = plan.to_json().replace(f'"name": "{plan.ways[0].name}"', '"name": "nobody"')
    with pytest.raises((PlanError, RematError), match="'nobody'"):
        remat.plan(blocks(), plan=remat.Plan.from_json(edited))


def test_a_plan_with_ways_is_not_packed_once_more() -> None:
    with pytest.raises(PlanError, match="leave hooks out"):
        remat.plan(blocks(), plan=ways_plan(), hooks="bf16")


def test_links_have_names() -> None:
    assert Link.parse("PCIe5") == Link(name="pcie5", bytes_per_s=LINKS["pcie5"])
    assert Link.parse("25GB/s").time_ps(25_000) == 1_000_000
    assert str(Link.parse("25GB/s")) == "25 GB/s"
    assert str(Link.parse("pcie4")) == "pcie4 (32 GB/s)"


def test_a_link_is_a_number_of_bytes_too() -> None:
    link = Link.parse(25e9)
    assert (str(link), link.bytes_per_s) == ("25 GB/s", 25_000_000_000)
    for link in (Link.parse("pcie5"), Link.parse("1kB/s"), Link.parse("1.23456789GB/s")):
        assert Link.parse(str(link)) == link
    for wrong in (True, 0, -1.0, math.nan, math.inf):
        with pytest.raises(ProblemError, match="expected the link to the host"):
            Link.parse(wrong)
    with pytest.raises(ProblemError, match="0 bytes per second; expected 1 to"):
        Link(bytes_per_s=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside a GPU need one")
def test_copies_of_a_gpu_come_back_as_they_were() -> None:
    from remat.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPIED

    x = torch.randn(1024, 1024, device="cuda")
    host = WAIT_COPIED(OFFLOAD(x), x)
    back = WAIT_COPIED(RELOAD(host, x.device), host)
    assert host.is_pinned()
    assert torch.equal(back, x)


def test_an_edited_plan_is_not_believed_about_its_values() -> None:
    plan = remat.plan(blocks(), remat.Peak(0.2), **OPTIONS)
    data = json.loads(plan.to_json())
    first = data["ways"][0]
    for ways, says in (
        (
            [{**first, "nbytes": 4}],
            f"'{first['name']}' has 4 bytes in it, and {first['nbytes']} in",
        ),
        ([first, first], "has two ways"),
        ([first, {**first, "pair": "float8"}], "has two ways"),
        ([{**first, "pair": "zip"}], "packed by 'zip', and there is no such pair"),
        ([{**first, "cost": -1}], "has a cost of -1"),
        ([{**first, "fetched_before": "tangents_1"}], "before 'tangents_1', which does not run"),
        ([{**first, "freed_after": "nobody"}], "after 'nobody', which does not run"),
        (data["ways"][:1], " is .* in it, and .* in the step that it makes"),
    ):
        edited = remat.Plan.from_json(json.dumps({**data, "ways": ways}))
        with pytest.raises(PlanError, match=says):
            remat.plan(blocks(), plan=edited)
