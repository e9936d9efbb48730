"""What is asked for: every option read once, and those given told from those left out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import remat
from remat.arguments import BUDGET
from remat.errors import ProblemError, RematError
from remat.graph.costs import Flops
from remat.graph.costs.links import Link
from remat.passes.joint.chunk_loss import ChunkLoss
from remat.passes.packing.pairs import SavedTensorHooks
from remat.planning.pipelines import PassManager
from remat.planning.request import CONFLICTS, Conflict, PlanRequest
from remat.solvers.knapsack.greedy import Greedy
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
    told = json.loads(json.dumps(request.to_options()))
    same = PlanRequest.of(**told)
    assert same.to_options() == told
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


PIPELINE = PassManager.parse("dce,min-cut,partition")
LINK = Link.parse("pcie4")
HOOKS = SavedTensorHooks.of("bf16")
#: For each row of `CONFLICTS`, in order: options of a parsed request that conflict, and a part of the message.
CONFLICTING: list[tuple[dict[str, Any], str]] = [
    ({"pipeline": PIPELINE}, "compare given beside a pipeline.* for example 'dce,cse,.*auto"),
    ({"pipeline": PIPELINE, "hooks": HOOKS}, "end the pipeline with the pass 'saved-tensor-hooks"),
    ({"pipeline": PIPELINE, "host_memory": 1}, "host_memory is given beside hooks or a pipeline"),
    ({"offload": LINK, "hooks": HOOKS}, "offload and hooks='bf16' are given"),
    (
        {"offload": LINK, "cost": Flops()},
        "cost model 'flops', whose unit is FLOP; expected one that",
    ),
    ({"offload": LINK, "pipeline": PIPELINE}, "offload does not go together with a pipeline"),
    ({"chunk": "auto"}, "chunk='auto' is given with budget 1; expected a budget on the peak"),
    ({"plan": PIPELINE}, "plan= applies one saved plan to one graph"),
    ({"pipeline": PIPELINE}, "pipeline= runs on one graph"),
    ({"chunk": ChunkLoss(chunks=2)}, "chunk= splits the loss of a step in one graph"),
    ({"offload": LINK}, "offload is given with budget 1, and nothing is tagged"),
    ({"offload": LINK}, "compare does not offload"),
    ({"chunk": "auto"}, "compare does not choose a number of chunks"),
]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [(row, *case) for row, case in zip(CONFLICTS, CONFLICTING, strict=True)],
)
def test_each_row_of_conflicts_is_found(
    row: Conflict, options: dict[str, Any], message: str
) -> None:
    request = replace(PlanRequest.of(), **options)
    with pytest.raises(ProblemError, match=message) as caught:
        request.check(row.situation, "compare")
    assert caught.value.option == row.option
    assert "{" not in str(caught.value)


def test_a_request_without_conflicts_passes_every_check() -> None:
    for row in CONFLICTS:
        PlanRequest.of().check(row.situation)


def test_options_that_ask_for_nothing_go_together_with_a_pipeline() -> None:
    request = PlanRequest.of(
        pipeline="dce,min-cut,partition", policies={}, chunk=1, time_limit=None
    )
    assert request.pipeline == PIPELINE


@pytest.mark.parametrize("name", ["budget", "solver", "cost"])
def test_none_is_no_default_of_the_first_options(name: str) -> None:
    with pytest.raises(RematError) as caught:
        PlanRequest.of(**{name: None})  # type: ignore[arg-type]
    assert caught.value.option == name
