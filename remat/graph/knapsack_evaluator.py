"""Evaluate a knapsack answer on its graph, and find the knee of its frontier.

The classes are those of ``torch/_functorch/_activation_checkpointing`` in PyTorch. What differs: every view keeps the
order of the graph, so that nothing depends on hash seeds; an edge of the contracted view stands for a path on
which no other candidate lies; nothing is counted twice when the backward pass is accounted for; and the knee
comes from one run over the whole frontier instead of a hundred solver runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import networkx as nx
import numpy as np
import numpy.typing as npt
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.solvers.float_bridge import problem_from_floats
from remat.solvers.frontier import knapsack_frontier

#: Points that a knee is looked for among; thinning to so many costs about 1e-5 of the value.
KNEE_POINTS = 32_768

FloatArray = npt.NDArray[np.float64]
#: ``(memory, runtimes, max_memory) -> (runtime saved, indices to save, indices to allow recomputing)``
KnapsackFn = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]


class GraphInfoProvider(torch_compat.GraphInfoProvider):
    """A joint graph with the memories and runtimes of its candidates for recomputation.

    Args:
        graph_nodes_in_order: names of all nodes.
        graph_edges: (producer, user) pairs of names.
        all_recomputable_banned_nodes: names of the candidates: what a knapsack decides on.
        all_node_runtimes: runtime of each candidate, in any unit; or recorded ones, in their order.
        all_node_memories: memory of each candidate, in any unit; or recorded ones, in their order.
        recorded_knapsack_input_memories: memories in the order of the candidates.
        recorded_knapsack_input_runtimes: runtimes in the order of the candidates.
        joint_graph: the graph itself, for whoever wants it back; nothing is read off it.

    Raises:
        ProblemError: neither form of memories or runtimes is given, or a name is unknown.
    """

    def __init__(
        self,
        graph_nodes_in_order: Sequence[str],
        graph_edges: Sequence[tuple[str, str]],
        all_recomputable_banned_nodes: Sequence[str],
        all_node_runtimes: Mapping[str, float] | None = None,
        all_node_memories: Mapping[str, float] | None = None,
        recorded_knapsack_input_memories: Sequence[float] | None = None,
        recorded_knapsack_input_runtimes: Sequence[float] | None = None,
        joint_graph: fx.Graph | None = None,
    ) -> None:
        known = set(graph_nodes_in_order)
        for name in [*all_recomputable_banned_nodes, *(n for e in graph_edges for n in e)]:
            if name not in known:
                raise ProblemError(
                    f"node '{name}' is used, but it is not among graph_nodes_in_order"
                )
        names = list(all_recomputable_banned_nodes)
        super().__init__(
            list(graph_nodes_in_order),
            list(graph_edges),
            names,
            _by_name(names, "runtimes", all_node_runtimes, recorded_knapsack_input_runtimes),
            _by_name(names, "memories", all_node_memories, recorded_knapsack_input_memories),
        )
        self.joint_graph = joint_graph

    @classmethod
    def initialize_from_graph(
        cls,
        joint_graph: fx.Graph,
        all_recomputable_banned_nodes: Sequence[fx.Node],
        recorded_knapsack_input_memories: Sequence[float],
        recorded_knapsack_input_runtimes: Sequence[float],
    ) -> GraphInfoProvider:
        """Reads nodes and edges off a joint graph."""
        provider = cls.inialize_from_graph(  # PyTorch's spelling
            joint_graph,
            list(all_recomputable_banned_nodes),
            list(recorded_knapsack_input_memories),
            list(recorded_knapsack_input_runtimes),
        )
        assert isinstance(provider, GraphInfoProvider)
        return provider

    @cached_property
    def recomputable_node_only_graph_with_larger_graph_context(self) -> nx.DiGraph:
        """The candidates, with paths through other nodes contracted to edges."""
        full = self.full_joint_nx_graph
        candidates = set(self.all_recomputable_banned_nodes)
        graph = nx.DiGraph()
        graph.add_nodes_from(self.all_recomputable_banned_nodes)
        for start in self.all_recomputable_banned_nodes:
            stack, seen = list(full.successors(start)), set()
            while stack:
                node = stack.pop()
                if node in seen:
                    continue
                seen.add(node)
                if node in candidates:
                    graph.add_edge(start, node)
                else:
                    stack.extend(full.successors(node))
        return graph

    def get_non_ac_peak_memory(self) -> float:
        """Memory of all candidates, added up in their order: what saving everything takes."""
        return sum(self.get_knapsack_memory_input())

    def get_theoretical_max_runtime(self) -> float:
        """Runtime of all candidates, added up in their order: what recomputing everything takes."""
        return sum(self.get_knapsack_runtime_input())


def _by_name(
    candidates: Sequence[str],
    what: str,
    given: Mapping[str, float] | None,
    recorded: Sequence[float] | None,
) -> dict[str, float]:
    """Memories or runtimes by candidate, from either form in which they may be given."""
    if given is not None:
        missing = [n for n in candidates if n not in given]
        if missing:
            raise ProblemError(f"all_node_{what} lacks the candidate '{missing[0]}'")
        return dict(given)
    if recorded is None or len(recorded) != len(candidates):
        raise ProblemError(
            f"give all_node_{what}, or recorded_knapsack_input_{what} with one entry for each of "
            f"the {len(candidates)} candidates"
        )
    return dict(zip(candidates, recorded, strict=True))


class KnapsackEvaluator(torch_compat.KnapsackEvaluator):
    """Scores answers to the knapsack over the candidates of a graph."""

    def __init__(self, graph_info_provider: GraphInfoProvider) -> None:
        super().__init__(graph_info_provider)
        self._info = graph_info_provider

    def evaluate_knapsack_output(
        self,
        saved_nodes_idxs: Sequence[int],
        recomputable_node_idxs: Sequence[int],
        account_for_backward_pass: bool = False,
    ) -> dict[str, float]:
        """Scores one answer.

        Args:
            saved_nodes_idxs: positions of the candidates that are saved.
            recomputable_node_idxs: positions of all the others.
            account_for_backward_pass: let the peak include what is recomputed on the way.

        Raises:
            ProblemError: a candidate is in both lists or in neither, or a position does not exist.
        """
        info = self._info
        names = info.all_recomputable_banned_nodes
        both = sorted(set(saved_nodes_idxs) & set(recomputable_node_idxs))
        if both:
            raise ProblemError(f"saved and recomputable nodes overlap at {both}")
        every = [*saved_nodes_idxs, *recomputable_node_idxs]
        if sorted(every) != list(range(len(names))):
            raise ProblemError(
                f"saved and recomputable nodes must be the candidates 0 to {len(names) - 1}, each "
                f"once; got {sorted(every)}"
            )
        saved = [names[i] for i in saved_nodes_idxs]
        again = sum(info.all_node_runtimes[names[i]] for i in recomputable_node_idxs)
        memory = sum(info.all_node_memories[n] for n in saved)
        peak = self._backward_peak(set(saved), memory) if account_for_backward_pass else memory
        whole, longest = info.get_non_ac_peak_memory(), info.get_theoretical_max_runtime()
        return {
            "peak_memory": peak,
            "recomputation_runtime": again,
            "non_ac_peak_memory": whole,
            "theoretical_max_runtime": longest,
            "percentage_of_theoretical_peak_memory": peak / whole if whole else 0.0,
            "percentage_of_theoretical_peak_runtime": again / longest if longest else 0.0,
        }

    def _backward_peak(self, saved: set[str], current: float) -> float:
        """Most memory while backward walks the candidates from last to first.

        Each is recomputed when its turn comes, with the unsaved ancestors it needs that are not
        there already, and dropped after it.
        """
        graph = self._info.recomputable_node_only_graph_with_larger_graph_context
        memory = self._info.all_node_memories
        order = {n: i for i, n in enumerate(self._info.graph_nodes_in_order)}
        present = set(saved)
        peak = current
        for node in reversed(
            list(nx.lexicographical_topological_sort(graph, key=order.__getitem__))
        ):
            stack = [node]
            while stack:
                missing = stack.pop()
                if missing not in present:
                    present.add(missing)
                    current += memory[missing]
                    stack.extend(graph.predecessors(missing))
            peak = max(peak, current)
            present.discard(node)
            current -= memory[node]
        return peak

    def get_knee_point_memory_budget(
        self,
        knapsack_algo: KnapsackFn | None = None,
        max_mem_budget: float = 0.1,
        min_mem_budget: float = 0.001,
        iterations: int = 100,
    ) -> float:
        """The budget where more memory starts to buy little: nearest to the origin, both axes scaled.

        Args:
            knapsack_algo: a solver to sweep over ``iterations`` budgets; where None, the exact
                frontier is computed in one run and every one of its points is looked at.
            max_mem_budget: the largest budget, returned where the sweep shows no trade-off.
            min_mem_budget: the smallest budget.
            iterations: budgets to try with a solver, 2 or more.
        """
        if knapsack_algo is not None:
            if iterations < 2:
                raise ProblemError(f"iterations is {iterations}; expected 2 or more")
            return super().get_knee_point_memory_budget(
                knapsack_algo, max_mem_budget, min_mem_budget, iterations
            )
        memory, runtime = self._frontier(min_mem_budget, max_mem_budget)
        wide, high = np.ptp(memory), np.ptp(runtime)
        if wide == 0 or high == 0:
            return max_mem_budget
        scores = ((memory - memory.min()) / wide) ** 2 + ((runtime - runtime.min()) / high) ** 2
        return float(memory[int(scores.argmin())])

    def _frontier(self, least: float, most: float) -> tuple[FloatArray, FloatArray]:
        """Memory and recompute runtime of the Pareto-optimal choices within two budgets."""
        memories = self._info.get_knapsack_memory_input()
        runtimes = self._info.get_knapsack_runtime_input()
        problem = problem_from_floats(memories, runtimes, most)
        frontier = knapsack_frontier(problem, most_points=KNEE_POINTS)
        byte = sum(memories) / problem.total_weight if problem.total_weight else 0.0
        tick = sum(runtimes) / problem.total_value if problem.total_value else 0.0
        first = frontier.best_within(int(least / byte)) if byte else 0
        memory = frontier.weights[first:].astype(float) * byte
        runtime = (problem.total_value - frontier.values[first:].astype(float)) * tick
        return memory, runtime
