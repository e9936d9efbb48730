"""Reduction of failing graphs: results, valid candidates, and the order of the search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.errors import ProblemError
from remat.graph.joint import JointGraph, Role, role_of, split_outputs
from remat.graph.problems.lowering import Decision
from remat.graph.text import parse_joint, print_joint
from remat.passes.split.partition import Partition
from remat.planning import pipelines
from remat.reduction.edits import EDITS, GraphEdit, fault_of, tidy
from remat.running.differences import first_difference
from remat.running.trial import Trial
from tests.passes.instruments.sample import step
from tests.reduction.models import WRITES, gpt


def calls(joint: JointGraph, name: str) -> bool:
    return any(name in str(n.target) for n in joint.graph.nodes if n.op == "call_function")


def reads_a_product(joint: JointGraph) -> bool:
    return any(
        read.op == "call_function" and "mm" in str(read.target)
        for n in joint.graph.nodes
        if "sin.default" in str(n.target)
        for read in n.all_input_nodes
    )


def test_what_does_not_matter_goes() -> None:
    told: list[str] = []
    found = remat.reduce(step(), reads_a_product, progress=told.append)
    assert [n.name for n in found.joint.graph.nodes if n.op == "call_function"] == ["mm", "sin"]
    assert found.before == len(step().graph.nodes)
    assert found.nodes == len(found.joint.graph.nodes) == 4
    assert not found.interrupted
    assert told[0] == "drop gradients: 23 nodes, 1 tests"


def test_every_graph_that_is_tested_is_a_joint_graph_and_new() -> None:
    seen: list[str] = []

    def test(joint: JointGraph) -> bool:
        seen.append(print_joint(joint))
        assert fault_of(joint) is None
        primals = [
            n for n in joint.graph.nodes if n.op == "placeholder" and role_of(n) is Role.PRIMAL
        ]
        gradients = split_outputs(joint)[1]
        assert len(gradients) == len(primals)
        for primal, gradient in zip(primals, gradients, strict=True):
            if gradient is not None:
                assert gradient.meta["val"].shape == primal.meta["val"].shape
        state = pipelines.split(pipelines.prepare(joint))
        assert state.forward is not None
        joint.graph.erase_node(next(reversed(joint.graph.nodes)))  # a test may change its graph
        return "aten.tanh" in seen[-1] or "cos" in seen[-1]

    start = step()
    before = print_joint(start)
    found = remat.reduce(start, test)
    assert len(set(seen)) == len(seen) == found.tests
    assert print_joint(start) == before
    again: list[str] = []
    remat.reduce(start, lambda j: again.append(print_joint(j)) or "cos" in again[-1])  # type: ignore[func-returns-value]
    assert again == seen, "the order is the same in every run"


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.name)
def test_edits_leave_a_joint_graph(edit: GraphEdit) -> None:
    """Apply each edit to all items at once, one by one, and to items that another edit has removed."""
    for joint in (gpt().copy(), parse_joint(WRITES)):
        joint.graph_module.meta.clear()
        for node in list(joint.graph.nodes)[::7]:
            node.meta = {**node.meta, "recompute": CheckpointPolicy.PREFER_SAVE}
        items = edit.items(joint)
        for part in (items, items[::2], items[: len(items) // 2], items[:1], items[-1:]):
            made = tidy(edit.apply(joint.copy(), part))
            assert fault_of(made) is None
            assert pipelines.split(pipelines.prepare(made)).forward is not None


def test_a_graph_that_does_not_fail_is_refused() -> None:
    with pytest.raises(ProblemError, match=r"'step' does not fail.*returns True where it fails"):
        remat.reduce(step(), lambda _: False)


def test_an_error_of_the_test_is_not_caught() -> None:
    def test(joint: JointGraph) -> bool:
        raise LookupError("of the test itself")

    with pytest.raises(LookupError, match="of the test itself"):
        remat.reduce(step(), test)


def test_an_interruption_leaves_the_smallest_so_far() -> None:
    ran = 0

    def test(joint: JointGraph) -> bool:
        nonlocal ran
        ran += 1
        if ran == 8:
            raise KeyboardInterrupt
        return reads_a_product(joint)

    found = remat.reduce(step(), test)
    assert found.interrupted
    assert reads_a_product(found.joint)
    assert found.nodes < found.before


def test_what_writes_to_a_list_stays_behind_what_it_writes_to() -> None:
    found = remat.reduce(parse_joint(WRITES), lambda joint: calls(joint, "_foreach_mul_"))
    assert fault_of(found.joint) is None
    assert found.nodes < 6


def test_a_pass_that_is_broken_keeps_nothing_from_being_reduced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Partition, "run", lambda self, state: 1 / 0)
    assert remat.reduce(step(), reads_a_product).nodes == 4


def test_a_custom_operator_computed_twice() -> None:
    """Results differ if everything is recomputed, and not if everything is saved."""

    def test(joint: JointGraph) -> bool:
        try:
            trial = Trial.of(joint)
            expected = trial.run_joint(joint)
            state = pipelines.prepare(joint)
            inputs = joint.graph.find_nodes(op="placeholder")
            primals = [n.name for n in inputs if role_of(n) is Role.PRIMAL]
            halves = pipelines.split(replace(state, decision=Decision(saved=tuple(primals))))
            assert halves.forward is not None
            assert halves.backward is not None
            left = trial.run_graphs(halves.forward, halves.backward, joint.num_fwd_outputs)
        except (RuntimeError, remat.RematError):
            return False
        results = (
            {k: v for k, v in run.items() if k.startswith("gradient")} for run in (expected, left)
        )
        return first_difference(*results) is not None

    found = remat.reduce(gpt(custom=True), test)
    assert found.before > 130
    assert found.nodes < 15
    assert calls(found.joint, "noisy")
