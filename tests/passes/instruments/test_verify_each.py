"""Every way in which a pass may go wrong, and that honest ones pass."""

from __future__ import annotations

import re

import pytest
import torch

from remat.errors import PassError, ProblemError
from remat.graph.text import parse_joint
from remat.passes.core.base import Pass
from remat.passes.core.state import Classification, Positions, State
from remat.passes.instruments import VerifyEach
from remat.passes.instruments.verify_each import same_result
from remat.passes.joint.dce import DeadCode
from tests.graphs import joint_of, weight
from tests.passes.instruments import passes as bad
from tests.passes.instruments.passes import run
from tests.passes.instruments.sample import REPLAY, TEXT, WHOLE, step


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (bad.Liar(), "it says modified=False, but changed the graph: the target of 'sin' was aten.sin"),
        (bad.Sneak(), "it changed the graph outside of `with state.edit()`: the recompute tag of 'sin' was None"),
        (bad.Hoarder(), "it preserves the analysis 'count', which comes out differently"),
        (bad.Swaps(), "it says modified=False, but returns another graph"),
        (bad.Breaks(), "it left a broken joint graph: Argument 'mm' of Node 'sin' was used before it has been defined"),
    ],
)  # fmt: skip
def test_a_pass_that_breaks_a_rule_is_named(wrong: Pass, message: str) -> None:
    with pytest.raises(PassError, match=re.escape(message)) as caught:
        run(step(), [DeadCode(), wrong], VerifyEach())
    assert caught.value.pass_name == wrong.name
    assert caught.value.completed == ("dce",)
    with pytest.raises(PassError) as caught:
        run(step(), [bad.Twice((wrong,))], VerifyEach())
    assert caught.value.pass_name == f"twice > {wrong.name}"


def test_wrong_numbers_are_found_on_request_only() -> None:
    run(step(), [bad.Wrong()], VerifyEach())
    message = r"it changed the numbers: output 0 differs in 1 of 1 elements, first at \[\]: was"
    with pytest.raises(PassError, match=message) as caught:
        run(step(), [DeadCode(), bad.Wrong()], VerifyEach(numbers=True))
    assert caught.value.pass_name == "wrong"


def test_a_pass_may_change_numbers_if_it_says_so() -> None:
    run(step(), [bad.Rounds(), DeadCode()], VerifyEach(numbers=True))
    with pytest.raises(PassError, match="'wrong' failed: it changed the numbers"):
        run(step(), [bad.Rounds(), bad.Wrong()], VerifyEach(numbers=True))


@pytest.mark.parametrize("text", [TEXT, REPLAY])
def test_our_own_passes_keep_every_rule(text: str) -> None:
    result = run(step(text), WHOLE, VerifyEach(numbers=True))
    assert result.backward is not None


def test_draws_that_are_not_replayed_are_found_at_the_end() -> None:
    without = WHOLE.replace("functionalize-rng,", "")
    with pytest.raises(PassError, match="'native_dropout' draws in forward and draws anew"):
        run(step(REPLAY), without, VerifyEach(numbers=True))


def test_mutations_dynamic_sizes_and_views_run() -> None:
    def f(x, buffer, w):  # type: ignore[no-untyped-def]
        h = (x @ w).sin()
        buffer.add_(h.detach().sum(0))
        return (h[: x.shape[0] // 2] * buffer).sum()

    joint = joint_of(f, torch.randn(6, 8), torch.zeros(8), weight(8, 8), dynamic=True)
    run(joint, WHOLE, VerifyEach(numbers=True))


def test_a_graph_that_cannot_be_run_is_refused_kindly() -> None:
    huge = TEXT.replace("[8, 8]", "[80000, 8000]").replace("(1, 8)", "(1, 8000)")
    with pytest.raises(ProblemError, match=r"takes? 2\.38 GiB; at most 1 GiB .*structure only"):
        run(step(huge), "dce", VerifyEach(numbers=True))
    run(step(huge), "dce", VerifyEach())
    lost = '''joint("lost", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

primals_1: f32[4] = primal()
primals_2: i64[4] = primal()
tangents_1: f32[4] = tangent()
add: i64[4] = aten.add.Tensor(primals_2, 70)
index: f32[4] = aten.index.Tensor(primals_1, [add])
return [
    forward(index),
    backward(tangents_1),
]
'''  # fmt: skip
    with pytest.raises(ProblemError, match=r"does not run on random inputs.*out of bounds"):
        run(parse_joint(lost), "dce", VerifyEach(numbers=True))


def test_a_graph_that_no_longer_runs_is_the_fault_of_the_pass() -> None:
    with pytest.raises(PassError, match="'bends' failed: the graph that it left does not run"):
        run(step(), [bad.Bends()], VerifyEach(numbers=True))


def test_it_serves_many_runs() -> None:
    verify = VerifyEach(numbers=True)
    names = [run(step(text), "dce,cse", verify).joint.name for text in (TEXT, REPLAY)]
    assert names == ["step", "replay"]


def test_results_are_compared_field_by_field() -> None:
    one, other = State(joint=step()), State(joint=step())
    assert same_result(one.get(Classification()), other.get(Classification()))
    assert not same_result(one.get(Positions()), other.get(Positions())), "nodes of another graph"
    assert not same_result({"a": [1, 2]}, {"a": [1, 3]})
    assert not same_result(1, 1.0)
    assert same_result(object(), object()), "nothing can be said"
