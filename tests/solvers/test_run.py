"""Running a solver: whether it can, whether it wants to, and what becomes of what it does."""

from __future__ import annotations

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


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError("no"), SystemExit("no")])
def test_what_a_solver_raises_is_chained_under_its_name(error) -> None:
    class Raiser(Solver):
        name = "raiser"

        def solve(self, problem, **kwargs):
            raise error

    with pytest.raises(SolverError, match=f"^solver 'raiser' raised {type(error).__name__}: no"):
        run(Raiser(), PROBLEM)


def test_a_generator_that_fails_halfway_is_the_solvers_fault() -> None:
    class Lazy(Solver):
        name = "lazy"

        def solve(self, problem, **kwargs):
            yield 0
            raise RuntimeError("halfway")

    with pytest.raises(SolverError, match=r"^solver 'lazy' raised RuntimeError: halfway") as raised:
        run(Lazy(), PROBLEM)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_error_of_its_own_passes_and_that_of_another_is_wrapped() -> None:
    class Delegates(Solver):
        name = "delegates"
        blames = "delegates"

        def solve(self, problem, **kwargs):
            raise SolverError(self.blames, f"solver '{self.blames}' gave up")

    class Blames(Delegates):
        name = "blames"
        blames = "other"

    with pytest.raises(SolverError, match=r"^solver 'delegates' gave up$"):
        run(Delegates(), PROBLEM)
    said = r"^solver 'blames' raised SolverError: solver 'other' gave up$"
    with pytest.raises(SolverError, match=said) as raised:
        run(Blames(), PROBLEM)
    assert raised.value.solver == "blames"


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
