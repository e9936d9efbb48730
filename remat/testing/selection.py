"""Select the solvers to test, from the values of pytest's option ``--solver``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from remat.errors import SolverError
from remat.plugins.registry import registry
from remat.solvers.base import KINDS, Solver, unavailable

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverUnderTest:
    """A solver to test, or the reason why it cannot be tested.

    Attributes:
        name: the registered name, or the name given to ``--solver``; shown in test ids.
        kind: the solver's class; None if the class cannot be imported because a module is missing.
        reason: reason for skipping the solver's tests; None if the tests run.
    """

    name: str
    kind: type[Solver] | None
    reason: str | None

    def solves(self, kind: object) -> bool:
        """Return whether the solver solves problems of ``kind``; True if the kind or the solver's class is unknown."""
        kinds = [problem.kind for problem in KINDS]
        return self.kind is None or kind in self.kind.solves or kind not in kinds

    def solver(self) -> Solver:
        """Return an instance of the solver, or skip the current test if the solver cannot be tested."""
        if self.reason is not None or self.kind is None:
            pytest.skip(f"solver '{self.name}' is not available: {self.reason}")
        return self.kind()


def select(names: Iterable[str], folder: Path) -> tuple[SolverUnderTest, ...]:
    """Return the solvers that the option ``--solver`` names, each once, in the given order.

    Args:
        names: registered names, ``module:Class``, or ``all`` for every registered solver.
        folder: folder that is appended to ``sys.path``, so that ``module`` is found in this folder.

    Raises:
        pytest.UsageError: a name is unknown, or a class is not a usable solver.
    """
    selected: dict[str, SolverUnderTest] = {}
    for name in names:
        for each in registry().solvers if name == ALL else (name,):
            selected.setdefault(each, _look_up(each, folder))
    return tuple(selected.values())


@functools.cache
def available() -> tuple[SolverUnderTest, ...]:
    """Return every registered solver that can run on this machine."""
    solvers = registry().solvers
    return tuple(
        SolverUnderTest(name=name, kind=solvers[name], reason=None)
        for name in registry().solver_names()
    )


def _look_up(name: str, folder: Path) -> SolverUnderTest:
    if ":" in name and str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end, so that installed modules win
    try:
        kind = registry().solver_class(name)
    except SolverError as error:
        # If the package in `name` is missing, `name` is wrong. Any other missing module is a dependency.
        absent = _missing_module(error)
        if absent is None or name.partition(":")[0].partition(".")[0] == absent.partition(".")[0]:
            raise pytest.UsageError(f"--solver={name}: {error}") from None
        return SolverUnderTest(name=name, kind=None, reason=f"module '{absent}' is not installed")
    return SolverUnderTest(name=name, kind=kind, reason=unavailable(kind))


def _missing_module(error: SolverError) -> str | None:
    cause = error.__cause__
    return cause.name if isinstance(cause, ModuleNotFoundError) else None
