"""A remat solver as the knapsack solver of PyTorch's own partitioner."""

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
    """A remat solver as PyTorch's ``activation_memory_budget_solver``."""

    def __init__(self, solver: Solver) -> None:
        from remat.solvers.float_bridge import knapsack_fn

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
        """Choose among PyTorch's candidates; runtimes come from PyTorch's estimator."""
        runtimes = [_runtime(n) for n in all_recomputable_banned_nodes]
        sizes, capacity = _in_bytes(memory, max_memory, all_recomputable_banned_nodes)
        _, saved, recomputed = self._solve(sizes, runtimes, capacity)
        return saved, recomputed

    def uuid(self) -> str:
        return f"remat-{__version__}-solver-{identity(self.solver)}"


def _in_bytes(
    memory: list[float], max_memory: float, nodes: list[fx.Node]
) -> tuple[Sequence[float], float]:
    """The memory of PyTorch's candidates and the room for them, in bytes where those can be told.

    PyTorch divides every size by what the activations span, a difference of two large sums, so that
    the shares are off by more the more the inputs weigh beside the activations. What was divided is
    still known; where it does not fit the shares, these are taken as they are.
    """
    sizes = [torch_compat.size_of(n) for n in nodes]
    whole = max(zip(sizes, memory, strict=False), default=(0, 0.0))
    if len(sizes) != len(memory) or not (whole[1] > 0 and 0 <= max_memory <= 1):
        return memory, max_memory
    span = round(whole[0] / whole[1])
    if any(round(m * span) != size for m, size in zip(memory, sizes, strict=True)):
        return memory, max_memory
    return sizes, bytes_of_share(max_memory, span)


def _runtime(node: fx.Node) -> float:
    """A candidate's runtime by the estimator that PyTorch is configured for.

    PyTorch counts FLOPs by running the operator on uninitialised arguments, which an operator that
    takes indices does not survive; the formulas are asked without running anything.
    """
    from remat.torch_compat import estimate_runtime
    from remat.torch_compat import functorch_config as config

    if config.activation_memory_budget_runtime_estimator == "flops":
        return float(max(1, count_flops(node)))
    return float(estimate_runtime(node))


def torch_solver(name: str | Solver) -> TorchSolver:
    """A registered solver for ``torch._functorch.config.activation_memory_budget_solver``.

    Raises:
        SolverError: the solver is unknown or cannot run here.
    """
    torch_compat.check_version()
    return TorchSolver(registry().solver(name))
