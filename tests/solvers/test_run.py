"""Running a solver: whether it can, whether it wants to, and what becomes of what it does."""

from __future__ import annotations

from typing import Any

import pytest

from remat.errors import ProblemError, SolverError
from remat.solvers import KnapsackProblem, Solver, run, unavailable
from remat.testing.graphs import layers

PROBLEM = KnapsackProblem((3, 4, 5), (30, 41, 50), 8)


class Recorder(Solver):
    """Passes every call on to a list."""

    name = "recorder"
    calls: list = []  # noqa: RUF012

    def solve(self, problem, **kwargs):
        self.calls.append((problem, kwargs))
        return [0, 2]


def test_the_solver_gets_the_problem_and_the_limit_as_they_are() -> None:
    Recorder.calls.clear()
    solution = run(Recorder(), PROBLEM, time_limit=2.5)
    assert Recorder.calls == [(PROBLEM, {"time_limit": 2.5})]
    assert (solution.saved, solution.value, solution.weight) == ((0, 2), 80, 8)
    assert solution.elapsed_s >= 0


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_time_limit_must_be_positive_seconds(limit) -> None:
    with pytest.raises(ProblemError, match=r"^time_limit must be"):
        run(Recorder(), PROBLEM, time_limit=limit)


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"^solver must be an instance of"):
        run(Recorder, PROBLEM)
    with pytest.raises(
        ProblemError, match=r"^problem must be a KnapsackProblem, a GraphProblem or .* got tuple"
    ):
        run(Recorder(), (1, 2))


def halfway():
    yield 0
    raise RuntimeError("halfway")


def fails(error):
    raise error


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: fails(ValueError("no")), "raised ValueError: no"),
        (lambda: fails(MemoryError("no")), "raised MemoryError: no"),
        (lambda: fails(SystemExit("no")), "raised SystemExit: no"),
        (halfway, "raised RuntimeError: halfway"),
        (
            lambda: fails(SolverError("other", "solver 'other' gave up")),
            "raised SolverError: solver 'other' gave up",
        ),
        (lambda: fails(SolverError("raiser", "solver 'raiser' gave up")), "gave up"),
    ],
)
def test_what_a_solver_raises_is_chained_under_its_name(answer, said: str) -> None:
    class Raiser(Solver):
        name = "raiser"

        def solve(self, problem, **kwargs):
            return answer()

    with pytest.raises(SolverError, match=rf"^solver 'raiser' {said}( \(.*:\d+\))?$") as raised:
        run(Raiser(), PROBLEM)
    assert raised.value.solver == "raiser"
    own = said == "gave up"  # an error of its own passes as it is
    assert (raised.value.__cause__ is None) is own


def test_a_solver_that_changes_the_problem_is_refused() -> None:
    class Meddler(Solver):
        name = "meddler"

        def solve(self, problem, **kwargs):
            object.__setattr__(problem, "capacity", 1_000_000)
            return range(len(problem))

        solve_graph = solve

    for problem in (KnapsackProblem((3, 4, 5), (30, 41, 50), 8), layers(2).within(10)):
        with pytest.raises(
            SolverError, match=r"^solver 'meddler' changed the problem it was given$"
        ):
            run(Meddler(), problem)


def test_a_refusal_says_why() -> None:
    class Picky(Recorder):
        name = "picky"

        def refuses(self, problem):
            return "too many items" if len(problem) > 2 else None

    with pytest.raises(SolverError, match=r"^solver 'picky' refuses the problem: too many items$"):
        run(Picky(), PROBLEM)


def test_a_missing_module_says_what_to_install() -> None:
    class Needy(Recorder):
        name = "needy"
        requires = ("no_such_module_here.sub",)

    class NeedyExtra(Needy):
        extra = "my-package[highs]"

    assert unavailable(Recorder) is None
    reason = "module 'no_such_module_here.sub' is not installed: pip install 'no_such_module_here'"
    assert unavailable(Needy) == reason
    assert unavailable(NeedyExtra).endswith("pip install 'my-package[highs]'")
    with pytest.raises(SolverError, match=r"^solver 'needy' is not available: module"):
        run(Needy(), PROBLEM)


@pytest.mark.parametrize("wrong", [(3,), 3, "numpy"])
def test_names_of_modules_are_checked_without_registration(wrong: Any) -> None:
    class Odd(Recorder):
        name = "odd"
        requires = wrong

    with pytest.raises(SolverError, match=r"'odd' is not available: .*requires must be a tuple"):
        run(Odd(), PROBLEM)


def test_a_solver_of_the_graph_problem_only_is_told_from_others() -> None:
    class Graphs(Solver):
        name = "graphs"

        def solve_graph(self, problem, **kwargs):
            return []

    assert (Graphs.solves, Recorder.solves) == ({"graph"}, {"knapsack"})
    said = "^solver 'graphs' does not solve knapsack problems, only graph problems$"
    with pytest.raises(SolverError, match=said):
        run(Graphs(), PROBLEM)


def test_solvers_compare_by_class_and_show_their_name() -> None:
    assert Recorder() == Recorder()
    assert hash(Recorder()) == hash(Recorder())
    assert Recorder() != type("Other", (Recorder,), {"name": "other"})()
    assert repr(Recorder()) == "<solver 'recorder'>"
    assert Recorder.summary == "Passes every call on to a list."
