"""What a knapsack answer is worth on its graph, and where its frontier bends.

Names are those of ``torch/_functorch/_activation_checkpointing/knapsack_evaluator.py``. What differs:
nothing is counted twice when the backward pass is accounted for, and the knee comes from one run over
the whole frontier instead of a hundred solver runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import networkx as nx
import numpy as np
import numpy.typing as npt

from remat.errors import ProblemError
from remat.graph.knapsack_info import GraphInfoProvider
from remat.solvers.float_bridge import problem_from_floats
from remat.solvers.frontier import knapsack_frontier

#: Points that a knee is looked for among; thinning to so many costs about 1e-5 of the value.
KNEE_POINTS = 32_768

FloatArray = npt.NDArray[np.float64]
#: ``(memory, runtimes, max_memory) -> (runtime saved, indices to save, indices to allow recomputing)``
KnapsackFn = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]


class KnapsackEvaluator:
    """Scores answers to the knapsack over the candidates of a graph."""

    def __init__(self, graph_info_provider: GraphInfoProvider) -> None:
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

    def evaluate_distribution_of_results_for_knapsack_algo(
        self, knapsack_algo: KnapsackFn, memory_budget_values: Sequence[float]
    ) -> list[dict[str, float]]:
        """Runs a solver at each budget and scores its answers; each result has ``memory_budget``."""
        memories = self._info.get_knapsack_memory_input()
        runtimes = self._info.get_knapsack_runtime_input()
        results = []
        for budget in memory_budget_values:
            _, saved, again = knapsack_algo(memories, runtimes, budget)
            results.append({**self.evaluate_knapsack_output(saved, again), "memory_budget": budget})
        return results

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
        if knapsack_algo is None:
            budgets, memory, runtime = self._frontier(min_mem_budget, max_mem_budget)
        else:
            if iterations < 2:
                raise ProblemError(f"iterations is {iterations}; expected 2 or more")
            step = (max_mem_budget - min_mem_budget) / (iterations - 1)
            results = self.evaluate_distribution_of_results_for_knapsack_algo(
                knapsack_algo, [min_mem_budget + i * step for i in range(iterations)]
            )
            budgets = np.array([r["memory_budget"] for r in results])
            memory = np.array([r["peak_memory"] for r in results])
            runtime = np.array([r["recomputation_runtime"] for r in results])
        wide, high = np.ptp(memory), np.ptp(runtime)
        if wide == 0 or high == 0:
            return max_mem_budget
        scores = ((memory - memory.min()) / wide) ** 2 + ((runtime - runtime.min()) / high) ** 2
        return float(budgets[int(scores.argmin())])

    def _frontier(self, least: float, most: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Budget, memory and recompute runtime of the Pareto-optimal choices within two budgets."""
        memories = self._info.get_knapsack_memory_input()
        runtimes = self._info.get_knapsack_runtime_input()
        problem = problem_from_floats(memories, runtimes, most)
        frontier = knapsack_frontier(problem, most_points=KNEE_POINTS)
        byte = sum(memories) / problem.total_weight if problem.total_weight else 0.0
        tick = sum(runtimes) / problem.total_value if problem.total_value else 0.0
        first = frontier.best_within(int(least / byte)) if byte else 0
        memory = frontier.weights[first:].astype(float) * byte
        runtime = (problem.total_value - frontier.values[first:].astype(float)) * tick
        return memory, memory, runtime
