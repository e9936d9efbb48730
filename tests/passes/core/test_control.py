"""Passes made of passes: rounds, and the pass that is named when something fails inside."""

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
from remat.passes.joint.cse import CommonSubexpressions
from remat.passes.joint.dce import DeadCode
from tests.graphs import calls, traced

#: Passes by name, as in a pipeline, in the order in which they ran.
RAN: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    RAN.clear()


@dataclass(frozen=True)
class DropOneExp(Pass):
    """Replaces the last exponential by its argument: one per run."""

    name: ClassVar[str] = "drop-one-exp"
    stage: ClassVar[Stage] = Stage.JOINT

    def run(self, state: State) -> PassResult:
        RAN.append(self.name)
        last = [n for n in state.index.nodes if n.name.startswith("exp")][-1:]
        with state.edit() as edit:
            for n in last:
                n.replace_all_uses_with(n.all_input_nodes[0])
                state.joint.graph.erase_node(n)
            edit.modified = bool(last)
        return edit.result(dropped=len(last))


@dataclass(frozen=True)
class Marks(Pass):
    """Leaves a mark, or breaks."""

    name: ClassVar[str] = "marks"

    breaks: bool = False
    text: str = ""

    def run(self, state: State) -> PassResult:
        RAN.append(self.text or self.name)
        if self.breaks:
            raise KeyError("on purpose")
        return PassResult(state=state, modified=False)


def five_exps() -> remat.JointGraph:
    return traced(lambda x: x.exp().exp().exp().exp().exp(), torch.randn(3))


def parse(text: str) -> Pipeline:
    """A pipeline that may name what this file defines, besides everything else."""
    from remat.plugins import registry

    own: tuple[type[Pass], ...] = (DropOneExp, Marks)
    return remat.PassManager.parse(
        text,
        passes={**registry().passes, **{p.name: p for p in own}},
    )


# Fixed points -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "left", "detail"),
    [
        ("fixpoint(drop-one-exp)", 0, {"rounds": 6, "unsettled": 0, "dropped": 5}),
        ("fixpoint(limit=3,drop-one-exp)", 2, {"rounds": 3, "unsettled": 1, "dropped": 3}),
        # The limit is reached in the round that would have settled it: nobody looked again.
        ("fixpoint(limit=5,drop-one-exp)", 0, {"rounds": 5, "unsettled": 1, "dropped": 5}),
        ("fixpoint(limit=6,drop-one-exp)", 0, {"rounds": 6, "unsettled": 0, "dropped": 5}),
        ("fixpoint(limit=2,fixpoint(limit=2,drop-one-exp))", 1, {"dropped": 4}),
        ("fixpoint(limit=1,marks)", 5, {"rounds": 1, "unsettled": 0}),
    ],
)
def test_rounds_go_on_until_one_changes_nothing(
    text: str, left: int, detail: dict[str, int]
) -> None:
    result = parse(text).run(five_exps())
    assert calls(result.graph_module) == [f"exp{f'_{k}' if k else ''}" for k in range(left)]
    assert {k: result.statistics.get(k, 0) for k in detail} == detail
    assert result.modified == (left < 5)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_is_a_number_of_rounds(limit: Any) -> None:
    with pytest.raises(ProblemError, match=r"'fixpoint' limit is .*; expected 1 round or more"):
        Fixpoint((DeadCode(),), limit)


def test_dce_and_cse_feed_each_other() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1).cos() + (x.sin() + 1).cos()

    result = parse("fixpoint(dce,cse)").run(traced(f, torch.randn(3)))
    assert calls(result.graph_module) == ["sin", "add", "cos", "add_2"]


# What they are made of ----------------------------------------------------------------------------


def test_a_fixpoint_is_made_of_passes() -> None:
    with pytest.raises(ProblemError, match="'fixpoint' is empty: name the passes inside"):
        Fixpoint(())
    with pytest.raises(ProblemError, match="'fixpoint' is made of Pass instances, got"):
        Fixpoint((DeadCode,))  # type: ignore[arg-type]
    assert Fixpoint([DeadCode()]).passes == (DeadCode(),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "late", "early"),
    [
        # The second round would merge what the first has decided to recompute.
        ("fixpoint(min-cut,cse)", "cse", "min-cut"),
        ("fixpoint(cse,min-cut)", "cse", "min-cut"),
        ("fixpoint(cse,fixpoint(min-cut))", "cse", "min-cut"),
        ("fixpoint(partition,functionalize-rng)", "partition", "functionalize-rng"),
        ("fixpoint(min-cut),fixpoint(cse)", "cse", "min-cut"),
        ("fixpoint(fixpoint(dce,min-cut),classify)", "classify", "min-cut"),
    ],
)
def test_ordering_rules_see_through_nesting(text: str, late: str, early: str) -> None:
    with pytest.raises(ProblemError, match=rf"pass '{late}.* after '{early}"):
        parse(text)


def test_orders_that_only_look_alike_are_allowed() -> None:
    for text in ("fixpoint(dce,cse),min-cut", "fixpoint(min-cut)", "dce,fixpoint(cse),min-cut,dce"):
        assert str(parse(text)) == text


# Failures -----------------------------------------------------------------------------------------


def test_a_failure_inside_names_the_way_to_it() -> None:
    manager = Pipeline(
        (
            CommonSubexpressions(),
            Fixpoint((Fixpoint((DeadCode(), Marks(breaks=True))),)),
        )
    )
    with pytest.raises(PassError, match="'fixpoint > fixpoint > marks' failed: KeyError") as caught:
        manager.run(five_exps())
    assert caught.value.pass_name == "fixpoint > fixpoint > marks"
    assert caught.value.completed == ("cse", "dce")
    assert isinstance(caught.value.__cause__, KeyError)


def test_our_own_errors_name_the_way_once() -> None:
    without = traced(lambda x: x.sin(), torch.randn(3))
    with pytest.raises(PlanError, match="has no tangents") as caught:
        Pipeline((DeadCode(), Fixpoint((Fixpoint((MinCut(),)),)))).run(without)
    assert caught.value.__notes__ == [
        "while running pass 'fixpoint > fixpoint > min-cut' after: dce"
    ]


def test_a_composite_run_by_hand_does_what_it_does_in_a_pipeline() -> None:
    state = State(joint=five_exps())
    result = Fixpoint((DropOneExp(),)).run(state)
    assert calls(result.graph_module) == []
    assert result.detail == "6 rounds"
