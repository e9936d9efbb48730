"""Pipelines and fixed points: what order is refused, what runs, and what a failure leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import remat
from remat.errors import PassError, PlanError, ProblemError
from remat.passes.core.base import Pass, Stage
from remat.passes.core.control import Fixpoint
from remat.passes.core.pipeline import Pipeline
from remat.passes.core.state import PassResult, State
from remat.passes.decide.min_cut import MinCut
from remat.passes.joint.dce import DeadCode
from tests.graphs import calls, traced
from tests.passes.instruments.passes import Raises, Twice, Wrong, run
from tests.passes.instruments.sample import step

# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "late", "early"),
    [
        ("partition,cse", "cse", "partition"),
        ("min-cut,cse", "cse", "min-cut"),
        ("reorder-backward,partition", "partition", "reorder-backward"),
        # The second round would merge what the first has decided to recompute.
        ("fixpoint(cse,min-cut)", "cse", "min-cut"),
        ("fixpoint(cse,fixpoint(min-cut))", "cse", "min-cut"),
        ("fixpoint(min-cut),fixpoint(cse)", "cse", "min-cut"),
        (
            "fixpoint(fixpoint(dce,min-cut),cleanup-recompute-tags)",
            "cleanup-recompute-tags",
            "min-cut",
        ),
    ],
)
def test_orders_that_undo_work_are_refused(text: str, late: str, early: str) -> None:
    with pytest.raises(ProblemError, match=rf"pass '{late}' .* after '{early}'.*put it before"):
        remat.PassManager.parse(text)


def test_only_passes_make_a_pipeline() -> None:
    with pytest.raises(ProblemError, match="made of Pass instances"):
        Pipeline((MinCut,))  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="made of Pass instances, got 5"):
        Pipeline(5)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="joint is a Linear; expected a JointGraph"):
        Pipeline((MinCut(),)).run(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="'fixpoint' is empty: name the passes inside"):
        Fixpoint(())
    with pytest.raises(ProblemError, match="'fixpoint' is made of Pass instances, got"):
        Fixpoint((DeadCode,))  # type: ignore[arg-type]
    assert Fixpoint([DeadCode()]).passes == (DeadCode(),)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, 1.5, True])
def test_a_limit_is_a_number_of_rounds(limit: Any) -> None:
    with pytest.raises(ProblemError, match=r"'fixpoint' limit is .*; expected 1 round or more"):
        Fixpoint((DeadCode(),), limit)


# What runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DropOneExp(Pass):
    """Replaces the last exponential by its argument: one per run."""

    name: ClassVar[str] = "drop-one-exp"
    stage: ClassVar[Stage] = Stage.JOINT

    def run(self, state: State) -> PassResult:
        last = [n for n in state.index.nodes if n.name.startswith("exp")][-1:]
        with state.edit() as edit:
            for n in last:
                n.replace_all_uses_with(n.all_input_nodes[0])
                state.joint.graph.erase_node(n)
            edit.modified = bool(last)
        return edit.result(dropped=len(last))


def five_exps() -> remat.JointGraph:
    return traced(lambda x: x.exp().exp().exp().exp().exp(), torch.randn(3))


@pytest.mark.parametrize(
    ("text", "left", "detail"),
    [
        ("fixpoint(drop-one-exp)", 0, {"rounds": 6, "unsettled": 0, "dropped": 5}),
        ("fixpoint(limit=3,drop-one-exp)", 2, {"rounds": 3, "unsettled": 1, "dropped": 3}),
        # The limit is reached in the round that would have settled it: nobody looked again.
        ("fixpoint(limit=5,drop-one-exp)", 0, {"rounds": 5, "unsettled": 1, "dropped": 5}),
        ("fixpoint(limit=2,fixpoint(limit=2,drop-one-exp))", 1, {"dropped": 4}),
        ("fixpoint(limit=1,raise-getitems)", 5, {"rounds": 1, "unsettled": 0}),
    ],
)
def test_rounds_go_on_until_one_changes_nothing(
    text: str, left: int, detail: dict[str, int]
) -> None:
    from remat.plugins import registry

    passes = {**registry().passes, DropOneExp.name: DropOneExp}
    result = remat.PassManager.parse(text, passes=passes).run(five_exps())
    assert calls(result.graph_module) == [f"exp{f'_{k}' if k else ''}" for k in range(left)]
    assert {k: result.statistics.get(k, 0) for k in detail} == detail
    assert result.modified == (left < 5)


def test_counts_of_a_composite_and_of_its_passes_add_up_by_name() -> None:
    assert run(step(), "dce,fixpoint(cse,dce)").statistics == {
        "removed": 1,
        "merged": 5,
        "rounds": 2,
    }
    twice = run(step(), [Twice((Wrong(), DeadCode()))])
    assert twice.statistics == {"swapped": 2, "removed": 1, "times": 2}


def test_a_composite_run_by_hand_does_what_it_does_in_a_pipeline() -> None:
    result = Fixpoint((DropOneExp(),)).run(State(joint=five_exps()))
    assert calls(result.graph_module) == []
    assert result.detail == "6 rounds"


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
    graph = step()
    decided = remat.PassManager.parse("min-cut,knapsack(solver=greedy,budget=0)").run(graph).state
    both = remat.PassManager.parse("min-cut,knapsack(solver=greedy,budget=0),partition").run(graph)
    after = remat.PassManager.parse("partition").run(decided)
    assert after.state.decision == decided.decision == both.state.decision
    assert after.state.limits == decided.limits
    assert after.state.provenance == decided.provenance
    assert after.forward is not None
    assert both.forward is not None
    assert after.joint is not decided.joint
    assert str(after.forward.graph) == str(both.forward.graph)


# Failures -----------------------------------------------------------------------------------------


def test_a_pass_that_raises_is_named_with_the_way_to_it_and_those_before_it() -> None:
    graph = step()
    code = graph.graph_module.print_readable(print_output=False)
    inner = Fixpoint((Fixpoint((DeadCode(), Raises())),))
    passes = (*remat.PassManager.parse("cse,raise-getitems").passes, inner, MinCut())
    said = "'fixpoint > fixpoint > raises' failed: KeyError: 'half-way'"
    with pytest.raises(PassError, match=said) as caught:
        Pipeline(passes).run(graph)
    assert caught.value.pass_name == "fixpoint > fixpoint > raises"
    assert caught.value.completed == ("cse", "raise-getitems", "dce")
    assert isinstance(caught.value.__cause__, KeyError)
    assert graph.fingerprint == step().fingerprint
    assert graph.graph_module.print_readable(print_output=False) == code


def test_our_own_errors_keep_their_class_and_name_the_way_once() -> None:
    without = traced(lambda x: x.sin(), torch.randn(3))
    with pytest.raises(PlanError, match="has no tangents") as caught:
        Pipeline((DeadCode(), Fixpoint((Fixpoint((MinCut(),)),)))).run(without)
    assert caught.value.__notes__ == [
        "while running pass 'fixpoint > fixpoint > min-cut' after: dce"
    ]
