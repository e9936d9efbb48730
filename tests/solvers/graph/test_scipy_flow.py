"""Maximum flows of SciPy in 64 bits, beside those of OR-Tools."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from remat.solvers.graph.flow import Network
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.graph.scipy_flow import ScipyFlow


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arcs from the source 0 over other vertices to the sink 1; capacities are small, large, or above any flow."""
    rng = random.Random(seed)
    count, most = rng.randrange(3, 30), rng.choice([10, 2**20, 2**45, 2**52])
    order = [0, *range(2, count), 1]
    tails, heads, capacities = [], [], []
    for _ in range(rng.randrange(1, 80)):
        first, second = sorted(rng.sample(range(count), 2))
        tails.append(order[first])
        heads.append(order[second])
        direct = (first, second) == (0, count - 1)
        capacities.append(
            rng.choice([rng.randrange(most), rng.randrange(100), 0 if direct else -1])
        )
    above = 2 * sum(c for c in capacities if c > 0) + 1
    return (
        np.asarray(tails),
        np.asarray(heads),
        np.asarray([above if c < 0 else c for c in capacities]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_flows_and_cuts_are_those_of_or_tools(seed: int) -> None:
    max_flow = pytest.importorskip("ortools.graph.python.max_flow")
    tails, heads, capacities = drawn(seed)
    theirs = max_flow.SimpleMaxFlow()
    theirs.add_arcs_with_capacity(tails, heads, capacities)
    theirs.solve(0, 1)
    above = int(capacities.max()) + 1
    if theirs.optimal_flow() >= above - 1:
        return  # no cut is finite, which `Network` refuses beforehand
    ours = ScipyFlow(tails, heads, capacities, source=0, sink=1, most=above)
    assert ours.optimal_flow() == theirs.optimal_flow()
    assert set(ours.get_sink_side_min_cut()) == set(theirs.get_sink_side_min_cut())
    flows = ours.flows(np.arange(len(capacities)))
    assert (flows >= 0).all()
    assert (flows <= capacities).all()
    net = np.zeros(30, dtype=np.int64)
    np.add.at(net, heads, flows)
    np.subtract.at(net, tails, flows)
    assert not net[2:].any()
    assert net[1] == ours.optimal_flow()


def chain(length: int) -> GraphProblem:
    return GraphProblem(
        names=tuple(f"v{i}" for i in range(length)),
        size=tuple(7 + 3 * (i % 5) for i in range(length)),
        cost=tuple(2**40 + i for i in range(length)),
        inputs=tuple(tuple(j for j in (i - 1, i - 3) if j >= 0) for i in range(length)),
        savable=(True,) * length,
        in_forward=(True,) * length,
        recomputable=(False, *(True,) * (length - 1)),
        needed=tuple(range(0, length, 2)),
        capacity=100,
    )


def test_cuts_and_losses_need_no_or_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools")
    problem = chain(40)
    network, prices = Network(problem), [2**45 + 3 * i for i in range(40)]
    expected = network.cut(prices, problem.cost), network.losses(prices, problem.cost).value
    monkeypatch.setitem(sys.modules, "ortools.graph.python", None)  # importing it fails
    assert (
        network.cut(prices, problem.cost),
        network.losses(prices, problem.cost).value,
    ) == expected
