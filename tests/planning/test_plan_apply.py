"""Saved plans on their graphs: figures are computed, budgets are kept, and older files are read."""

from __future__ import annotations

import json
from collections.abc import Callable
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


@cache
def offloading() -> remat.Plan:
    plan = remat.plan(blocks(), remat.Peak(0.2), **SLOW)
    assert plan.host_bytes
    assert plan.exposed_time
    return plan


@cache
def plain() -> remat.Plan:
    return remat.plan(blocks(), 0.5, cost="roofline:h100")


@pytest.mark.parametrize("made", [plain, offloading])
def test_figures_are_those_of_the_graph_whatever_a_file_says(
    made: Callable[[], remat.Plan],
) -> None:
    plan = made()
    wrong = {
        "peak_bytes": 1,
        "saved_bytes": 2,
        "recompute_cost": 3,
        "step_cost": 4,
        "exposed_time": 5,
        "remat": "0.0.1",
    }
    again = remat.plan(blocks(), plan=read(plan, **wrong))
    for name in wrong:
        assert getattr(again, name) == getattr(plan, name)


def test_another_link_or_cost_model_gives_other_figures() -> None:
    plan = offloading()
    faster = remat.plan(blocks(), plan=read(plan, link="30 GB/s"))
    assert faster.exposed_time < plan.exposed_time
    costlier = remat.plan(blocks(), plan=read(plan, cost="roofline:h100"))
    assert (costlier.saved, costlier.offloads) == (plan.saved, plan.offloads)
    assert costlier.step_cost != plan.step_cost


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"link": ""}, "offload is ''; expected the link"),
        ({"link": "1e400 GB/s"}, "link is '1e400 GB/s', expected a rate"),
        ({"unit": "FLOP"}, "unit is FLOP in it, and its costs are in ps"),
        ({"cost": "flops"}, "whose unit is FLOP, and offloading is planned by times"),
    ],
)
def test_what_contradicts_the_offloads_is_refused(other: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        remat.plan(blocks(), plan=read(offloading(), **other))
    assert "\n" not in str(caught.value)


def test_a_budget_that_is_not_kept_is_refused() -> None:
    plan = remat.plan(blocks(), remat.Peak(offloading().peak_bytes), **SLOW)
    assert plan.offloads
    for edited in (
        read(plan, offloads=[]),
        read(plan, budget=f"peak:{plan.peak_bytes - 1}B"),
        read(offloading(), offloads=[]),  # a share of the peak
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


def test_older_files_are_read() -> None:
    plan = plain()
    data = json.loads(plan.to_json())
    for field in ("offloads", "exposed_time", "link", "remat", "search", "chunk", "policies"):
        del data[field]
    older = remat.Plan.from_json(json.dumps(data))
    assert (older.offloads, older.remat) == ((), "")
    assert remat.plan(blocks(), plan=older).peak_bytes == plan.peak_bytes


def test_offloads_that_were_edited_are_refused() -> None:
    plan = offloading()
    first, *rest = json.loads(plan.to_json())["offloads"]
    name = first["name"]
    forward = {n.name for n in plan.forward.graph.nodes if n.op == "call_function"}
    in_backward = [n for n in plan.backward.graph.nodes if n.name not in name]
    taken = next(n.name for n in in_backward if n.op == "placeholder" and n.name in forward)
    late = next(n.name for n in reversed(in_backward) if n.op == "call_function")
    backward_says = "does not run in backward before the value is used there"
    forward_says = "does not run in forward once the value was used there"
    for edited, message in (
        ([{**first, "name": "nobody"}, *rest], "'nobody'"),
        ([{**first, "nbytes": 4}, *rest], f"'{name}' has 4 bytes in it, and {first['nbytes']} in"),
        ([first, first], "is offloaded twice in it"),
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


def test_a_plan_with_the_bytes_of_compiled_code_is_applied_as_it_was_planned() -> None:
    model, x = nn.Sequential(nn.Linear(48, 192), nn.Tanh(), nn.Linear(192, 8)), torch.randn(128, 48)
    joint = remat.capture(model, (x,), lower="inductor")
    torch.compiler.reset()
    options = {"plan": read(remat.plan(joint, remat.Peak(0.5)))}
    torch.compile(model, backend="remat", options=options)(x).sum().backward()
    plan = remat.plans()[-1]
    assert plan.planned_peak_bytes
    assert remat.plan(joint, plan=read(plan)).peak_bytes == plan.planned_peak_bytes
    least = min(plan.peak_bytes, plan.planned_peak_bytes)
    with pytest.raises(PlanError, match="does not keep its budget"):
        remat.plan(joint, plan=read(plan, budget=f"peak:{least - 1}B"))
