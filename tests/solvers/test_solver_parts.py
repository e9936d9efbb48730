"""The exact parts that solvers share: relaxation, reduction, scaling, HiGHS."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from functools import cmp_to_key

from hypothesis import given
from hypothesis import strategies as st

from remat.solvers import Answer, KnapsackProblem
from remat.solvers.highs import milp
from remat.solvers.knapsack.bounds import efficiency_order
from remat.solvers.knapsack.milp import Milp
from remat.solvers.knapsack.reduction import fix_variables, reduce
from remat.solvers.knapsack.tolerances import scale_down
from remat.testing.families import family
from remat.testing.oracle import brute_force


@st.composite
def problems(draw: st.DrawFn) -> KnapsackProblem:
    span = draw(st.sampled_from([4, 100, 2**55]))
    items = draw(st.lists(st.tuples(st.integers(0, span), st.integers(0, span)), max_size=8))
    weights, values = tuple(w for w, _ in items), tuple(v for _, v in items)
    return KnapsackProblem(weights, values, draw(st.integers(0, sum(weights) + 2)))


@given(problems())
def test_efficiency_order_compares_fractions_exactly(problem: KnapsackProblem) -> None:
    def compare(i: int, j: int) -> int:
        (wi, vi), (wj, vj) = (
            (problem.weights[k], problem.values[k] if problem.weights[k] else 1) for k in (i, j)
        )
        return (vj * wi > vi * wj) - (vj * wi < vi * wj) or i - j

    assert list(efficiency_order(problem.weights, problem.values)) == sorted(
        range(len(problem)), key=cmp_to_key(compare)
    )


@given(problems())
def test_the_relaxation_bounds_and_its_rounding_is_half_as_good(problem: KnapsackProblem) -> None:
    relaxed, optimum = problem.relaxed(), brute_force(problem)
    assert relaxed.value <= optimum <= relaxed.bound
    assert 2 * relaxed.value >= optimum
    assert problem.weight_of(relaxed.saved) <= problem.capacity
    assert problem.value_of(relaxed.saved) == relaxed.value


def test_the_relaxation_is_exact_at_large_numbers() -> None:
    problem = KnapsackProblem((2**60, 2**60 + 1), (2**60 - 1, 2**60), 2**60 + 7)
    fraction = Fraction(2**60) + Fraction(6 * (2**60 - 1), 2**60)
    assert problem.relaxed().bound == int(fraction)


@given(problems())
def test_an_optimum_of_the_core_inverts_to_an_optimum(problem: KnapsackProblem) -> None:
    reduction = reduce(problem)
    core = reduction.core
    assert all(0 < w <= core.capacity for w in core.weights)
    assert all(v > 0 for v in core.values)
    assert not core.weights or core.total_weight > core.capacity
    best = brute_force(core)
    assert reduction.invert_answer(Answer((), best)).bound == brute_force(problem)
    inverted = reduction.invert_answer(Answer(core.relaxed().saved)).saved
    assert problem.weight_of(inverted) <= problem.capacity


@given(problems())
def test_what_is_fixed_needs_no_search(problem: KnapsackProblem) -> None:
    core = reduce(problem).core
    if not len(core):
        return
    relaxed = core.relaxed()
    fixed = fix_variables(core, relaxed)
    inverted = fixed.invert_answer(Answer((), brute_force(fixed.core))).bound
    assert max(relaxed.value, inverted) == brute_force(core)
    assert not set(fixed.always) & set(fixed.remaining)
    assert core.weight_of(fixed.always) <= core.capacity


def test_fixing_leaves_little_of_a_large_problem() -> None:
    problem = family("uncorrelated", items=10_000, span=10**7, share=50, seed=1)
    core = reduce(problem).core
    assert len(fix_variables(core, core.relaxed()).remaining) < 500


@given(problems(), st.integers(9, 40))
def test_scaling_down_relaxes(problem: KnapsackProblem, limit: int) -> None:
    scaled, value_unit = scale_down(problem, weight_limit=limit, value_limit=limit)
    assert scaled.total_weight <= limit
    assert scaled.total_value <= limit
    assert value_unit * brute_force(scaled) >= brute_force(problem)


@given(problems(), st.data())
def test_repair_makes_any_choice_fit_and_leaves_no_room(problem: KnapsackProblem, data) -> None:
    picked = data.draw(st.sets(st.sampled_from(range(len(problem))))) if len(problem) else set()
    fixed = problem.repaired(picked)
    room = problem.capacity - problem.weight_of(fixed)
    assert room >= 0
    assert all(w > room for i, w in enumerate(problem.weights) if i not in fixed)
    if problem.weight_of(picked) <= problem.capacity:
        assert picked <= set(fixed)


def test_highs_prints_nothing(capfd) -> None:
    milp([-1.0, -2.0], [[1.0, 1.0]], high=1.5, integral=[True, True], nodes=10, time_limit=None)
    assert capfd.readouterr() == ("", "")


def test_ortools_is_imported_before_highspy() -> None:
    """Some versions of `highspy` keep OR-Tools from loading after them."""
    script = """
import sys
from remat.solvers import KnapsackProblem
from remat.solvers.knapsack.milp import Milp
Milp().attempt(KnapsackProblem((3, 4), (5, 6), 4), None)
print(next(name for name in sys.modules if name in ("ortools", "highspy")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "ortools\n", done.stderr


def test_without_highspy_the_copy_in_scipy_answers_alike(monkeypatch) -> None:
    problem = KnapsackProblem((3, 4, 5), (30, 41, 50), 8)
    expected = Milp().attempt(problem, None)
    monkeypatch.setitem(sys.modules, "highspy", None)
    assert Milp().attempt(problem, None) == expected
