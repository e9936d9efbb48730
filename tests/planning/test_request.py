"""What is asked for: every option read once, and those given told from those left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import remat
from remat.arguments import BUDGET
from remat.errors import ProblemError, RematError
from remat.planning.request import PlanRequest
from remat.solvers.greedy import Greedy
from tests.graphs import joint_of, weight

DOORS: list[Callable[..., Any]] = [remat.plan, remat.partitioner]


@cache
def joint(size: int = 8) -> remat.JointGraph:
    return joint_of(lambda x, w: torch.tanh(x @ w).sum(), weight(size, size), weight(size, size))


def asked(door: Callable[..., Any], **options: Any) -> Any:
    return door(joint(), **options) if door is remat.plan else door(**options)


@pytest.mark.parametrize("door", DOORS)
def test_an_option_that_says_what_its_default_says_is_given(door: Callable[..., Any]) -> None:
    """Beside a pipeline, whose passes have options of their own, it would be ignored."""
    given = {"budget": 0.5, "solver": "auto", "cost": "roofline", "time_limit": 1.0}
    for name, value in {**given, "plan": remat.plan(joint())}.items():
        with pytest.raises(ProblemError, match=f"{name} given beside a pipeline.* own passes, for"):
            asked(door, pipeline="dce,min-cut,partition", **{name: value})
    assert asked(door, pipeline="dce,min-cut,partition") is not None


@pytest.mark.parametrize("door", [*DOORS, remat.frontier, remat.compare, remat.default_pipeline])
def test_defaults_read_as_what_they_stand_for(door: Callable[..., Any]) -> None:
    shown = str(inspect.signature(door))
    assert "= 'auto'" in shown
    assert "Unset(" not in shown
    assert repr(BUDGET) == "1.0"


def test_a_budget_beside_a_saved_plan_is_for_other_graphs() -> None:
    plan = remat.plan(joint(), 0.3)
    assert PlanRequest.of(plan=plan).plans_others is False
    assert PlanRequest.of(plan=plan, budget=0.5).plans_others is True
    assert remat.plan(joint(), 0.7, plan=plan).budget == "0.3"
    assert remat.plan(joint(9), 0.7, plan=plan).budget == "0.7"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": "saved:1MiB", "solver": "greedy", "cost": "flops"},
        {"budget": remat.Peak("1GiB"), "time_limit": 2.5},
        {"hooks": "bf16", "reread_inputs": False, "solver": Greedy()},
    ],
)
def test_what_a_reproducer_records_is_read_again(options: dict[str, Any]) -> None:
    request = PlanRequest.of(**options)
    told = request.to_text()
    assert all(type(value) is str for value in told.values())
    same = PlanRequest.from_text(told)
    assert same.to_text() == told
    assert (same.budget, same.time_limit) == (request.budget, request.time_limit)
    assert type(same.solver) is type(request.solver)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("budget", "much"),
        ("solver", "nobody"),
        ("cost", "guess"),
        ("time_limit", -1),
        ("hooks", "int4"),
        ("reread_inputs", 1),
        ("plan", "{"),
        ("pipeline", "dce"),
    ],
)
def test_what_is_refused_is_named(option: str, value: Any) -> None:
    with pytest.raises(RematError) as caught:
        PlanRequest.of(**{option: value})
    assert caught.value.option == option
