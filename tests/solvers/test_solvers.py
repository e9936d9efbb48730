"""What single solvers promise beyond the conformance suite."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from remat.errors import RefusalError
from remat.solvers import Answer, KnapsackProblem, Solver, Status, run
from remat.solvers.auto import Auto
from remat.solvers.knapsack.cpsat import CpSat
from remat.solvers.knapsack.dp import DynamicProgram
from remat.solvers.knapsack.greedy import Greedy
from remat.solvers.knapsack.milp import Milp
from remat.solvers.knapsack.native import Native
from remat.solvers.knapsack.pulp_cbc import PulpCbc
from remat.solvers.schedule.problem import ScheduleProblem
from remat.testing.families import family


def test_dp_is_exact_where_steps_suffice_and_never_overweight_where_not() -> None:
    problem = family("strongly-correlated", items=100, span=1000, share=50, seed=1)
    assert problem.capacity > 10_000
    exact = run(DynamicProgram(steps=problem.capacity), problem)
    assert exact.status is Status.OPTIMAL
    for steps in (1, 7, 100, 1000):
        coarse = run(DynamicProgram(steps=steps), problem)
        assert coarse.weight <= problem.capacity
        assert exact.value * 0.95 < coarse.value <= exact.value <= coarse.bound


def test_dp_divides_out_what_weights_have_in_common() -> None:
    small = family("weakly-correlated", items=40, span=100, share=50, seed=2)
    unit = 512 * 2**20 + 3
    large = KnapsackProblem(
        tuple(unit * w for w in small.weights), small.values, unit * small.capacity + unit - 1
    )
    assert run(DynamicProgram(), large).status is Status.OPTIMAL
    assert run(DynamicProgram(), large).saved == run(DynamicProgram(), small).saved


@pytest.mark.parametrize(
    "solver", [Milp(nodes=5), PulpCbc(nodes=5), CpSat(work=0.01), Auto()], ids=lambda s: s.name
)
def test_a_search_that_cannot_finish_ends_by_counted_work(solver: Solver) -> None:
    problem = family("strongly-correlated", items=150, span=10**7, share=50, seed=3)
    first, second = run(solver, problem), run(solver, problem)
    assert first.saved == second.saved
    assert first.deterministic
    assert first.weight <= problem.capacity
    assert first.value <= first.bound


@pytest.mark.parametrize("mine", [Milp(), PulpCbc(), CpSat(), Auto()], ids=lambda s: s.name)
def test_a_clock_that_decides_is_told(mine) -> None:
    problem = family("strongly-correlated", items=2000, span=10**9, share=50, seed=3)
    solution = run(mine, problem, time_limit=0.05)
    assert solution.weight <= problem.capacity
    assert solution.deterministic is (solution.status is Status.OPTIMAL)


def broken(*args, **kwargs):
    raise RuntimeError("out of order")


def test_auto_passes_over_what_is_missing_or_fails(monkeypatch) -> None:
    problem = family("uncorrelated", items=60, span=10**6, share=50, seed=4)
    best = run(CpSat(), problem)
    monkeypatch.setattr(CpSat, "requires", ("no_such_module_here",))
    assert run(Auto(), problem).value == best.value
    for solver, method in ((Native, "solve"), (Milp, "search"), (DynamicProgram, "search")):
        monkeypatch.setattr(solver, method, broken)
    floor = run(Auto(), problem)
    assert floor.saved == run(Greedy(), problem).saved
    assert floor.solver == "auto"


def test_auto_schedules_with_greedy_where_the_others_cannot(monkeypatch) -> None:
    monkeypatch.setattr(Native, "requires", ("no_such_module_here",))
    step = ScheduleProblem(
        names=("a", "b"), inputs=((), (0,)), cost=(2**60, 1), size=(4, 4), capacity=8
    )
    assert "coarser unit" in refusal(CpSat(), step)
    assert run(Auto(), step).sequence == run(Greedy(), step).sequence


def refusal(solver, problem) -> str:
    with pytest.raises(RefusalError) as refused:
        run(solver, problem)
    return str(refused.value)


@pytest.mark.parametrize(("claimed", "bound"), [(10, 10), (13, 12)])
def test_auto_keeps_a_better_answer_and_the_lesser_of_two_bounds(
    monkeypatch, claimed: int, bound: int
) -> None:
    """The kernel claims one, and the fractional relaxation of this knapsack proves 12."""
    problem = KnapsackProblem((6, 5, 5, 9), (8, 5, 4, 1), 10)
    monkeypatch.setattr(Native, "solve", lambda *_, **__: Answer((1, 2), claimed))
    for solver in (CpSat, Milp, DynamicProgram):
        monkeypatch.setattr(solver, "search", broken)
    best = run(Auto(), problem)
    assert (best.value, best.bound) == (9, bound)
    assert run(Greedy(), problem).value == 8


def test_cpsat_refuses_what_it_cannot_add_up() -> None:
    problem = KnapsackProblem((2**61 + 1, 2**61, 2**61), (1, 1, 1), 2**62 + 1)
    assert "CP-SAT can add up" in CpSat().refuses(problem)
    halves = KnapsackProblem((2**61, 2**61, 2**61), (1, 1, 1), 2**62)  # 1, 1, 1 and 2
    assert CpSat().refuses(halves) is None


def test_an_integer_limit_is_held_against_sums_and_capacity() -> None:
    class Small(Greedy):
        name = "small"
        integer_limit = 100

    assert Small().refuses(KnapsackProblem((50, 50), (1, 1), 100)) is None
    for problem, said in (
        (KnapsackProblem((50, 51), (1, 1), 60), "the sum of the weights is 101, above the 100"),
        (KnapsackProblem((5, 5), (1, 100), 60), "the sum of the values is 101, above the 100"),
        (KnapsackProblem((5, 5), (1, 1), 101), "the capacity is 101, above the 100"),
    ):
        assert said in Small().refuses(problem)


def test_pulp_leaves_nothing_behind(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run(PulpCbc(), family("uncorrelated", items=30, span=100, share=50, seed=5))
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_an_answer_of_pulp_has_a_bound_if_cbc_proves_it() -> None:
    problem = family("uncorrelated", items=400, span=10**6, share=50, seed=3)
    picked, upper = PulpCbc().attempt(problem, None)
    assert upper == problem.value_of(picked)
    hard = family("strongly-correlated", items=400, span=10**6, share=50, seed=3)
    assert PulpCbc(nodes=1).attempt(hard, None)[1] == float("inf")


def test_importing_solvers_loads_no_back_end_and_using_pulp_does_not_keep_ortools_out() -> None:
    script = """
import sys, remat
import remat.solvers.auto, remat.solvers.knapsack.float_bridge
from remat.solvers import KnapsackProblem, run
from remat.solvers.knapsack.cpsat import CpSat
from remat.solvers.knapsack.pulp_cbc import PulpCbc

assert remat.Solver and remat.KnapsackProblem and remat.Answer
heavy = {"torch", "numpy", "scipy", "ortools", "pulp", "highspy", "pytest", "pluggy"}
problem = KnapsackProblem((3, 4, 5), (3, 4, 6), 8)
print(heavy & set(sys.modules), run(PulpCbc(), problem).value, "ortools" in sys.modules)
print(run(CpSat(), problem).value)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "set() 9 False\n9\n", done.stderr
