"""Define the pytest plugin with which ``pytest --solver=NAME`` runs every solver test on the solver ``NAME``.

A solver test is a test that uses the ``solver`` fixture of this plugin. pytest loads this file in
every run if remat is installed. The plugin therefore imports as little as possible until a solver
is needed, and ignores other projects' fixtures named ``solver``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from remat.solvers.base import Solver
    from remat.testing.selection import SolverUnderTest

Test = TypeVar("Test", bound=Callable[..., None])
FIXTURE = "solver"
_KIND = "remat_kind"
_SELECTED = pytest.StashKey["tuple[SolverUnderTest, ...]"]()


def for_solvers_of(kind: str) -> Callable[[Test], Test]:
    """Return a decorator with which a test runs only on solvers of one kind of problem.

    Args:
        kind: ``"knapsack"``, ``"graph"`` or ``"schedule"``.
    """

    def mark(test: Test) -> Test:
        setattr(test, _KIND, kind)
        return test

    return mark


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--solver`` and ``--known-failures`` to pytest."""
    group = parser.getgroup("remat", "solver tests (remat)")
    group.addoption(
        "--known-failures",
        dest="remat_known_failures",
        metavar="FILE",
        help="solver tests that are known to fail, one name per line; one that passes after all "
        "fails the run.",
    )
    group.addoption(
        "--solver",
        action="append",
        dest="remat_solvers",
        metavar="NAME",
        help="run only the tests that take the 'solver' fixture, against this solver: a registered "
        "name, module:Class, or 'all'; may be repeated. Without it every test runs, solver tests "
        "against all solvers that can run here.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Look up the solvers that ``--solver`` names, before pytest collects tests."""
    names = config.getoption("remat_solvers")
    if names:
        from remat.testing.selection import select

        config.stash[_SELECTED] = select(names, config.invocation_params.dir)


def _known_failures(path: Path) -> Mapping[str, str]:
    """Read a file with lines ``name # reason``, where a name is the part of a test's id after the last ``::``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise pytest.UsageError(f"--known-failures={path}: {error}") from None
    parts = [line.partition("#") for line in lines]
    return {
        name.strip().rpartition("::")[2]: reason.strip() or "a known failure"
        for name, _, reason in parts
    }


@pytest.hookimpl(trylast=True)  # after the tests' own parametrization, which `_is_ours` checks
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make pytest run every solver test once for each solver that ``--solver`` names.

    Without ``--solver``, pytest runs solver tests on every registered solver that can run on this
    machine.
    """
    if FIXTURE not in metafunc.fixturenames or not _is_ours(metafunc):
        return
    from remat.testing.selection import available

    selected = metafunc.config.stash.get(_SELECTED, None) or available()
    ids = [tested.name for tested in selected]
    # In session scope, pytest runs all tests of one solver before the next solver's.
    metafunc.parametrize(FIXTURE, selected, ids=ids, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests to run, and mark the tests that are known to fail.

    A test for one kind of problem does not run on solvers of other kinds. With ``--solver``, all
    tests that are not solver tests are removed.
    """
    _keep(config, items, _is_of_its_kind)
    listed = config.getoption("remat_known_failures")
    known_failures = _known_failures(config.invocation_params.dir / listed) if listed else {}
    for item in items:
        if _solver_of(item) is not None and item.name in known_failures:
            item.add_marker(pytest.mark.xfail(strict=True, reason=known_failures[item.name]))
    if _SELECTED in config.stash:
        _keep(config, items, lambda item: _solver_of(item) is not None)


def _keep(
    config: pytest.Config, items: list[pytest.Item], condition: Callable[[pytest.Item], bool]
) -> None:
    """Remove the tests that do not meet a condition from ``items``; report them as deselected."""
    others = [item for item in items if not condition(item)]
    if others:
        items[:] = [item for item in items if condition(item)]
        config.hook.pytest_deselected(items=others)


def _solver_of(item: pytest.Item) -> SolverUnderTest | None:
    """Return the solver on which a test runs; None if the test is no solver test."""
    selection = sys.modules.get("remat.testing.selection")  # imported only once a solver is needed
    callspec = getattr(item, "callspec", None)
    if selection is None or callspec is None:
        return None
    tested = callspec.params.get(FIXTURE)
    return tested if isinstance(tested, selection.SolverUnderTest) else None


def _is_of_its_kind(item: pytest.Item) -> bool:
    """Return whether a test's solver solves the test's kind of problem; True if the test is no solver test."""
    tested = _solver_of(item)
    if tested is None:
        return True
    # `for_solvers_of` and parameters with an attribute `kind`, such as a `Case`, state the kind.
    params = item.callspec.params  # type: ignore[attr-defined]
    kinds = [getattr(value, "kind", None) for name, value in params.items() if name != FIXTURE]
    kinds.append(getattr(item.function, _KIND, None))  # type: ignore[attr-defined]
    return all(map(tested.solves, kinds))


def pytest_terminal_summary(
    terminalreporter: Any, exitstatus: int | pytest.ExitCode, config: pytest.Config
) -> None:
    """Print why solvers were skipped, and how to run the suite if ``--solver`` was given without solver tests."""
    selected = config.stash.get(_SELECTED, ())
    for tested in selected:
        if tested.reason is not None:
            terminalreporter.write_line(
                f"--solver={tested.name}: skipped, {tested.reason}", yellow=True
            )
    if selected and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line(
            "--solver was given, but no test collected here takes the 'solver' fixture: "
            "add --pyargs remat.testing for the conformance suite",
            red=True,
        )


@pytest.fixture(scope="session", name=FIXTURE)
def _solver(request: pytest.FixtureRequest) -> Solver:
    """The solver under test: a test runs once on each solver that `pytest_generate_tests` chooses."""
    tested: SolverUnderTest = request.param
    return tested.solver()


def _is_ours(metafunc: pytest.Metafunc) -> bool:
    """Return whether a test's argument ``solver`` is this plugin's fixture, not a parameter of the test itself."""
    definitions = getattr(metafunc, "_arg2fixturedefs", {}).get(FIXTURE, ())
    calls = getattr(metafunc, "_calls", ())
    return (
        bool(definitions)
        and definitions[-1].func.__module__ == __name__
        and not any(FIXTURE in call.params for call in calls)
    )
