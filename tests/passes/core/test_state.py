"""Analyses are computed once, never stale, and dropped just where they no longer hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import remat
from remat.errors import ProblemError
from remat.passes.core.state import Analysis, Memory, Positions, State
from tests.graphs import node, traced
from tests.passes.instruments.sample import step

#: How often each analysis of this file was computed.
COMPUTED: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    COMPUTED.clear()


@dataclass(frozen=True)
class Calls(Analysis[int]):
    """How many operators there are."""

    name: ClassVar[str] = "calls"

    def compute(self, state: State) -> int:
        COMPUTED[self.name] += 1
        return sum(n.op == "call_function" for n in state.joint.graph.nodes)


@dataclass(frozen=True)
class AtLeast(Analysis[bool]):
    """Whether there are so many operators."""

    name: ClassVar[str] = "at-least"

    calls: int = 1

    def compute(self, state: State) -> bool:
        COMPUTED[self.name] += 1
        return state.get(Calls()) >= self.calls


@dataclass(frozen=True)
class Twice(Analysis[tuple[bool, bool]]):
    """Knows two things, through one that it asks for."""

    name: ClassVar[str] = "twice"

    def compute(self, state: State) -> tuple[bool, bool]:
        COMPUTED[self.name] += 1
        return state.get(AtLeast(2)), state.get(AtLeast(3))


def cached(state: State) -> tuple[str, ...]:
    """Names of the analyses whose results are cached, in the order in which they were computed."""
    return tuple(key.name for key in state.cache.results)


def three_calls() -> State:
    return State(joint=traced(lambda x: (x.sin() + x.cos()).exp(), torch.randn(3)))


def test_an_analysis_is_computed_once_for_equal_parameters() -> None:
    state = three_calls()
    assert [state.get(Calls()) for _ in range(3)] == [4, 4, 4]
    assert (state.get(AtLeast(4)), state.get(AtLeast(5))) == (True, False)
    assert (state.get(AtLeast(calls=4)), state.get(AtLeast(calls=5))) == (True, False)
    assert COMPUTED == {"calls": 1, "at-least": 2}
    assert cached(state) == ("calls", "at-least", "at-least")


def test_nothing_may_be_asked_while_the_graph_changes() -> None:
    state = three_calls()
    assert state.get(Calls()) == 4
    with (
        pytest.raises(ProblemError, match=r"'calls' was asked for inside `with state.edit\(\)`"),
        state.edit(),
    ):
        state.get(Calls())
    # The edit has ended, whatever happened in it: what was known is gone, and may be asked for.
    assert cached(state) == ()
    assert state.get(Calls()) == 4
    with state.edit(), pytest.raises(ProblemError, match="does not nest"), state.edit():
        pass


def test_an_edit_that_changed_nothing_keeps_everything() -> None:
    state = three_calls()
    state.get(Twice())
    before = cached(state)
    with state.edit() as edit:
        edit.modified = False
    result = edit.result("looked")
    assert (result.modified, result.detail, result.state) == (False, "looked", state)
    assert cached(state) == before
    state.get(Twice())
    assert COMPUTED == {"calls": 1, "at-least": 2, "twice": 1}


@pytest.mark.parametrize(
    ("preserves", "left"),
    [
        ((), ()),
        ((Calls,), ("calls",)),
        ((Twice, Calls), ("calls", "twice")),
        ((Calls, AtLeast), ("calls", "at-least", "at-least")),
        ((Calls, AtLeast, Twice), ("calls", "at-least", "at-least", "twice")),
    ],
)
def test_only_what_is_preserved_stays(
    preserves: tuple[type[Analysis[object]], ...], left: tuple[str, ...]
) -> None:
    state = three_calls()
    assert state.get(Twice()) == (True, True)
    with state.edit(preserves=preserves) as edit:
        node(state.joint, "exp").replace_all_uses_with(node(state.joint, "add"))
        state.joint.graph.erase_node(node(state.joint, "exp"))
    assert edit.result().modified
    assert cached(state) == left
    assert state.get(Calls()) == (4 if Calls in preserves else 3)


def test_an_error_in_an_analysis_leaves_nothing_behind() -> None:
    @dataclass(frozen=True)
    class Breaks(Analysis[int]):
        name: ClassVar[str] = "breaks"

        def compute(self, state: State) -> int:
            state.get(Calls())
            raise KeyError("on purpose")

    state = three_calls()
    for _ in range(2):
        with pytest.raises(KeyError):
            state.get(Breaks())
    assert cached(state) == ("calls",)


def test_a_state_over_another_graph_knows_nothing() -> None:
    state = three_calls()
    state.get(Calls())
    same = replace(state, operators="other")
    assert cached(same) == ("calls",)
    other = replace(state, joint=state.joint.copy())
    assert cached(other) == ()
    assert cached(state) == ("calls",)
    # Outputs that count are another question about the same graph.
    counting = replace(state, count_outputs=True)
    assert cached(counting) == ()
    assert counting.get(Memory()) is not state.get(Memory())


def test_an_edit_is_seen_by_every_state_over_the_same_graph() -> None:
    state = three_calls()
    same = replace(state, operators="other")
    state.get(Calls())
    with same.edit():
        pass
    assert cached(state) == ()


def test_a_decision_does_not_outlive_a_change_of_its_graph() -> None:
    state = remat.PassManager.parse("min-cut").run(step()).state
    assert state.decision is not None
    with state.edit() as edit:
        edit.modified = False
    assert edit.result().state.decision is state.decision
    with state.edit() as edit:
        pass
    after = edit.result().state
    assert (after.decision, after.limits, after.provenance) == (None, None, None)


def test_an_edit_of_the_halves_keeps_what_is_known_of_the_joint_graph() -> None:
    state = remat.PassManager.parse("min-cut").run(step()).state
    split = remat.PassManager.parse("partition").run(state, in_place=True).state
    with split.edit():
        pass
    assert {"positions", "classification"} <= set(cached(split))
    assert split.get(Positions()) is state.get(Positions())
