"""Pipelines: read, printed, refused, run, and what is left when one of them fails."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from remat.errors import PassError, PlanError, ProblemError
from remat.passes.core.base import Pass, Stage
from remat.passes.core.control import Fixpoint
from remat.passes.core.pipeline import Instrument, Pipeline
from remat.passes.core.state import PassResult, State
from remat.passes.decide.budgeted import Budgeted
from remat.passes.decide.knapsack import Knapsack
from remat.passes.decide.min_cut import MinCut
from remat.passes.split.partition import Partition
from remat.plugins.builtin import remat_passes
from remat.units import Budget
from tests.graphs import calls, joint_of, traced, weight

DEFAULT = (
    "dce,cse,cleanup-recompute-tags,classify,dist-from-backward,min-cut,partition,"
    "functionalize-rng,reorder-backward,raise-getitems"
)


def joint() -> remat.JointGraph:
    return joint_of(lambda x, w: torch.mm(x.cos(), w).exp().sum(), weight(8, 8), weight(8, 8))


# Text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "dce,cse,functionalize-rng,reorder-backward",
        DEFAULT,
        "min-cut(ban-not-in-allowlist=false,ban-reductions=false),partition",
        "min-cut,knapsack(solver=greedy,budget=0.25),partition",
        "knapsack(solver=dp,budget=saved:1048576B,cost=roofline:a100,time-limit=2.5)",
        "cse",
    ],
)
def test_pipelines_print_as_they_are_written(text: str) -> None:
    manager = remat.PassManager.parse(text)
    assert str(manager) == text
    assert remat.PassManager.parse(str(manager)) == manager


def test_blanks_do_not_count() -> None:
    assert str(remat.PassManager.parse("  dce , min-cut( ban-reductions = false ) ")) == (
        "dce,min-cut(ban-reductions=false)"
    )


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Pipelines whose stages do not go back, some of their passes nested in others."""
    passes: list[Pass] = []
    for stage in Stage:
        if stage is Stage.PARTITION:  # once, and nothing behind it without it
            passes.append(Partition())
            continue
        passes += draw(plain_passes(stage))
        if draw(st.booleans()):
            inner = draw(plain_passes(stage).filter(len))
            passes.append(draw(composites(tuple(inner))))
    return remat.PassManager(tuple(passes))


@st.composite
def composites(draw: st.DrawFn, passes: tuple[Pass, ...]) -> Pass:
    made = Fixpoint(passes, draw(st.integers(1, 20)))
    return draw(composites((made,))) if draw(st.integers(0, 3)) == 0 else made


@st.composite
def plain_passes(draw: st.DrawFn, stage: Stage) -> list[Pass]:
    known = [p for p in remat_passes() if p.stage is stage and not issubclass(p, Fixpoint)]
    passes: list[Pass] = []
    for kind in draw(st.lists(st.sampled_from(known), max_size=3)):
        options: dict[str, Any] = {
            f.name: draw(st.booleans())
            for f in dataclasses.fields(kind)
            if isinstance(f.default, bool)
        }
        if issubclass(kind, Budgeted):
            share = draw(st.decimals(0, 1, places=4).map(float))
            nbytes = draw(st.integers(2, 2**40).map(remat.Saved))
            options = {
                "budget": Budget.parse(draw(st.sampled_from([share, nbytes]))),
                "cost": draw(st.sampled_from(["flops", "roofline", "roofline:b200", "unit"])),
                "time_limit": draw(st.floats(0, 1e6, allow_subnormal=False)),
            }
            options["cost"] = (
                remat.PassManager.parse(f"knapsack(cost={options['cost']})").passes[0].cost
            )  # type: ignore[attr-defined]
        passes.append(kind(**options))
    return passes


@settings(max_examples=40)
@given(pipelines())
@pytest.mark.slow
def test_pipelines_read_back(manager: Pipeline) -> None:
    again = remat.PassManager.parse(str(manager))
    assert again == manager
    assert str(again) == str(manager)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "expected the name of a pass"),
        ("dce,", 5, "expected the name of a pass"),
        ("dce,,cse", 5, "expected the name of a pass"),
        ("dce,csee", 5, "no pass is called 'csee'; did you mean 'cse'?"),
        ("dce cse", 5, "expected ',' or the end, got 'c'"),
        ("dce,min-cut(ban-reductions=false", 12, "this parenthesis is never closed"),
        ("dce, min-cut(nothing=1)", 14, "pass 'min-cut' has no option 'nothing=1'; it takes: ban"),
        ("min-cut(ban-reductions)", 9, "no option 'ban-reductions'"),
        ("min-cut(ban-reductions=maybe)", 9, "expected true or false, got 'maybe'"),
        ("knapsack(budget=0.5, time-limit=soon)", 22, "option 'time-limit' of 'knapsack'"),
        ("dce()x", 6, "expected ',' or the end"),
        ("cse(a=1)", 5, "it takes: none"),
    ],
)
def test_what_cannot_be_read_is_pointed_at(text: str, column: int, message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        remat.PassManager.parse(text)
    first, shown, caret = str(caught.value).split("\n")
    assert first.startswith(f"pipeline, column {column}: ")
    assert message in first
    assert shown == f"  {text}"
    assert caret.index("^") == 2 + column - 1


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("knapsack(budget=8 bananas)", ProblemError, "bananas"),
        ("knapsack(solver=gredy)", remat.RematError, "greedy"),
        ("knapsack(cost=guess)", remat.RematError, "guess"),
    ],
)
def test_options_that_cannot_be_meant(text: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        remat.PassManager.parse(text)


@pytest.mark.parametrize(
    ("text", "late", "early"),
    [
        ("partition,cse", "cse", "partition"),
        ("dce,min-cut,partition,functionalize-rng,dce,cse", "cse", "min-cut"),
        ("min-cut,cse", "cse", "min-cut"),
        ("partition,min-cut", "min-cut", "partition"),
        ("reorder-backward,partition", "partition", "reorder-backward"),
    ],
)
def test_orders_that_undo_work_are_refused(text: str, late: str, early: str) -> None:
    with pytest.raises(ProblemError, match=rf"pass '{late}' .* after '{early}'.*put it before"):
        remat.PassManager.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partition,partition", "'partition' stands twice, and a graph is split once"),
        ("dce,partition,fixpoint(partition),reorder-backward", "'partition' stands twice"),
    ],
)
def test_pipelines_that_partition_twice_are_refused(text: str, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        remat.PassManager.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reorder-backward", "can do nothing: 'reorder-backward' work on forward and backward"),
        ("fixpoint(functionalize-rng),reorder-backward", "put 'partition' before"),
    ],
)
def test_pipelines_that_can_do_nothing_are_refused(text: str, message: str) -> None:
    later = remat.PassManager.parse(text)
    with pytest.raises(ProblemError, match=message):
        later.run(joint())
    halves = remat.PassManager.parse("min-cut,partition").run(joint())
    assert later.run(halves.state).forward is not None


def test_only_passes_make_a_pipeline() -> None:
    with pytest.raises(ProblemError, match="made of Pass instances"):
        Pipeline((MinCut,))  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="made of Pass instances, got 5"):
        Pipeline(5)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="joint is a Linear; expected a JointGraph"):
        Pipeline((MinCut(),)).run(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


# Running ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Breaks(Pass):
    """Changes the graph, then raises."""

    name: ClassVar[str] = "breaks"
    stage: ClassVar[Stage] = Stage.ANY

    def run(self, state: State) -> PassResult:
        for node in reversed(state.joint.graph.nodes):
            node.meta["recompute"] = "scribble"
        raise KeyError("on purpose")


@dataclass(frozen=True)
class Forgets(Pass):
    """Returns nothing."""

    name: ClassVar[str] = "forgets"

    def run(self, state: State) -> PassResult:
        return None  # type: ignore[return-value]


def test_a_pass_that_raises_is_named_with_those_before_it() -> None:
    graph = joint()
    before, code = graph.fingerprint, graph.graph_module.print_readable(print_output=False)
    passes = (*remat.PassManager.parse("dce,cse,classify").passes, Breaks(), MinCut())
    with pytest.raises(PassError, match="'breaks' failed: KeyError: 'on purpose'") as caught:
        Pipeline(passes).run(graph)
    assert caught.value.pass_name == "breaks"
    assert caught.value.completed == ("dce", "cse", "classify")
    assert isinstance(caught.value.__cause__, KeyError)
    assert graph.fingerprint == before
    assert graph.graph_module.print_readable(print_output=False) == code
    assert remat.plan(graph, 0).recomputed


def test_a_pass_without_a_result_is_told_what_to_return() -> None:
    with pytest.raises(
        PassError, match="run\\(\\) returned NoneType, expected PassResult"
    ) as caught:
        Pipeline((Forgets(),)).run(joint())
    assert (caught.value.pass_name, caught.value.completed) == ("forgets", ())


def test_our_own_errors_keep_their_class_and_name_the_pass() -> None:
    without = traced(lambda x: x.sin(), torch.randn(3))
    with pytest.raises(PlanError, match="has no tangents") as caught:
        remat.PassManager.parse("dce,min-cut").run(without)
    assert caught.value.__notes__ == ["while running pass 'min-cut' after: dce"]


def test_a_run_leaves_the_callers_graph_alone_unless_asked() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + x.sin()).exp()

    graph = traced(f, torch.randn(3))
    result = remat.PassManager.parse("cse").run(graph)
    assert calls(graph.graph) == ["sin", "sin_1", "add", "exp"]
    assert calls(result.graph_module) == ["sin", "add", "exp"]
    assert (result.modified, result.detail) == (True, "cse")
    remat.PassManager.parse("cse").run(graph, in_place=True)
    assert calls(graph.graph) == ["sin", "add", "exp"]


def test_what_a_pipeline_has_decided_another_goes_on_from() -> None:
    graph = joint()
    decided = remat.PassManager.parse("min-cut,knapsack(solver=greedy,budget=0)").run(graph).state
    both = remat.PassManager.parse("min-cut,knapsack(solver=greedy,budget=0),partition").run(graph)
    after = remat.PassManager.parse("partition").run(decided)
    assert after.state.decision == decided.decision == both.state.decision
    assert after.state.choice == decided.choice
    assert after.forward is not None
    assert both.forward is not None
    assert after.joint is not decided.joint
    assert str(after.forward.graph) == str(both.forward.graph)


def test_passes_are_reported_as_they_finish() -> None:
    seen: list[tuple[str, bool]] = []

    class Look(Instrument):
        def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
            seen.append((" > ".join(path), result.modified))

    remat.PassManager.parse("fixpoint(dce,cse),classify,min-cut,partition").run(
        joint(), instruments=[Look()]
    )
    assert [name for name, _ in seen] == [
        "fixpoint > dce", "fixpoint > cse", "fixpoint", "classify", "min-cut", "partition",
    ]  # fmt: skip
    assert ("partition", True) in seen
    assert ("classify", False) in seen


def test_a_whole_pipeline_gives_both_halves() -> None:
    result = remat.PassManager.parse(
        "dce,cse,min-cut,knapsack(solver=greedy,budget=0),partition,reorder-backward"
    ).run(joint())
    assert result.forward is not None
    assert result.backward is not None
    assert calls(result.forward) == ["cos", "mm", "exp", "sum_1"]
    assert {"cos", "mm", "exp"} <= set(calls(result.backward))


def test_a_knapsack_without_a_solver_says_how_to_give_one() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x @ w)
        return x.sum()

    wide = joint_of(f, weight(64, 64), weight(64, 64))
    with pytest.raises(PlanError, match="was given no solver"):
        Pipeline((MinCut(), Knapsack(budget=Budget(share=0.3)))).run(wide)


def test_analyses_are_forgotten_when_the_graph_changes() -> None:
    state = State(joint=traced(lambda x: (x.sin() + x.sin()).exp(), torch.randn(3)))
    assert len(state.index) == 5
    assert state.index is state.index
    after = Pipeline(remat.PassManager.parse("cse").passes).run(state, in_place=True).state
    assert len(after.index) == 4
    untouched = Pipeline(remat.PassManager.parse("dce").passes).run(after, in_place=True).state
    assert untouched.index is after.index
