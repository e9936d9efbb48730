"""A reproducer for every pass that fails."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from remat.passes.core.pipeline import Instrument
from remat.passes.decide.budgeted import Budgeted, full_and_least
from remat.passes.instruments.repro_folder import Failure, leave_reproducer
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.instances import Instance
from remat.solvers.problem import KnapsackProblem

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.passes.core.base import Pass
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.core.state import State


class Reproducer(Instrument):
    """Writes a folder from which the failure of a pass can be seen again: ``remat repro FOLDER``.

    The graph is written as it was when the run began; a copy is kept until the end for that. The
    message of the error says where the folder is. Where none can be written, it says why: the error
    itself is never replaced.

    Args:
        folder: where to put folders; made if it is not there.

    Attributes:
        written: the folder of the last failure; None where there was none.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.written: Path | None = None
        self._joint: JointGraph | None = None
        self._pipeline = ""
        self._note = ""
        self._seen: BaseException | None = None

    def start(self, pipeline: Pipeline, state: State) -> None:
        self._joint, self._pipeline, self._seen = state.joint.copy(), str(pipeline), None
        self._note = ""
        if state.decision is not None or state.forward is not None:
            self._note = (
                "The run began on a graph that another pipeline had decided about or split: put the "
                "passes of that one before these to see the failure again."
            )

    def failed(self, p: Pass, state: State, path: tuple[str, ...], error: BaseException) -> None:
        joint = self._joint
        if error is self._seen or not isinstance(error, Exception) or joint is None:
            return
        self._seen = error
        from remat.graph.text import print_joint

        def describe() -> Failure:
            instance = None
            if isinstance(p, Budgeted):
                instance = instance_of(error, state, str(p.cost), p.cost.unit)
            return Failure(
                graph=print_joint(joint),
                pipeline=self._pipeline,
                path=path,
                error=error,
                instance=instance,
                note=self._note,
            )

        self.written = leave_reproducer(self.folder, error, describe) or self.written

    def finish(self, result: object) -> None:
        self._joint = None


def instance_of(error: Exception, state: State, cost: str, unit: str = "") -> Instance | None:
    """The problem that a solver failed at, as an instance that can be saved; None where none did.

    Args:
        error: what was raised.
        state: the state that the problem was made of.
        cost: the cost model of the problem.
        unit: the unit of its values, where it is a knapsack.
    """
    problem = getattr(error, "problem", None)
    source = "a problem that a solver failed at"
    if isinstance(problem, KnapsackProblem):
        return Instance(name="failure", problem=problem, cost=cost, unit=unit, source=source)
    if not isinstance(problem, GraphProblem):
        return None
    full = least = 0
    with contextlib.suppress(Exception):  # without the figures it is still the problem
        full, least = full_and_least(state)
    return Instance(
        name="failure",
        problem=problem,
        full_bytes=max(full, least),
        least_bytes=least,
        cost=cost,
        unit=problem.unit,
        source=source,
    )
