"""The conformance suite: what remat relies on in any knapsack solver.

Run it on a solver with ``pytest --pyargs remat.testing --solver=NAME``, from any folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from remat.plugins.checks import check_solver
from remat.solvers.base import Solver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run
from remat.solvers.solution import Solution, Status
from remat.testing.cases import Case, cases
from remat.testing.families import FAMILIES, drawer, family
from remat.testing.oracle import brute_force

_FEW = [case for case in cases() if len(case.problem) <= 60]


@pytest.fixture(autouse=True)
def _knapsacks_only(solver: Solver) -> None:
    if not solver.knapsack:
        pytest.skip(f"solver '{solver.name}' solves the graph problem only")


def solved(solver: Solver, problem: KnapsackProblem) -> Solution:
    """Solve and check; a problem that the solver refuses with a reason skips the test."""
    reason = solver.refuses(problem)
    if reason is not None:
        pytest.skip(f"solver '{solver.name}' refuses: {reason}")
    return run(solver, problem)


def assert_honest(solver: Solver, solution: Solution, optimum: int, label: str) -> None:
    """Check a verified solution's claims against the known optimum."""
    assert solution.bound >= optimum, (
        f"{label}: {solver.name} claims that nothing beats {solution.bound}, but {optimum} exists"
    )
    if solution.status is Status.OPTIMAL:
        assert solution.value == optimum, (
            f"{label}: {solver.name} claims {solution.value} to be optimal, but {optimum} exists"
        )
    if solver.exact:
        assert solution.status is Status.OPTIMAL, (
            f"{label}: {solver.name} declares exact = True, yet proved no more than "
            f"{solution.value} to {solution.bound}"
        )


def test_is_usable(solver: Solver) -> None:
    """Its class data and signatures are what the registry asks for."""
    assert check_solver(type(solver)) is None


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(solver: Solver, case: Case, solve_case: Callable[[Case], Solution]) -> None:
    """Its choice fits, and what it claims is so; an exact solver proves its answer."""
    assert_honest(solver, solve_case(case), case.optimum, case.name)


@pytest.mark.parametrize("name", FAMILIES)
def test_many_small_problems(solver: Solver, name: str) -> None:
    """Random problems against trying everything, all capacities from tight to loose."""
    for seed in range(20):
        items, share = 1 + seed % 10, 5 * seed + 3
        problem = family(name, items=items, span=30, share=share, seed=seed)
        label = f"family('{name}', items={items}, span=30, share={share}, seed={seed})"
        assert_honest(solver, solved(solver, problem), brute_force(problem), label)


@pytest.mark.parametrize("case", _FEW, ids=lambda case: case.name)
def test_answers_repeat(solver: Solver, case: Case) -> None:
    """Asked twice, it answers the same."""
    if not solver.deterministic:
        pytest.skip(f"solver '{solver.name}' declares deterministic = False")
    first, second = solved(solver, case.problem), solved(solver, case.problem)
    assert first.saved == second.saved


@pytest.mark.parametrize("name", FAMILIES)
def test_order_of_items_does_not_matter(solver: Solver, name: str) -> None:
    """The optimum is the same for the items in any order."""
    _needs_exact(solver)
    problem = family(name, items=30, span=200, share=40, seed=1)
    draw = drawer(2)
    order = sorted(range(30), key=lambda _: draw(0, 10**9))
    shuffled = KnapsackProblem(
        tuple(problem.weights[i] for i in order),
        tuple(problem.values[i] for i in order),
        problem.capacity,
    )
    assert solved(solver, shuffled).value == solved(solver, problem).value


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("factor", [3, 2**20 + 1])
def test_units_do_not_matter(solver: Solver, name: str, factor: int) -> None:
    """Counting bytes or cost in another unit changes no optimum."""
    _needs_exact(solver)
    problem = family(name, items=30, span=200, share=40, seed=3)
    other = KnapsackProblem(
        tuple(factor * w for w in problem.weights),
        tuple(factor * v for v in problem.values),
        factor * problem.capacity + factor - 1,
    )
    assert solved(solver, other).value == factor * solved(solver, problem).value


@pytest.mark.parametrize("name", FAMILIES)
def test_more_room_is_never_worse(solver: Solver, name: str) -> None:
    """The optimum does not fall as the capacity grows."""
    _needs_exact(solver)
    values = [
        solved(solver, family(name, items=24, span=100, share=share, seed=4)).value
        for share in range(0, 102, 6)
    ]
    assert values == sorted(values)


def test_takes_a_time_limit(solver: Solver) -> None:
    """With a clock it may stop early, but what it returns still fits and is honest."""
    problem = family("strongly-correlated", items=60, span=10_000, share=50, seed=5)
    if solver.refuses(problem) is None:
        assert run(solver, problem, time_limit=0.2).bound >= run(solver, problem).value


def test_leaves_standard_output_alone(solver: Solver, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever pipes a plan into another program must be able to read it."""
    solved(solver, family("weakly-correlated", items=60, span=10**7, share=50, seed=6))
    assert capfd.readouterr().out == ""


def test_hash_seed_does_not_matter(solver: Solver) -> None:
    """Two processes with different hash seeds give the same answers."""
    if not solver.deterministic:
        pytest.skip(f"solver '{solver.name}' declares deterministic = False")
    answers = [_in_process(type(solver), seed) for seed in (1, 2)]
    assert answers[0] == answers[1]


def _needs_exact(solver: Solver) -> None:
    if not solver.exact:
        pytest.skip(f"solver '{solver.name}' does not declare exact = True")


def _in_process(kind: type[Solver], hash_seed: int) -> object:
    """The answers of a fresh process, or a skip if it cannot import the solver."""
    script = (
        "import importlib, json\n"
        "from remat.solvers.run import run\n"
        "from remat.testing.families import FAMILIES, family\n"
        f"kind = getattr(importlib.import_module({kind.__module__!r}), {kind.__qualname__!r})\n"
        "def problem(name):\n"
        "    return family(name, items=40, span=300, share=45, seed=7)\n"
        "problems = [p for p in map(problem, FAMILIES) if kind().refuses(p) is None]\n"
        "print('ANSWERS', json.dumps([run(kind(), p).saved for p in problems]))\n"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    if "ModuleNotFoundError" in done.stderr or "AttributeError: module" in done.stderr:
        pytest.skip(f"{kind.__module__}:{kind.__qualname__} cannot be imported by another process")
    assert done.returncode == 0, done.stderr
    line = next(x for x in done.stdout.splitlines() if x.startswith("ANSWERS "))
    return json.loads(line.removeprefix("ANSWERS "))
