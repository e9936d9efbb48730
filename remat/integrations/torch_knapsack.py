"""Use a remat solver as the knapsack solver of PyTorch's own partitioner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from remat import torch_compat
from remat.graph.costs import count_flops
from remat.plugins.identity import identity
from remat.plugins.registry import registry
from remat.units import bytes_of_share
from remat.version import __version__

if TYPE_CHECKING:
    from remat.solvers.base import Solver


class TorchSolver(torch_compat.CustomKnapsackSolver):
    """Adapter through which PyTorch's partitioner calls a remat solver.

    An instance can be the value of PyTorch's option ``torch._functorch.config.activation_memory_budget_solver``.

    Args:
        solver: the solver to call.
    """

    def __init__(self, solver: Solver) -> None:
        from remat.solvers.knapsack.float_bridge import knapsack_fn

        self.solver = solver
        self._solve = knapsack_fn(solver)

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Choose which candidate nodes to save; PyTorch's partitioner calls this method.

        The recompute time of each candidate comes from the estimator that PyTorch is configured
        for.

        Args:
            memory: size of each candidate relative to all activations, as PyTorch computes it.
            joint_graph: the joint graph; not used.
            max_memory: limit on the total size of the saved candidates, in the unit of ``memory``.
            node_info: PyTorch's classification of nodes; not used.
            all_recomputable_banned_nodes: the candidates, in the order of ``memory``.

        Returns:
            Two lists of positions in ``memory``: the candidates to save, and the candidates to
            recompute.
        """
        runtimes = [_runtime(n) for n in all_recomputable_banned_nodes]
        sizes, capacity = _in_bytes(memory, max_memory, all_recomputable_banned_nodes)
        _, saved, recomputed = self._solve(sizes, runtimes, capacity)
        return saved, recomputed

    def uuid(self) -> str:
        """Return a text that identifies the solver and remat's version in PyTorch's cache keys."""
        return f"remat-{__version__}-solver-{identity(self.solver)}"


def _in_bytes(
    memory: list[float], max_memory: float, nodes: list[fx.Node]
) -> tuple[Sequence[float], float]:
    """Convert the capacity and the sizes of candidates, which PyTorch gives as fractions, to bytes if possible."""
    # PyTorch divides each size by the total bytes of activations. It computes this total as the difference of two
    # sums with the inputs, so large inputs cause a large rounding error. The nodes have the exact sizes.
    sizes = [torch_compat.size_of(n) for n in nodes]
    # ``span`` is the total bytes. The largest candidate gives it with the smallest relative rounding error.
    largest = max(zip(sizes, memory, strict=False), default=(0, 0.0))
    if len(sizes) != len(memory) or not (largest[1] > 0 and 0 <= max_memory <= 1):
        return memory, max_memory
    span = round(largest[0] / largest[1])
    if any(round(m * span) != size for m, size in zip(memory, sizes, strict=True)):
        return memory, max_memory
    return sizes, bytes_of_share(max_memory, span)


def _runtime(node: fx.Node) -> float:
    """Return a candidate's runtime from the estimator that PyTorch is configured for."""
    # PyTorch counts FLOPs by running the operator on uninitialised arguments, which fails for operators that take
    # indices. Formulas do not run the operator.
    if torch_compat.functorch_config.activation_memory_budget_runtime_estimator == "flops":
        return float(max(1, count_flops(node)))  # at least 1, as PyTorch's estimator gives
    return float(torch_compat.estimate_runtime(node))


def torch_solver(name: str | Solver) -> TorchSolver:
    """Build an adapter for ``torch._functorch.config.activation_memory_budget_solver``.

    Args:
        name: a registered name, ``"module:Class"``, or a `remat.Solver` instance.

    Raises:
        SolverError: the solver is unknown or cannot run here.
    """
    torch_compat.check_version()
    return TorchSolver(registry().solver(name))
