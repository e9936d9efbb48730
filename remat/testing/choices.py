"""Which solvers a test run tests."""

from __future__ import annotations

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
class Candidate:
    """A solver to test, or why it cannot be.

    Attributes:
        name: as asked for; test ids show it.
        kind: the solver's class; None if a module that it needs keeps it from being imported.
        reason: why its tests are skipped; None if they run.
    """

    name: str
    kind: type[Solver] | None
    reason: str | None

    def solves(self, what: str) -> bool:
        """Whether it solves ``"knapsack"``, ``"graph"`` or ``"schedule"`` problems; True if not known."""
        return self.kind is None or what in self.kind.solves

    def takes(self, parameter: object) -> bool:
        """Whether a test with a parameter is for it: all but those about a kind that it does not solve."""
        kind = getattr(parameter, "kind", None)
        return kind not in [known.kind for known in KINDS] or self.solves(kind)

    def solver(self) -> Solver:
        """Return an instance, or skip the test with the reason."""
        if self.reason is not None or self.kind is None:
            pytest.skip(f"solver '{self.name}' is not available: {self.reason}")
        return self.kind()


def choose(names: Iterable[str], folder: Path) -> tuple[Candidate, ...]:
    """Look up what ``--solver`` asks for, each once, in order.

    Args:
        names: registered names, ``module:Class`` or ``all``.
        folder: where modules are looked for besides the import path.

    Raises:
        pytest.UsageError: a name is unknown, or a class is no usable solver.
    """
    chosen: dict[str, Candidate] = {}
    for name in names:
        for each in registry().solvers if name == ALL else (name,):
            chosen.setdefault(each, _candidate(each, folder))
    return tuple(chosen.values())


def available() -> tuple[Candidate, ...]:
    """Return every registered solver that can run here."""
    solvers = registry().solvers
    return tuple(
        Candidate(name=name, kind=solvers[name], reason=None) for name in registry().solver_names()
    )


def _candidate(name: str, folder: Path) -> Candidate:
    if ":" in name and str(folder) not in sys.path:
        sys.path.append(str(folder))  # behind what is installed
    try:
        kind = registry().solver_class(name)
    except SolverError as error:
        missing = _missing_module(error)
        if missing is None or name.partition(":")[0].partition(".")[0] == missing.partition(".")[0]:
            raise pytest.UsageError(f"--solver={name}: {error}") from None
        return Candidate(name=name, kind=None, reason=f"module '{missing}' is not installed")
    return Candidate(name=name, kind=kind, reason=unavailable(kind))


def _missing_module(error: SolverError) -> str | None:
    cause = error.__cause__
    return cause.name if isinstance(cause, ModuleNotFoundError) else None
