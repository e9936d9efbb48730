"""Random programs in, the same outputs and gradients out, under every pipeline; `make fuzz` runs more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import remat
from remat.errors import VerifyError
from remat.graph import ops
from remat.graph.memory import ownership
from tests.fuzz.captured import Way, run_graphs, run_joint, run_through
from tests.fuzz.cases import Case
from tests.fuzz.check import SEEN, check, halves
from tests.fuzz.fuzzing import run_portion
from tests.fuzz.program import Input, Program
from tests.steps import differences

#: The number of a portion whose first twenty programs draw twice, are tagged and offload.
VARIED = 1
#: The number of a portion in which whole steps of every kind are drawn.
WHOLE_STEPS = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are so small that more would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_no_pipeline_changes_what_a_program_does() -> None:
    """Twenty programs; `make fuzz` draws thousands."""
    portion = run_portion(VARIED, programs=20, shrink=False)
    assert portion.fault is None, portion.fault
    seen = portion.seen
    # The law is only worth something where plans differ, draw twice, and are refused.
    assert portion.different >= 18
    assert seen["programs"] >= 18
    assert seen["pipelines"] >= 3 * seen["programs"]
    assert seen["refused without replay"] >= 1
    assert seen["tagged"] >= 16
    assert seen["plans that offload"] >= 2
    assert seen["as eager, to the bit"] >= 8
    assert seen["PyTorch differs from eager"] <= 1
    assert len(+portion.written) >= 50


def test_no_budget_changes_what_a_whole_step_does() -> None:
    """Nor at other sizes, at sizes that the data tells, and over several graphs."""
    portion = run_portion(WHOLE_STEPS, programs=4, traced=0, whole=4, shrink=False)
    assert portion.fault is None, portion.fault
    assert portion.seen["steps"] >= 3
    assert portion.seen["steps that break their graph"] >= 1
    assert portion.seen["runs under float"] >= 4


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (ops, "is_random", lambda node: False),
        (ownership, "_mutated", lambda *args: {}),
    ],
)
def test_what_breaks_the_law_is_found(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any
) -> None:
    """Who forgets what draws at random, or what is written to, does not get far."""
    monkeypatch.setattr(where, name, instead)
    assert run_portion(11, traced=0, shrink=False).fault is not None  # seed 11 shows both early


def case_of(program: Program) -> Case:
    """A program with the least around it."""
    manager = remat.PassManager.parse("min-cut,partition,functionalize-rng")
    return Case(
        program=program,
        way=Way(),
        plan=(0.5, "greedy", "unit"),
        compiled=manager,
        pipelines=(manager,),
        without_replay=remat.PassManager.parse("min-cut,partition"),
        regions=(),
        count_outputs=False,
    )


UNTRACEABLE = Program(
    inputs=(Input(shape=(9, 9)), Input(shape=(9, 9))),
    lines=("v1 = a0 @ a1 / 4", "v2 = v1.mT", "v2.as_strided((2, 2), (2, 1), 3).cos_()"),
    outputs=("v1",),
)


def test_what_pytorch_refuses_is_no_fault() -> None:
    before = SEEN.copy()
    check(case_of(UNTRACEABLE))
    assert SEEN - before == {"refused by PyTorch": 1}


def test_what_only_the_partitioner_refuses_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where its error reads as PyTorch's."""

    def split(_: Any) -> Any:
        raise RuntimeError("During torch.compile, encountered a mutation on a view chain")

    monkeypatch.setattr("tests.fuzz.check.halves", split)
    with pytest.raises(RuntimeError, match="view chain"):
        check(case_of(NOISY))


NOISY = Program(
    inputs=(Input(shape=(90, 90)), Input(shape=(90, 90))),
    lines=(
        "v1 = a0 @ a1 / 4",
        "v2 = v1 + torch.randn_like(v1)",
        "v3 = torch.sin(v2)",
    ),
    outputs=("v3",),
)


def test_a_draw_that_is_not_replayed_is_refused() -> None:
    """It would be another draw, and another gradient."""
    pipeline = "min-cut,knapsack(solver=greedy,budget=0),partition"
    replay = remat.PassManager.parse("functionalize-rng")
    captured = run_through(
        NOISY,
        Way(),
        lambda j: halves(remat.PassManager.parse(pipeline + ",functionalize-rng").run(j)),
    )
    assert captured.joint is not None
    with pytest.raises(VerifyError, match="a random operator must not draw twice"):
        remat.plan(captured.joint, pipeline=pipeline)
    reference = run_joint(captured.joint, captured)
    split = remat.PassManager.parse(pipeline).run(captured.joint)
    left, _ = run_graphs(captured.joint, *halves(split), captured)
    assert differences(left, reference) == ["gradient 0", "gradient 1", "random state"]
    left, _ = run_graphs(captured.joint, *halves(replay.run(split.state)), captured)
    assert differences(left, reference) == []
    assert torch.equal(left["gradient 0"], reference["gradient 0"])
