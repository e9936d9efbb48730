"""The partitioner that AOTAutograd or Inductor calls in place of PyTorch's own partitioner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import fx

from remat import torch_compat
from remat.arguments import BUDGET, COST, SOLVER, passes_on
from remat.graph.joint import JointGraph, primals_of
from remat.graph.memory.user_mutations import copy_outputs, unversioned_outputs
from remat.integrations.partition_options import PartitionOptions
from remat.integrations.stages import Arrived
from remat.integrations.step_sizes import at_declared_sizes
from remat.integrations.traced_graph import joint_of
from remat.options import CompileOptions, CostOption, SolverOption
from remat.passes.core.base import Pass
from remat.planning.context import GraphContext
from remat.planning.pipelines import with_copies
from remat.planning.plan import Plan
from remat.planning.planner import Planner, plan_graph
from remat.planning.request import PlanRequest
from remat.planning.search.proposals import search_of
from remat.units import AnyBudget


class Partitioner(PartitionOptions, torch_compat.CustomPartitionerFn):
    """Partition joint graphs into forward and backward under a memory budget.

    An instance is a ``partition_fn`` for ``aot_autograd`` and a ``custom_partitioner_fn`` for
    Inductor. If nothing in a joint graph is differentiable, the forward graph is the user's graph,
    as with PyTorch's own partitioner.
    """

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **convention: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph into forward and backward graph.

        AOTAutograd calls this method, with the signature of
        `torch._inductor.custom_graph_pass.CustomPartitionerFn`.

        Args:
            gm: the joint graph; it is changed, as by PyTorch's own partitioner.
            joint_inputs: example inputs; empty for a nested region, which is partitioned without a
                budget.
            convention: ``num_fwd_outputs`` and ``static_lifetime_input_indices``, as AOTAutograd
                gives them. Other arguments are ignored.

        Returns:
            The forward graph and the backward graph.
        """
        arrived = Arrived(options=self, earlier=frozenset(self.graphs.planned))
        joint = joint_of(gm, self.lower, **convention)
        primals = [node.meta.get("val") for node in primals_of(joint)]
        with at_declared_sizes(primals, in_bytes=self.in_bytes):
            planned, modules = arrived.partition(joint, joint_inputs, _plan_standalone)
            if planned is not None:
                planned.finish(primals)
        self.graphs.latest = None if planned is None else planned.plan
        return modules

    def uuid(self) -> str:
        """Return a cache key that depends on all options, remat's code, and declared operators."""
        return self.key()


class PartitionerOptions(CompileOptions, total=False):
    """Options that `remat.partitioner` takes by keyword."""

    rank_wait_s: float | None
    repro: str | Path | bool | None
    strict: bool


@passes_on(PartitionerOptions.__annotations__, Partitioner.__init__)
def partitioner(
    budget: AnyBudget = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    **options: Unpack[PartitionerOptions],
) -> Partitioner:
    """Build a partitioner for AOTAutograd or Inductor.

    The returned partitioner is passed as ``aot_autograd(partition_fn=…)``, or to Inductor as its option
    ``custom_partitioner_fn``.

    Args:
        budget: as in `remat.backend`.
        solver: as in `remat.backend`.
        cost: as in `remat.backend`.
        time_limit: as in `remat.backend`.
        options: as in `remat.backend`, but not those of Inductor, nor ``lower``, ``exact_branches``
            and ``check``.

    Raises:
        RematError: an option is invalid. `partitioner` raises the error, not the first compilation.
    """
    return Partitioner(budget=budget, solver=solver, cost=cost, time_limit=time_limit, **options)


def _plan_standalone(joint: JointGraph, request: PlanRequest, *, agree: Pass | None) -> Plan:
    """Plan a joint graph in place if the user calls AOTAutograd directly, without the backend's checks at run time."""
    # Autograd does not detect writes to some outputs, such as views. Backward must not read such an output after
    # the user has written to it. A saved plan is applied unchanged.
    places = unversioned_outputs(joint) if request.plan is None else ()
    if not places:
        return plan_graph(joint, request, in_place=True, agree=agree)
    if request.pipeline is not None:
        return _by_pipeline(joint, request, agree, places)
    planner = Planner.of(joint, request, in_place=True, on_demand=True)
    decided = planner.decide(request.budget)
    reread = planner.reread_outputs(decided)
    copied = tuple(k for k in places if k in reread)
    if copied:
        # The user gets copies of outputs that backward reads, which changes the saved bytes, so planning is repeated.
        context = planner.context
        state = with_copies(context.state, copied)
        again = GraphContext(state, context.request, fingerprint=context.fingerprint)
        planner = Planner(search_of(again))
        decided = planner.decide(request.budget)
    return planner.plan(decided, agree, copied)


def _by_pipeline(
    joint: JointGraph, request: PlanRequest, agree: Pass | None, places: tuple[int, ...]
) -> Plan:
    """Plan a joint graph with a pipeline, and make the step return copies of the outputs that backward reads."""
    # Only a trial run of the whole pipeline shows which outputs backward reads.
    trial = plan_graph(joint, request)
    copied = tuple(k for k in places if k in trial.reread_outputs)
    if not copied and agree is None:
        return trial
    fingerprint = joint.fingerprint
    copy_outputs(joint, copied)
    plan = plan_graph(joint, request, in_place=True, agree=agree)
    return replace(plan, fingerprint=fingerprint, copied_outputs=copied)
