"""Evaluate knapsack solutions on a joint graph, and find the knee of the graph's Pareto frontier.

Candidates are the nodes that may be saved or recomputed. A knapsack solution saves some of the candidates and
recomputes the others. The classes in this file replace the classes of PyTorch's
``torch/_functorch/_activation_checkpointing``, with four differences. All derived graphs keep the order of the nodes,
so results do not depend on hash seeds. In the graph that has only the candidates, an edge stands for a path on which
no other candidate lies. The memory of the backward pass includes each candidate only once. The knee comes from one
run that computes the whole frontier, instead of a hundred solver runs.
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
from remat.solvers.knapsack.float_bridge import problem_from_floats
from remat.solvers.knapsack.frontier import knapsack_frontier

#: Largest number of frontier points that are searched for the knee. Dropping the other points changes the saved
#: runtime by about 1e-5 of its value.
KNEE_POINTS = 32_768

FloatArray = npt.NDArray[np.float64]
#: Signature of a knapsack solver, as in PyTorch:
#: ``(memory, runtimes, max_memory) -> (runtime saved, indices to save, indices to allow recomputing)``
KnapsackFn = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]


class GraphInfoProvider(torch_compat.GraphInfoProvider):
    """A joint graph with the memory and runtime of each candidate for recomputation.

    Args:
        graph_nodes_in_order: names of all nodes.
        graph_edges: (producer, user) pairs of node names.
        all_recomputable_banned_nodes: names of the candidates. A knapsack solution saves some of
            them and recomputes the others.
        all_node_runtimes: runtime by candidate name, in any unit. None: use
            ``recorded_knapsack_input_runtimes``.
        all_node_memories: memory by candidate name, in any unit. None: use
            ``recorded_knapsack_input_memories``.
        recorded_knapsack_input_memories: memories in the order of the candidates.
        recorded_knapsack_input_runtimes: runtimes in the order of the candidates.
        joint_graph: the FX graph, stored for callers and not read here.

    Raises:
        ProblemError: memories or runtimes are missing for a candidate, or a name is not in
            ``graph_nodes_in_order``.
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
        node_names = set(graph_nodes_in_order)
        for name in [*all_recomputable_banned_nodes, *(n for e in graph_edges for n in e)]:
            if name not in node_names:
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

    @cached_property
    def recomputable_node_only_graph_with_larger_graph_context(self) -> nx.DiGraph:
        """Directed graph of the candidates; paths through other nodes are contracted to edges."""
        nx_graph = self.full_joint_nx_graph
        candidates = set(self.all_recomputable_banned_nodes)
        graph = nx.DiGraph()
        graph.add_nodes_from(self.all_recomputable_banned_nodes)
        for start in self.all_recomputable_banned_nodes:
            stack, seen = list(nx_graph.successors(start)), set()
            while stack:
                node = stack.pop()
                if node in seen:
                    continue
                seen.add(node)
                if node in candidates:
                    graph.add_edge(start, node)
                else:
                    stack.extend(nx_graph.successors(node))
        return graph

    def get_non_ac_peak_memory(self) -> float:
        """Return the memory of all candidates together, needed if every candidate is saved."""
        return sum(self.get_knapsack_memory_input())

    def get_theoretical_max_runtime(self) -> float:
        """Return the runtime of all candidates together, needed if every candidate is rerun."""
        return sum(self.get_knapsack_runtime_input())


def _by_name(
    candidates: Sequence[str],
    kind: str,
    given: Mapping[str, float] | None,
    recorded: Sequence[float] | None,
) -> dict[str, float]:
    """Return memories or runtimes by candidate name, from a dict by name or from a list in candidate order."""
    if given is None and recorded is not None and len(recorded) == len(candidates):
        return dict(zip(candidates, recorded, strict=True))
    missing = [n for n in candidates if n not in (given or {})]
    if given is None or missing:
        raise ProblemError(
            f"give all_node_{kind}, or recorded_knapsack_input_{kind}, with one entry for each of "
            f"the {len(candidates)} candidates; there is none for {missing[:5]}"
        )
    return dict(given)


class KnapsackEvaluator(torch_compat.KnapsackEvaluator):
    """Computes the memory and the runtime of knapsack solutions.

    A solution decides which candidates of a graph are saved and which are recomputed.
    """

    def __init__(self, graph_info_provider: GraphInfoProvider) -> None:
        super().__init__(graph_info_provider)
        self._info = graph_info_provider

    def evaluate_knapsack_output(
        self,
        saved_nodes_idxs: Sequence[int],
        recomputable_node_idxs: Sequence[int],
        account_for_backward_pass: bool = False,
    ) -> dict[str, float]:
        """Return the memory and the recomputation time of one knapsack solution.

        Args:
            saved_nodes_idxs: indices of the candidates that are saved.
            recomputable_node_idxs: indices of all other candidates.
            account_for_backward_pass: whether the peak includes candidates that are recomputed during
                backward. If False, the peak is the memory of the saved candidates.

        Returns:
            A dict of six numbers, with PyTorch's names as keys.

        Raises:
            ProblemError: a candidate is in both lists or in neither list, or an index does not
                exist.
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
        all_memory, all_runtime = info.get_non_ac_peak_memory(), info.get_theoretical_max_runtime()
        return {
            "peak_memory": peak,
            "recomputation_runtime": again,
            "non_ac_peak_memory": all_memory,
            "theoretical_max_runtime": all_runtime,
            "percentage_of_theoretical_peak_memory": peak / all_memory if all_memory else 0.0,
            "percentage_of_theoretical_peak_runtime": again / all_runtime if all_runtime else 0.0,
        }

    def _backward_peak(self, saved: set[str], current: float) -> float:
        """Return the peak memory of backward, which visits the candidates from last to first."""
        graph = self._info.recomputable_node_only_graph_with_larger_graph_context
        memory = self._info.all_node_memories
        order = {n: i for i, n in enumerate(self._info.graph_nodes_in_order)}
        present = set(saved)
        peak = current
        # Graph order breaks ties, so the peak does not depend on hash seeds.
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
            # Once backward has visited a candidate, its value is dropped, even if it was saved.
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
        """Return the budget at the knee, where more memory starts to save little runtime.

        The knee is the point of the Pareto frontier of memory and recomputation runtime that is
        nearest to the origin. For the distance to the origin, memory and runtime are each scaled to
        the range from 0 to 1.

        Args:
            knapsack_algo: solver to run on ``iterations`` budgets. None: compute the exact frontier
                in one run and examine all its points.
            max_mem_budget: the largest budget, in the unit of the knapsack's memories; returned if
                the frontier shows no trade-off.
            min_mem_budget: the smallest budget, in the same unit.
            iterations: number of budgets for which the solver runs, at least 2.

        Raises:
            ProblemError: ``iterations`` is below 2 and a solver is given.
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
        """Return memory and recomputation runtime of the points of the Pareto frontier between two budgets."""
        memories = self._info.get_knapsack_memory_input()
        runtimes = self._info.get_knapsack_runtime_input()
        problem = problem_from_floats(memories, runtimes, most)
        frontier = knapsack_frontier(problem, most_points=KNEE_POINTS)
        # The problem has integer weights and values. These factors convert the integers back to the units of
        # memories and runtimes.
        byte = sum(memories) / problem.total_weight if problem.total_weight else 0.0
        tick = sum(runtimes) / problem.total_value if problem.total_value else 0.0
        first = frontier.best_within(int(least / byte)) if byte else 0
        memory = frontier.weights[first:].astype(float) * byte
        runtime = (problem.total_value - frontier.values[first:].astype(float)) * tick
        return memory, runtime
