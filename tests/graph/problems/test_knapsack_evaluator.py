"""Views of the knapsack on its graph, and the knee, against an example worked by hand and PyTorch's classes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from remat.errors import ProblemError
from remat.graph.problems.knapsack_evaluator import GraphInfoProvider, KnapsackEvaluator

NODES = ["node1", "node2", "node3", "node4", "node5", "output"]
EDGES = [
    ("node1", "node2"),
    ("node2", "node3"),
    ("node3", "node4"),
    ("node4", "node5"),
    ("node5", "output"),
    ("node1", "output"),
]


def example() -> GraphInfoProvider:
    return GraphInfoProvider(
        graph_nodes_in_order=NODES,
        graph_edges=EDGES,
        all_recomputable_banned_nodes=["node1", "node2", "node5"],
        recorded_knapsack_input_memories=[0.1, 0.2, 0.2],
        recorded_knapsack_input_runtimes=[100.0, 50.0, 51.0],
    )


def drawn(seed: int, count: int) -> dict[str, Any]:
    """Facts about a chain of candidates, drawn at random."""
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(count)]
    return {
        "graph_nodes_in_order": names,
        "graph_edges": list(pairwise(names)),
        "all_recomputable_banned_nodes": names,
        "recorded_knapsack_input_memories": [rng.randint(1, 9) / 100 for _ in names],
        "recorded_knapsack_input_runtimes": [float(rng.randint(1, 99)) for _ in names],
    }


def test_the_views_of_the_example() -> None:
    info = example()
    contracted = info.recomputable_node_only_graph_with_larger_graph_context
    assert list(contracted.edges) == [("node1", "node2"), ("node2", "node5")]
    assert list(info.recomputable_node_only_graph.edges) == [("node1", "node2")]
    assert list(info.full_joint_nx_graph.nodes) == NODES[:-1]
    assert [n.name for n in info.simplified_fx_joint_graph.nodes] == NODES
    assert info.get_non_ac_peak_memory() == pytest.approx(0.5)
    assert info.get_theoretical_max_runtime() == 201.0


def test_the_backward_trace_of_the_example_peaks_at_a_half() -> None:
    result = KnapsackEvaluator(example()).evaluate_knapsack_output(
        [0], [1, 2], account_for_backward_pass=True
    )
    assert result["peak_memory"] == pytest.approx(0.5)
    assert result["recomputation_runtime"] == 101.0


def test_nothing_is_counted_twice() -> None:
    # With everything saved, backward needs nothing more than what is saved.
    evaluator = KnapsackEvaluator(example())
    saved = evaluator.evaluate_knapsack_output([0, 1, 2], [], account_for_backward_pass=True)
    assert saved["peak_memory"] == pytest.approx(0.5)
    # node5 needs node2, and node2 the saved node1, which is there already.
    both = evaluator.evaluate_knapsack_output([0, 1], [2], account_for_backward_pass=True)
    assert both["peak_memory"] == pytest.approx(0.5)


@pytest.mark.parametrize("lists", [([0, 1], [1, 2]), ([0], [1]), ([0], [1, 2, 3])])
def test_answers_that_do_not_cover_the_candidates_are_errors(lists) -> None:
    with pytest.raises(ProblemError, match="saved and recomputable nodes"):
        KnapsackEvaluator(example()).evaluate_knapsack_output(*lists)


def test_the_knee_of_a_sweep_is_pytorchs() -> None:
    import torch._functorch._activation_checkpointing.knapsack as knapsack
    from torch._functorch._activation_checkpointing import (
        graph_info_provider,
        knapsack_evaluator,
    )

    facts = drawn(seed=0, count=12)
    mine = KnapsackEvaluator(GraphInfoProvider(**facts))
    theirs = knapsack_evaluator.KnapsackEvaluator(graph_info_provider.GraphInfoProvider(**facts))
    solver = knapsack.dp_knapsack
    assert mine.get_knee_point_memory_budget(
        solver, 0.4, 0.01, 20
    ) == theirs.get_knee_point_memory_budget(solver, 0.4, 0.01, 20)


def test_the_knee_of_the_frontier_is_never_worse_than_a_sweeps() -> None:
    import remat

    info = GraphInfoProvider(**drawn(seed=1, count=25))
    evaluator = KnapsackEvaluator(info)
    exact = remat.knapsack_fn("native" if "native" in remat.solver_names() else "cpsat")
    memories, runtimes = info.get_knapsack_memory_input(), info.get_knapsack_runtime_input()

    def score(budget: float) -> float:
        """Distance from the origin, both axes scaled to the whole."""
        gained, saved, _ = exact(memories, runtimes, budget)
        memory = sum(memories[i] for i in saved) / sum(memories)
        return memory**2 + (1 - gained / sum(runtimes)) ** 2

    whole = sum(memories)
    mine = evaluator.get_knee_point_memory_budget(max_mem_budget=whole, min_mem_budget=0.0)
    swept = evaluator.get_knee_point_memory_budget(exact, whole, 0.0, 40)
    assert score(mine * (1 + 1e-9)) <= score(swept) + 1e-9


def test_without_a_trade_off_the_largest_budget_is_the_knee() -> None:
    info = GraphInfoProvider(
        graph_nodes_in_order=["a"],
        graph_edges=[],
        all_recomputable_banned_nodes=["a"],
        all_node_memories={"a": 1.0},
        all_node_runtimes={"a": 0.0},
    )
    assert KnapsackEvaluator(info).get_knee_point_memory_budget(max_mem_budget=0.7) == 0.7


def test_missing_facts_are_named() -> None:
    with pytest.raises(ProblemError, match="all_node_runtimes"):
        GraphInfoProvider(["a"], [], ["a"], all_node_memories={"a": 1.0})
    with pytest.raises(ProblemError, match="'b'"):
        GraphInfoProvider(["a"], [("a", "b")], ["a"], {"a": 1.0}, {"a": 1.0})
