"""The minimum cut against NetworkX, its bound on a chain, and the rules that ban values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.graph.python import max_flow

from remat.errors import ProblemError
from remat.passes.decide.bans import banned
from remat.passes.decide.min_cut import Fusibility, MinCut
from remat.planning.pipelines import prepare
from remat.solvers.graph.flow import InfeasibleCutError, Network
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.problem import GraphProblem, conflict, evaluate
from remat.testing.graphs import random_graph
from tests.graphs import joint_of, weight


@st.composite
def problems(draw: st.DrawFn) -> GraphProblem:
    """Small problems, most of them feasible."""
    problem = random_graph(draw(st.integers(0, 2**20)), nodes=draw(st.integers(4, 9)))
    once, never = (draw(st.sets(st.integers(0, 9), max_size=3)) for _ in range(2))
    again = (v and i not in once for i, v in enumerate(problem.recomputable))
    savable = (v and i not in never for i, v in enumerate(problem.savable))
    return replace(problem, recomputable=tuple(again), savable=tuple(savable))


def oracle(problem: GraphProblem, weight: list[int], penalty: list[int]) -> float:
    """The same cut on an explicit network, by NetworkX; arcs without a capacity are infinite."""
    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for i in range(len(problem)):
        if problem.savable[i]:
            graph.add_edge(("in", i), ("out", i), capacity=weight[i])
        else:
            graph.add_edge(("in", i), ("out", i))
        if problem.recomputable[i]:
            graph.add_edge("source", ("in", i), capacity=penalty[i])
            for j in problem.inputs[i]:
                graph.add_edge(("out", j), ("in", i))
        else:
            graph.add_edge("source", ("in", i))
    for i in problem.needed:
        graph.add_edge(("out", i), "sink")
    return float(nx.minimum_cut(graph, "source", "sink")[0])


@settings(max_examples=100)
@given(problem=problems(), data=st.data())
@pytest.mark.slow
def test_cuts_are_as_small_as_networkxs(problem: GraphProblem, data: st.DataObject) -> None:
    n = len(problem)
    prices = st.lists(st.integers(0, 50), min_size=n, max_size=n)
    price, fee = data.draw(prices), data.draw(prices)
    if conflict(problem) is not None:
        with pytest.raises(InfeasibleCutError):
            Network(problem).cut(price)
        with pytest.raises(nx.NetworkXUnbounded):
            oracle(problem, price, fee)
        return
    network = Network(problem)
    cut = network.cut(price, fee)
    assert cut.value == oracle(problem, price, fee)
    # The value is what the saved set really costs.
    scored = evaluate(problem, cut.saved)
    assert cut.value == sum(price[i] for i in cut.saved) + sum(fee[i] for i in scored.recomputed)
    assert network.cut(price).value == oracle(problem, price, [0] * n)


def chain(n: int, **fields: Any) -> GraphProblem:
    """A chain of values behind one input, each needed by backward."""
    given = {
        "cost": (0, *[7] * (n - 1)),
        "size": (0, *[4] * (n - 1)),
        "savable": (True,) * n,
        "recomputable": (False, *[True] * (n - 1)),
        "needed": tuple(range(1, n)),
    }
    return GraphProblem(
        names=tuple(f"v{i}" for i in range(n)),
        inputs=((), *((i,) for i in range(n - 1))),
        in_forward=(True,) * n,
        **{**given, **fields},
    )


def test_the_bound_is_tight_for_a_chain_of_equal_products() -> None:
    problem = chain(11)
    for kept in range(11):
        assert Hull(problem).edge(4 * kept).bound(4 * kept) == 7 * (10 - kept)


def test_of_equal_cuts_the_one_nearest_to_backward_is_returned() -> None:
    """NetworkX's source side is the largest, OR-Tools' the smallest; OR-Tools' sink side is used here."""
    last = chain(5, needed=(4,))
    assert Network(last).cut([7] * 5).saved == (4,)
    arcs = [(0, 1), (1, 2), (2, 3)]
    graph = nx.DiGraph()
    graph.add_edges_from(arcs, capacity=1)
    assert nx.minimum_cut(graph, 0, 3)[1] == ({0, 1, 2}, {3})
    flow = max_flow.SimpleMaxFlow()
    for arc in arcs:
        flow.add_arc_with_capacity(*arc, 1)
    flow.solve(0, 3)
    assert list(flow.get_source_side_min_cut()) == [0]
    assert list(flow.get_sink_side_min_cut()) == [3]


def test_prices_past_64_bits_are_refused() -> None:
    with pytest.raises(ProblemError, match="scale them down"):
        Network(chain(2)).cut([0, 2**62])


def test_tags_that_no_plan_can_keep_are_explained() -> None:
    """Saving is forbidden along the whole way from something that may not run again."""
    problem = chain(3, savable=(False, False, True), needed=(1,))
    with pytest.raises(InfeasibleCutError, match="'v0' → 'v1'") as caught:
        Network(problem)
    assert caught.value.chain == (0, 1)


def test_each_ban_changes_what_is_kept() -> None:
    """Without the allow-list a running sum may be recomputed; without the reduction rule, a small sum."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ w).cumsum(0)
        return (h * torch.sigmoid(h.sum(0, keepdim=True))).sum()

    state = prepare(joint_of(f, weight(64, 16), weight(16, 16)))

    def names(**options: bool) -> set[str]:
        ban = banned(state, MinCut(**options).rules, state.get(Fusibility()))
        return {n.name for n, b in zip(state.index.nodes, ban, strict=True) if b}

    everything = names()
    assert {"mm", "cumsum"} <= everything
    # Compute-intensive operators stay banned by their own right until only draws are left.
    few = {"ban_used_far_apart": False, "ban_materialized_backward": False}
    assert {"mm", "cumsum"} <= names(**few)
    without = names(**few, ban_not_in_allowlist=False)
    assert "mm" in without
    assert "cumsum" not in without
    assert "sum_1" in everything
    assert "sum_1" not in names(ban_reductions=False, ban_used_far_apart=False)
