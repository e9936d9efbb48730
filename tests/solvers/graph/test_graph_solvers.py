"""Solvers of the graph problem, against every decision there is."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from remat.errors import ProblemError
from remat.solvers import Status
from remat.solvers.auto import Auto
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.lagrangian import Lagrangian, Search
from remat.solvers.graph.milp import GraphMilp
from remat.solvers.graph.problem import GraphProblem, evaluate
from remat.solvers.graph.reduction import reduce_graph
from remat.solvers.kernel import kernel
from remat.solvers.run import run
from remat.testing.graphs import layers, random_graph, wide
from remat.testing.oracle import decisions, optimum
from remat.testing.samples import SMALL

#: Enumerates to the end.
EXACT = Lagrangian(work=1_000_000_000, gap=0.0)
needs_kernel = pytest.mark.skipif(kernel() is None, reason="the compiled kernel was not built here")


@needs_kernel
def test_exact_ones_find_the_optimum_within_forward() -> None:
    """The conformance suite tests the bounds and the claims of all solvers on these problems."""
    problems = [p for sample in SMALL if sample.kind == "graph" for p in sample.draw()]
    inside = [problem for problem in problems if all(problem.in_forward)]
    assert len(inside) > 20
    for problem in inside:
        for solver in (EXACT, Auto()):
            assert run(solver, problem).cost == optimum(problem)


@pytest.mark.parametrize("seed", range(40))
def test_reducing_a_graph_loses_no_optimum(seed: int) -> None:
    problem = random_graph(seed, nodes=10, outside=False)
    every = decisions(problem)
    if not every:
        return
    reduction = reduce_graph(problem)
    core = decisions(reduction.core)
    assert len(reduction.core) <= len(problem)
    for capacity in sorted({e.saved_bytes for e in every}):
        best = min(e.recompute_cost for e in every if e.saved_bytes <= capacity)
        of_core = min(
            (e for e in core if e.saved_bytes <= capacity), key=lambda e: e.recompute_cost
        )
        inverted = evaluate(problem, reduction.invert(of_core.saved))
        assert of_core.recompute_cost == best == inverted.recompute_cost
        assert inverted.saved_bytes == of_core.saved_bytes


@pytest.mark.parametrize("seed", range(40))
def test_the_hull_is_the_lower_hull_of_all_decisions(seed: int) -> None:
    problem = random_graph(seed, nodes=9, outside=False)
    every = decisions(problem)
    if not every:
        return
    hull = Hull(problem)
    points = {(v.saved_bytes, v.cost) for v in hull.vertices}
    reached = {(e.saved_bytes, e.recompute_cost) for e in every}
    assert points <= reached
    for a, b in itertools.pairwise(hull.vertices):
        assert a.saved_bytes < b.saved_bytes
        assert a.cost > b.cost
        for x, y in reached:  # nothing lies below the line
            left = (y - a.cost) * (b.saved_bytes - a.saved_bytes)
            assert left >= (b.cost - a.cost) * (x - a.saved_bytes)
    assert hull.least_bytes == min(e.saved_bytes for e in every)
    for capacity in {e.saved_bytes for e in every}:
        best = min(e.recompute_cost for e in every if e.saved_bytes <= capacity)
        assert hull.edge(capacity).bound(capacity) <= best


@needs_kernel
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
def test_solvers_agree_on_identical_layers(share: float) -> None:
    problem = layers(12)
    problem = problem.within(int(share * sum(problem.size)))
    exact = run(EXACT, problem)
    assert exact.status is Status.OPTIMAL
    for solver in (Lagrangian(work=0), GraphMilp(), Auto()):
        solution = run(solver, problem)
        assert solution.bound <= exact.cost <= solution.cost
        assert solution.cost <= exact.cost * 1.05


@needs_kernel
def test_exact_search_ends_where_its_work_does() -> None:
    problem = wide(260)  # more nodes than those that are always searched to the end
    solution = run(Lagrangian(work=1, gap=0.0), problem.within(sum(problem.size) // 3))
    assert solution.status is Status.FEASIBLE
    assert solution.deterministic


def test_without_the_kernel_plans_still_fit_and_are_bounded(monkeypatch) -> None:
    import remat.solvers.graph.lagrangian as module

    problem = layers(8)
    problem = problem.within(sum(problem.size) // 2)
    with_it = run(Auto(), problem)
    monkeypatch.setattr(module, "kernel", lambda: None)
    for solver in (Lagrangian(), Auto()):
        without = run(solver, problem)
        assert without.saved_bytes <= (problem.capacity or 0)
        assert without.bound <= with_it.cost <= without.cost
    assert without.cost <= 1.01 * with_it.cost  # HiGHS takes over


def test_a_clock_that_ends_the_search_is_told() -> None:
    problem = layers(60)
    problem = problem.within(sum(problem.size) // 3)
    solution = run(EXACT, problem, time_limit=1e-4)
    assert solution.saved_bytes <= (problem.capacity or 0)
    assert solution.deterministic is (solution.status is Status.OPTIMAL)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"inputs": ()}, "inputs has 0 entries; expected 2"),
        ({"cost": ()}, "cost has 0 entries; expected 2"),
        ({"size": (1,)}, "size has 1 entries; expected 2"),
        ({"savable": ()}, "savable has 0 entries; expected 2"),
        ({"recomputable": ()}, "recomputable has 0 entries; expected 2"),
        ({"in_forward": (True,) * 3}, "in_forward has 3 entries; expected 2"),
        ({"inputs": ((), (1,))}, r"inputs\[1\] \('b'\) has node 1; expected earlier nodes only"),
        ({"inputs": ((), (-1,))}, r"inputs\[1\]\[0\] is -1; expected an integer"),
        ({"inputs": ((), (0.0,))}, r"inputs\[1\]\[0\] is 0.0; expected an integer"),
        ({"inputs": ((), 0)}, r"inputs\[1\] is 0; expected an ordered sequence"),
        ({"needed": (2,)}, r"needed\[0\] is 2; expected an integer from 0 to 1"),
        ({"recomputable": ("no", True)}, r"recomputable\[0\] \('a'\) is 'no'; expected True or"),
        ({"savable": (True, 1)}, r"savable\[1\] \('b'\) is 1; expected True or False"),
        ({"in_forward": (None, True)}, r"in_forward\[0\] \('a'\) is None; expected True or"),
        ({"cost": (2**62, 2**62)}, r"cost sums to 9223372036854775808; .* use a coarser unit"),
        ({"size": (2**63 - 1, 1)}, "size sums to 9223372036854775808; expected at most"),
        ({"capacity": -1}, "capacity is -1"),
        ({"capacity": True}, "capacity is True"),
    ],
)
def test_a_problem_that_is_none_is_refused(wrong: dict, said: str) -> None:
    both = (True, True)
    fields = {"names": ("a", "b"), "inputs": ((), (0,)), "cost": (1, 1), "size": (1, 1)}
    fields |= {"savable": both, "recomputable": both, "in_forward": both, "needed": (0, 1)}
    assert len(GraphProblem(**fields)) == 2
    with pytest.raises(ProblemError, match=f"^GraphProblem.*{said}"):
        GraphProblem(**fields | wrong)


def test_other_costs_and_capacities_are_checked_too() -> None:
    problem = layers(1)
    with pytest.raises(ProblemError, match=r"cost sums to .*; expected at most 2\*\*63 - 1"):
        problem.priced((2**62,) * len(problem), "ns")
    with pytest.raises(ProblemError, match=r"capacity is 2\.5"):
        problem.within(2.5)  # type: ignore[arg-type]


def test_costs_are_integers_and_so_is_what_highs_proves() -> None:
    """With costs of a few units the next integer above HiGHS's bound is the optimum."""
    problem = GraphProblem(
        names=("a", "b", "c", "d"),
        inputs=((), (), (), ()),
        cost=(6, 5, 4, 3),
        size=(6, 5, 4, 3),
        savable=(True,) * 4,
        recomputable=(True,) * 4,
        in_forward=(True,) * 4,
        needed=(0, 1, 2, 3),
        capacity=16,  # 15 can be saved
    )
    search = Search(problem)
    found = GraphMilp(gap=0.0).improve(search, search.start())
    assert (found.cost, found.bound) == (3, 3)


@needs_kernel
def test_threads_may_decide_one_problem_at_several_capacities() -> None:
    problem = layers(30, seed=3)
    capacities = [sum(problem.size) * share // 100 for share in range(10, 90, 5)] * 2
    random.Random(1).shuffle(capacities)

    def cost(capacity: int) -> int:
        return run(Lagrangian(), problem.within(capacity)).cost

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(cost, capacities)) == list(map(cost, capacities))
