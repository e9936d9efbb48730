"""Reproducers for compilations that crash, written without being asked for."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from remat.errors import PassError, ProblemError, RematError, SolverError, VerifyError
from remat.graph.joint import JointGraph
from remat.passes.core.state import State
from remat.passes.decide.knapsack import Knapsack
from remat.passes.decide.solve_graph import SolveGraph
from remat.passes.instruments.repro_folder import Failure, leave_reproducer
from remat.passes.instruments.reproducer import instance_of
from remat.solvers.graph_problem import GraphProblem

#: Names the folder that reproducers go to where none is given; empty for none at all.
VARIABLE = "REMAT_REPRO_DIR"


def is_unexpected(error: BaseException) -> bool:
    """Whether a failure is not the user's: a pass or a solver that crashed, or was found wrong.

    A budget that cannot be met, invalid options, tags in conflict and a missing solver are the
    user's; their messages say all there is to know.
    """
    if isinstance(error, SolverError):
        return error.problem is not None
    if isinstance(error, RematError):
        return isinstance(error, (PassError, VerifyError))
    return isinstance(error, Exception)


def folder_for(given: object) -> Path | None:
    """The folder for reproducers: as given, by the environment, or one for temporary files; None for none.

    Args:
        given: a path; None for the default; False for none.

    Raises:
        ProblemError: it is something else.
    """
    if given is None or given is True:
        named = os.environ.get(VARIABLE)
        if named is not None:
            return Path(named) if named else None
        try:
            return Path(tempfile.gettempdir()) / f"remat-repro-of-{_user()}"
        except OSError:  # no folder can be written, or the disk is full
            return None
    if given is False:
        return None
    if isinstance(given, (str, Path)) and str(given):
        return Path(given)
    raise ProblemError(f"repro is {given!r}; expected the path of a folder, or False for none")


def report(
    error: Exception,
    joint: JointGraph,
    folder: Path | None,
    describe: Callable[[], tuple[str, Mapping[str, str], str]],
) -> None:
    """Writes a reproducer where a failure is unexpected, and says in the error where it is.

    Nothing is done before something fails, so the graph is written as it is by then.

    Args:
        error: what was raised.
        joint: the graph that was being planned.
        folder: where to put it; None for nowhere.
        describe: tells the pipeline, the arguments of `remat.plan`, and a note.
    """
    if folder is None or not is_unexpected(error):
        return
    from remat.graph.text import print_joint

    def as_failure() -> Failure:
        pipeline, options, note = describe()
        return Failure(
            graph=print_joint(joint),
            pipeline=pipeline,
            options=options,
            path=_path(error),
            error=error,
            instance=instance_of(error, State(joint=joint), options.get("cost", "")),
            note=" ".join((_NOTE, note)).strip(),
        )

    leave_reproducer(folder, error, as_failure)


_NOTE = (
    "The graph is as it was when the failure was noticed: passes that come before the decision, such "
    "as dce and cse, had changed it already, and one of them that fails leaves it half-way."
)


def _path(error: Exception) -> tuple[str, ...]:
    """The pass that failed, as far as the error tells."""
    if isinstance(error, PassError):
        return tuple(error.pass_name.split(" > "))
    if isinstance(error, SolverError):
        of_graph = isinstance(error.problem, GraphProblem)
        return (SolveGraph.name if of_graph else Knapsack.name,)
    return ()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # an id without an entry in the table of users
        return str(os.getuid()) if hasattr(os, "getuid") else "somebody"
