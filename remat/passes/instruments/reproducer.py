"""A reproducer for every pass that fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from remat.passes.core.pipeline import Instrument
from remat.passes.decide.budgeted import Budgeted
from remat.passes.instruments.repro_folder import Failure, tell, write_reproducer
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
        if error is self._seen or not isinstance(error, Exception) or self._joint is None:
            return
        self._seen = error
        from remat.graph.text import print_joint

        try:
            failure = Failure(
                graph=print_joint(self._joint),
                pipeline=self._pipeline,
                path=path,
                error=error,
                instance=_instance(p, state, error),
                note=self._note,
            )
            self.written = write_reproducer(self.folder, failure)
        except Exception as other:  # what went wrong first must be seen, whatever else does
            tell(error, f"no reproducer was written to '{self.folder}': {other}")
        else:
            tell(error, f"reproducer: {self.written} (see it again with: remat repro FOLDER)")

    def finish(self, result: object) -> None:
        self._joint = None


def _instance(p: Pass, state: State, error: BaseException) -> Instance | None:
    """The problem that a solver failed at, where one did."""
    problem = getattr(error, "problem", None)
    if isinstance(p, Budgeted) and isinstance(problem, GraphProblem):
        limits = p.limits(state)
        least = limits.least_bytes or 0
        full = max(least, limits.full_bytes or 0)
        return instance_of(problem, str(p.cost), full_bytes=full, least_bytes=least)
    if isinstance(p, Budgeted) and isinstance(problem, KnapsackProblem):
        return instance_of(problem, str(p.cost), unit=p.cost.unit)
    return None


def instance_of(
    problem: GraphProblem | KnapsackProblem,
    cost: str,
    *,
    unit: str = "",
    full_bytes: int = 0,
    least_bytes: int = 0,
) -> Instance:
    """A problem that a solver failed at, as an instance that can be saved."""
    source = "a problem that a solver failed at"
    if isinstance(problem, KnapsackProblem):
        return Instance(name="failure", problem=problem, cost=cost, unit=unit, source=source)
    return Instance(
        name="failure",
        problem=problem,
        full_bytes=full_bytes,
        least_bytes=least_bytes,
        cost=cost,
        unit=problem.unit,
        source=source,
    )
