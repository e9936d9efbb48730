"""PyTorch's four knapsack functions as remat solvers, called as PyTorch's partitioner calls them.

Sizes and room are shares of the total; what comes back is checked like anyone's answer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from remat.solvers import KnapsackProblem, Solver


class TorchKnapsack(Solver):
    """A function of ``torch._functorch._activation_checkpointing.knapsack``."""

    function: ClassVar[str] = ""
    time_limit: ClassVar[bool] = False

    def solve(self, problem: KnapsackProblem, **kwargs: Any) -> list[int]:
        from torch._functorch._activation_checkpointing import knapsack

        total = problem.total_weight or 1
        memory = [weight / total for weight in problem.weights]
        runtimes = [float(value) for value in problem.values]
        room = min(1.0, problem.capacity / total)
        saved: list[int] = getattr(knapsack, self.function)(memory, runtimes, room)[1]
        return saved

    def refuses(self, problem: KnapsackProblem) -> str | None:
        # Imported here, so that in a process of its own the clock does not count it.
        from torch._functorch._activation_checkpointing import knapsack

        return None if hasattr(knapsack, self.function) else f"torch has no {self.function}"


class Greedy(TorchKnapsack):
    name: ClassVar[str] = "torch-greedy"
    function: ClassVar[str] = "greedy_knapsack"


class Ilp(TorchKnapsack):
    name: ClassVar[str] = "torch-ilp"
    function: ClassVar[str] = "ilp_knapsack"


class Dp(TorchKnapsack):
    name: ClassVar[str] = "torch-dp"
    function: ClassVar[str] = "dp_knapsack"


class Hirschberg(TorchKnapsack):
    name: ClassVar[str] = "torch-hirschberg"
    function: ClassVar[str] = "dp_knapsack_sliding_hirschberg"


FROM_TORCH: tuple[type[TorchKnapsack], ...] = (Greedy, Ilp, Dp, Hirschberg)
