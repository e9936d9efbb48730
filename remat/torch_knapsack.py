"""One of our solvers in the place of the one that PyTorch's own partitioner asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

import remat
from remat import torch_compat
from remat.graph.costs import count_flops
from remat.plugins.identity import identity
from remat.plugins.registry import registry

if TYPE_CHECKING:
    from remat.solvers.base import Solver


class TorchSolver(torch_compat.CustomKnapsackSolver):
    """One of our solvers in the place of PyTorch's ``activation_memory_budget_solver``."""

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
        """Picks among PyTorch's candidates; runtimes come from PyTorch's own estimator."""
        runtimes = [_runtime(n) for n in all_recomputable_banned_nodes]
        _, saved, recomputed = self._solve(memory, runtimes, max_memory)
        return saved, recomputed

    def uuid(self) -> str:
        return f"remat-{remat.__version__}-solver-{identity(self.solver)}"


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
