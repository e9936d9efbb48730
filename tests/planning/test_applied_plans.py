"""Saved plans on their graphs: no figure is believed, no budget is left, and older files are read."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import PlanError
from tests.planning.test_offloading import OPTIONS, blocks

#: A link so slow that runs wait for it.
SLOW: dict[str, Any] = {**OPTIONS, "offload": "3GB/s"}


def read(plan: remat.Plan, **other: object) -> remat.Plan:
    """A plan from a file in which somebody has written other values."""
    return remat.Plan.from_json(json.dumps({**json.loads(plan.to_json()), **other}))


def older(plan: remat.Plan, **other: object) -> remat.Plan:
    """Likewise, from a file of before plans said what their figures were computed by."""
    data = json.loads(plan.to_json())
    del data["remat"]
    return remat.Plan.from_json(json.dumps({**data, **other}))


@cache
def offloading() -> remat.Plan:
    plan = remat.plan(blocks(), remat.Peak(0.2), **SLOW)
    assert plan.host_bytes
    assert plan.exposed_time
    return plan


@cache
def plain() -> remat.Plan:
    return remat.plan(blocks(), 0.5, cost="roofline:h100")


@pytest.mark.parametrize(
    "name", ["saved_bytes", "peak_bytes", "recompute_cost", "step_cost", "exposed_time"]
)
@pytest.mark.parametrize("more", [-1, 1])
def test_a_figure_that_is_another_is_refused_by_name(name: str, more: int) -> None:
    # What operators take on a CPU depends on the machine, so no peak with a part of that is compared.
    plan = plain() if name == "peak_bytes" else offloading()
    right = getattr(plan, name)
    edited = read(plan, **{name: right + more})
    with pytest.raises(PlanError, match=f"{name} is {right + more}.* in it, .* {right} ") as caught:
        remat.plan(blocks(), plan=edited)
    assert "\n" not in str(caught.value)


def test_a_peak_that_no_machine_comes_to_is_refused() -> None:
    """It has a part that depends on the machine, and storages, which take the same on all of them."""
    plan = offloading()
    with pytest.raises(PlanError, match="peak_bytes is 4096 in it, and storages alone take"):
        remat.plan(blocks(), plan=read(plan, peak_bytes=4096))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"link": "30 GB/s"}, "exposed_time is .* in it, and runs wait"),
        ({"link": ""}, "link: offload is ''; expected the link"),
        ({"link": "1e400 GB/s"}, "link is '1e400 GB/s', expected a rate"),
        ({"unit": "FLOP"}, "unit is FLOP in it, and its costs are in ps"),
        ({"cost": "flops"}, "whose unit is FLOP, and offloading is planned by times"),
        ({"cost": "roofline:h100"}, " is .* in it, and "),
        ({"offloads": []}, "exposed_time is .* in it, and nothing is offloaded"),
        (
            {"offloads": [], "exposed_time": 0},
            "_bytes is .* in it, and .* in the step that it makes",
        ),
    ],
)
def test_what_else_was_edited_is_refused(other: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        remat.plan(blocks(), plan=read(offloading(), **other))


def test_a_budget_that_is_not_kept_is_refused() -> None:
    plan = remat.plan(blocks(), remat.Peak(offloading().peak_bytes), **SLOW)
    assert plan.offloads
    emptied = {"offloads": [], "exposed_time": 0}
    for edited in (
        older(plan, **emptied),  # no figures to compare with, and yet the budget holds
        read(plan, budget=f"peak:{plan.peak_bytes - 1}B"),
        older(offloading(), **emptied),  # a share of the peak
    ):
        with pytest.raises(
            PlanError, match=r"does not keep its budget: budget is peak:.* a peak of"
        ):
            remat.plan(blocks(), plan=edited)
    within = remat.plan(blocks(), remat.Saved(plain().saved_bytes))
    assert remat.plan(blocks(), plan=read(within)).saved == within.saved
    with pytest.raises(
        PlanError, match="budget is saved:64B in it, and the step that it makes saves "
    ):
        remat.plan(blocks(), plan=read(within, budget="saved:64B"))
    with pytest.raises(PlanError, match="budget is 'little'; expected"):
        read(within, budget="little")


def test_figures_of_older_files_are_computed_and_not_compared() -> None:
    plan = offloading()
    wrong = {"peak_bytes": 1, "saved_bytes": 2, "recompute_cost": 3, "exposed_time": 4}
    again = remat.plan(blocks(), plan=older(plan, **wrong))
    for name in (*wrong, "offloads", "remat"):
        assert getattr(again, name) == getattr(plan, name)
    offloads = [{**value, "nbytes": 4} for value in json.loads(plan.to_json())["offloads"]]
    with pytest.raises(PlanError, match=r"bytes in it, and .* in the graph"):
        remat.plan(blocks(), plan=older(plan, offloads=offloads))
    data = json.loads(plan.to_json())
    for field in ("offloads", "exposed_time", "link"):
        del data[field]
    assert remat.Plan.from_json(json.dumps(data)).offloads == ()


def test_offloads_that_were_edited_are_refused() -> None:
    plan = offloading()
    first, *rest = offloads = json.loads(plan.to_json())["offloads"]
    name = first["name"]
    forward = {n.name for n in plan.forward.graph.nodes if n.op == "call_function"}
    in_backward = [n for n in plan.backward.graph.nodes if n.name not in name]
    taken = next(n.name for n in in_backward if n.op == "placeholder" and n.name in forward)
    late = next(n.name for n in reversed(in_backward) if n.op == "call_function")
    backward_says = "does not run in backward before the value is used there"
    forward_says = "does not run in forward once the value was used there"
    anywhere = [{**value, "freed_after": "", "fetched_before": ""} for value in offloads]
    for edited, message in (
        ([{**first, "name": "nobody"}, *rest], "'nobody'"),
        ([{**first, "nbytes": 4}, *rest], f"'{name}' has 4 bytes in it, and {first['nbytes']} in"),
        ([first, first], "is offloaded twice in it"),
        ([first], " is .* in it, and "),
        (anywhere, "exposed_time is .* in it, and runs wait"),
        ([{**first, "fetched_before": taken}, *rest], f"'{name}' is .* '{taken}', which {backward_says}"),
        ([{**first, "fetched_before": late}, *rest], f"'{name}' is .* '{late}', which {backward_says}"),
        ([{**first, "fetched_before": "tangents_1"}, *rest], "before 'tangents_1', which does not run"),
        ([{**first, "freed_after": "primals_1"}, *rest], f"'{name}' is .* 'primals_1', which {forward_says}"),
        ([{**first, "freed_after": late}, *rest], f"'{name}' is .* '{late}', which {forward_says}"),
        ([{**first, "freed_after": name}, *rest], f"'{name}' is .* '{name}', which does not run in"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            remat.plan(blocks(), plan=read(plan, offloads=edited))


def test_plans_of_pipelines_hooks_and_counted_outputs_are_applied_as_before() -> None:
    joint = blocks()
    pipeline = str(remat.default_pipeline(0.5)).replace("reorder-backward,", "")
    plans = (
        remat.plan(joint, pipeline=pipeline),
        remat.plan(joint, 0.5, hooks="bf16"),
        remat.plan(joint, 1, count_outputs=True),
    )
    for plan in plans:
        assert not plan.remat
        again = remat.plan(joint, plan=read(plan))
        assert again.saved == plan.saved
        assert remat.plan(joint, plan=read(again)).peak_bytes == again.peak_bytes
    hooked = remat.plan(joint, plan=read(plain()), hooks="bf16")
    assert hooked.saved_bytes < plain().saved_bytes


@pytest.mark.parametrize(
    ("budget", "cost"),
    [
        (0.3, "roofline"),
        (1, "flops"),
        (remat.Peak(0.0), "roofline-fused:h100"),
        (remat.Peak(0.0), "roofline:cpu"),
        ("saved:100KiB", "unit"),
    ],
)
def test_a_file_as_it_was_saved_is_always_applied(budget: Any, cost: str) -> None:
    plan = remat.plan(blocks(), budget, cost=cost)
    again = remat.plan(blocks(), plan=read(plan))
    for name in ("saved", "peak_bytes", "saved_bytes", "recompute_cost", "step_cost", "remat"):
        assert getattr(again, name) == getattr(plan, name)


def test_a_plan_with_the_bytes_of_compiled_code_is_compared_as_it_was_planned() -> None:
    model, x = nn.Sequential(nn.Linear(48, 192), nn.Tanh(), nn.Linear(192, 8)), torch.randn(128, 48)
    joint = remat.capture(model, (x,), lower="inductor")
    torch.compiler.reset()
    options = {"plan": read(remat.plan(joint, remat.Peak(0.5)))}
    torch.compile(model, backend="remat", options=options)(x).sum().backward()
    plan = remat.plans()[-1]
    assert plan.planned_peak_bytes
    assert remat.plan(joint, plan=read(plan)).peak_bytes == plan.planned_peak_bytes
    for name in ("planned_peak_bytes", "planned_saved_bytes", "recompute_cost"):
        with pytest.raises(PlanError, match=f"{name} is .* in it, and "):
            remat.plan(joint, plan=read(plan, **{name: getattr(plan, name) + 1}))
    least = min(plan.peak_bytes, plan.planned_peak_bytes)
    with pytest.raises(PlanError, match="does not keep its budget"):
        remat.plan(joint, plan=read(plan, budget=f"peak:{least - 1}B"))
