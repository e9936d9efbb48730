"""Random programs with what is done to each: how it is captured, planned, tagged and split."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointPolicy

import remat
from tests.fuzz.captured import Way
from tests.fuzz.draw import programs
from tests.fuzz.pipelines import BUDGETS, COSTS, SOLVERS, pipelines
from tests.fuzz.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Operators in a row, by their places in the joint graph, that get a tag."""

    start: int
    length: int
    policy: CheckpointPolicy


#: Budgets on the bytes that are saved, and on the peak.
ANY_BUDGET = st.one_of(BUDGETS, BUDGETS, BUDGETS.map(remat.Peak))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, the way it is captured, and what is done with its joint graph.

    Attributes:
        program: the program.
        way: how it is captured.
        plan: arguments of `remat.plan`: budget, solver, cost model.
        in_bytes: give the budget again, as the bytes that the first plan takes.
        compiled: the pipeline that the whole step runs with.
        pipelines: pipelines for the joint graph.
        without_replay: a pipeline that does not replay random draws.
        regions: tags for another run of the first pipeline.
        count_outputs: whether forward's outputs count as saved bytes.
    """

    program: Program
    way: Way
    plan: tuple[float | remat.Peak, str, str]
    in_bytes: bool = False
    compiled: remat.PassManager
    pipelines: tuple[remat.PassManager, ...]
    without_replay: remat.PassManager
    regions: tuple[Region, ...]
    count_outputs: bool

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        lines = [f"# {f.name}: {_shown(getattr(self, f.name))}" for f in fields(self)[1:]]
        return "\n".join([repr(self.program), *lines])


def _shown(value: object) -> str:
    managers = value if isinstance(value, tuple) else (value,)
    if all(isinstance(m, remat.PassManager) for m in managers):
        return " / ".join(map(str, managers))
    return repr(value)


@st.composite
def cases(draw: st.DrawFn, *, dynamo: bool = False) -> Case:
    """Random cases."""
    odd = st.sampled_from([False, False, True])
    seldom = st.sampled_from([*[False] * 7, True])  # It takes four times as long.
    way = Way(
        dynamo=dynamo,
        decompose=draw(odd),
        dynamic=draw(seldom),
        writes_in_graph=draw(st.booleans()),
    )
    region = st.builds(
        Region,
        start=st.integers(0, 60),
        length=st.integers(1, 12),
        policy=st.sampled_from(CheckpointPolicy),
    )
    return Case(
        program=draw(programs(regions=dynamo)),
        way=way,
        plan=draw(st.tuples(ANY_BUDGET, st.sampled_from(SOLVERS), st.sampled_from(COSTS))),
        in_bytes=draw(odd),
        compiled=draw(pipelines()),
        pipelines=tuple(draw(st.lists(pipelines(), min_size=1, max_size=2))),
        without_replay=draw(pipelines(replay=False)),
        regions=tuple(draw(st.lists(region, max_size=4))),
        count_outputs=draw(st.booleans()),
    )
