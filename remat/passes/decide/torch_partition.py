"""The decision that PyTorch's own partitioner would take, for comparison with ours."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from remat import torch_compat
from remat.errors import BudgetError, ProblemError
from remat.graph.joint import Role, role_of
from remat.graph.lowering import Lowered, SavedKind
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.state import State
from remat.passes.decide.budgeted import Budgeted
from remat.solvers.graph_problem import Evaluation, evaluate
from remat.solvers.solution import GraphSolution, Status

#: Ratios that PyTorch's partitioner is asked about, at most.
_TRIES = 6
#: A share of the budget that may be left unused.
_NEAR = 0.01


@dataclass(frozen=True)
class TorchPartition(Budgeted):
    """What PyTorch's partitioner saves at the largest ratio found whose bytes are within the budget.

    PyTorch counts a ratio (``torch._functorch.config.activation_memory_budget``) and may overshoot it, so several
    are tried. Only which values it saves is taken over: what is random is still drawn once, and the two halves
    are ours.
    """

    name: ClassVar[str] = "torch-partition"
    summary: ClassVar[str] = "save what PyTorch's own partitioner saves within a budget"

    def decide(self, state: State, limits: DecisionInfo) -> tuple[GraphSolution, DecisionInfo]:
        """What PyTorch saves within ``limits.capacity`` bytes.

        Raises:
            BudgetError: no ratio that was tried comes to that few bytes, or to a decision that is allowed here.
        """
        start = time.perf_counter()
        lowered = state.lowered(self.cost)
        capacity, full = limits.capacity or 0, limits.full_bytes or 0
        low, high = 0.0, 1.0
        ratio = min(1.0, capacity / full) if full else 1.0
        best: Evaluation | None = None
        for _ in range(_TRIES):
            found = self._at(ratio, state, lowered)
            fits = found is not None and found.saved_bytes <= capacity
            if (
                found is not None
                and fits
                and (best is None or found.saved_bytes > best.saved_bytes)
            ):
                best = found
            low, high = (ratio, high) if fits else (low, ratio)
            if best and (high - low < _NEAR or capacity - best.saved_bytes <= _NEAR * capacity):
                break
            if fits and ratio == 1.0:
                break
            ratio = (low + high) / 2
        if best is None:  # at 0 it saves inputs alone
            least = self._at(0.0, state, lowered)
            best = least if least is not None and least.saved_bytes <= capacity else None
        if best is None:
            raise BudgetError(
                f"PyTorch's partitioner was asked at {_TRIES + 1} ratios and saves more than {capacity} bytes at "
                "each, or what is random twice; raise the budget, or use another pass to decide, for example "
                "'solve-graph'"
            )
        solution = GraphSolution(
            saved=best.saved,
            cost=best.recompute_cost,
            saved_bytes=best.saved_bytes,
            bound=0,
            status=Status.FEASIBLE,
            solver=self.name,
            elapsed_s=time.perf_counter() - start,
        )
        return solution, replace(
            limits, solver=self.name, items=len(lowered.problem), elapsed_s=solution.elapsed_s
        )

    def _at(self, ratio: float, state: State, lowered: Lowered) -> Evaluation | None:
        """What PyTorch saves at a ratio, scored here; None where our rules do not allow it."""
        saved = _saved_names(state, ratio)
        problem, storages = lowered.problem, state.storages
        chosen = {i for i, k in enumerate(lowered.kind) if k is SavedKind.GENERATOR_STATE}
        for at in (state.index.by_name[name] for name in saved):
            # A view that is saved keeps the memory of what it is a view of.
            places = (lowered.of_position[storages.owner[at]], lowered.of_position[at])
            chosen.update([i for i in places if i >= 0 and problem.savable[i]][:1])
        try:
            return evaluate(problem, chosen)
        except ProblemError:
            return None


def _saved_names(state: State, ratio: float) -> Iterable[str]:
    """Names of what PyTorch's forward hands to its backward, inputs of the step included."""
    joint = state.joint.copy()  # it is taken apart
    settings = {"activation_memory_budget": ratio}
    with torch_compat.functorch_config.patch(settings):
        _, backward = torch_compat.min_cut_rematerialization_partition(
            joint.graph_module,
            [],
            num_fwd_outputs=joint.num_fwd_outputs,
            static_lifetime_input_indices=list(joint.static_inputs),
        )
    given = backward.graph.find_nodes(op="placeholder")
    return [n.name for n in given if role_of(n) in (Role.PRIMAL, Role.FORWARD_SEED)]
