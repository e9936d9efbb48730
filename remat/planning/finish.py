"""Build a plan from a split graph: compute the plan's bytes and costs, and verify the forward and backward modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from remat.errors import BudgetError
from remat.graph.collection import paused_collection
from remat.graph.costs import CostModel
from remat.graph.joint import outputs_of
from remat.graph.memory.liveness import saved_storages
from remat.graph.memory.storages import has_symbols, planned_sizes
from remat.graph.memory.user_mutations import reread_outputs
from remat.graph.policies import read_policies
from remat.graph.problems.lowering import SavedKind
from remat.graph.verify import Split, verify
from remat.passes.core.provenance import Provenance, SavedLimits
from remat.passes.core.state import Costs, State
from remat.passes.decide.policies import check_budgets
from remat.planning.context import Baseline
from remat.planning.pipelines import (
    modules_of,
    step_costs_of,
)
from remat.planning.plan import Plan
from remat.planning.search.measures import curve_of
from remat.planning.search.offload_costs import check_tagged
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.problem import evaluate
from remat.units import Budget, format_bytes
from remat.version import __version__


@paused_collection()
def finish(
    state: State,
    *,
    cost: CostModel,
    budget: Budget,
    fingerprint: str,
    baseline: Baseline | None = None,
    later: Callable[[], Mapping[str, Any]] | None = None,
    link: str = "",
    host_bytes: int | None = None,
    exposed_time: int = 0,
    peak_limit: int = 0,
    search: str = "",
    copied_outputs: tuple[int, ...] = (),
) -> Plan:
    """Build a plan from a split graph: compute the plan's bytes and costs, and verify the forward and backward modules.

    Args:
        state: the graph, split into forward and backward modules by its decision.
        cost: the cost model.
        budget: the requested budget.
        fingerprint: digest of the joint graph as it was captured.
        baseline: peak and cost of the step without remat; None: unknown, or computed by ``later``.
        later: function that computes the plan fields in `LATER` when one is first read; None: `finish` computes
            these fields.
        link: the link to the host if values may be offloaded, or empty text.
        host_bytes: bytes that offloaded values may take in the host's memory; None: no limit.
        exposed_time: time that the step waits for copies to and from the host, in the unit of the cost model.
        peak_limit: the peak in bytes that a ratio of the peak stands for; 0 under any other budget.
        search: under a budget on the peak, text that states why the decision was chosen.
        copied_outputs: positions of the outputs that the step returns as copies.

    Raises:
        BudgetError: the decision offloads more than ``host_bytes`` bytes.
        PlanError: the split graphs break a rule of the verifier, or a value that must be offloaded is not.
    """
    assert state.decision is not None
    forward, backward = modules_of(state)
    if state.policies:
        check_budgets(state, read_policies(state.policies))
    # The default, "auto", stands for a cost model that the graph selects.
    cost = cost.for_graph(state.joint)
    lowered = state.lowered(cost)
    check_tagged(state, lowered)
    offloaded_bytes = sum(value.host_bytes for value in state.decision.offloads)
    if host_bytes is not None and offloaded_bytes > host_bytes:
        raise BudgetError(
            f"host_memory is {format_bytes(host_bytes)} ({host_bytes} bytes), and this plan for '{state.joint.name}' "
            f"has {format_bytes(offloaded_bytes)} in the host's memory; plan again within it, or raise it to {offloaded_bytes}"
        )
    problem = lowered.problem
    saved_bytes = sum(saved_in(state).values())
    limits, provenance = state.limits or SavedLimits(), state.provenance or Provenance()
    capacity = saved_bytes if limits.capacity is None else limits.capacity
    # No decision is trusted, whoever made it: both modules are checked against the joint graph.
    verify(
        Split(
            joint=state.joint,
            forward=forward,
            backward=backward,
            capacity=capacity,
            count_outputs=state.count_outputs,
            user_mutated=frozenset() if state.reread_inputs else state.user_mutable,
        )
    )
    # Passes have edited the graphs, and fx generates the code of a module only on request.
    forward.recompile()
    backward.recompile()
    figures: Mapping[str, Any] = {"peak_bytes": 0, "_later": later}
    if later is None:
        figures = later_figures(
            state,
            curve_of(state).peak_bytes,
            baseline or Baseline(),
            step_costs_of(state, cost),
        )
    # A decision with node orders may also recompute nodes in forward. `evaluate` cannot score such a decision.
    if state.decision.is_ordered:
        saved = state.decision.saved
        recomputed = state.decision.further_runs
        once = state.get(Costs(cost))
        recompute_cost = sum(once[state.index.by_name[name]] for name in recomputed)
    else:
        scored = evaluate(problem, lowered.saved_of(state.decision))
        saved_nodes = (i for i in scored.saved if lowered.kind[i] is SavedKind.VALUE)
        saved = tuple(problem.names[i] for i in saved_nodes)
        again = (i for i in scored.recomputed if problem.in_forward[i])
        recomputed = tuple(problem.names[i] for i in again)
        recompute_cost = scored.recompute_cost
    region = limits.region_budget
    # The hull is cached with the problem, so a planner that has decided does not compute it again.
    hull = Hull.of(problem)
    # Under a budget on the peak, saved bytes are not limited, so the bound must hold for any number of them.
    most = max(capacity, hull.ends[1].saved_bytes) if budget.on_peak else capacity
    priced = [state.index.nodes[i] for i in dict.fromkeys(lowered.position)]
    return Plan(
        saved=saved,
        snapshots=state.decision.snapshots,
        recomputed=recomputed,
        saved_bytes=saved_bytes,
        recompute_cost=recompute_cost,
        recompute_bound=min(
            recompute_cost + exposed_time,
            max(provenance.recompute_bound, hull.edge(most).bound(most)),
        ),
        unit=problem.unit,
        capacity=capacity,
        full_bytes=limits.full_bytes if limits.full_bytes is not None else saved_bytes,
        least_bytes=limits.least_bytes if limits.least_bytes is not None else 0,
        budget=str(budget),
        solver=provenance.solver,
        cost=str(cost),
        items=provenance.items,
        deterministic=provenance.deterministic,
        solve_s=provenance.elapsed_s,
        graph=state.joint.name,
        fingerprint=fingerprint,
        fallbacks=tuple(cost.fallbacks(priced)),
        reread_inputs=state.reread_inputs,
        reread=tuple(name for name in saved if state.reread_inputs and name in state.user_mutable),
        symbolic=has_symbols(state.index.values),
        reread_outputs=reread_outputs(
            state.joint, outputs_of(forward.graph)[state.joint.num_fwd_outputs :]
        ),
        lower=state.joint.lower,
        torch=torch.__version__,
        remat=__version__,
        region_budget="" if region is None else str(Budget(share=region)),
        least_because=limits.least_because,
        operators=state.operators,
        forward_order=state.decision.forward_order,
        backward_order=state.decision.backward_order,
        offloads=state.decision.offloads,
        exposed_time=exposed_time,
        peak_limit=peak_limit,
        link=link,
        policies=state.policies,
        chunk=state.chunk,
        search=search,
        copied_outputs=copied_outputs,
        _requested=budget,
        _modules=(forward, backward),
        _problem=problem,
        _learns=has_symbols(state.index.values, learned=True),
        _sizes=planned_sizes(),
        **figures,
    )


def later_figures(
    state: State, peak_bytes: int, baseline: Baseline, costs: Sequence[int]
) -> dict[str, Any]:
    """Return a dict of the plan fields that may be computed late (see `LATER`), from the peak and each run's cost."""
    return {
        "peak_bytes": peak_bytes,
        "step_cost": sum(costs),
        "without_peak_bytes": baseline.peak_bytes,
        "without_cost": baseline.cost,
        "without_estimated_bytes": baseline.estimated_bytes,
        "_costs": {n.name: c for n, c in zip(state.index.nodes, costs, strict=False)},
        "_without": baseline.curve,
    }


def saved_in(state: State) -> dict[int, int]:
    """Return the bytes of each storage that forward saves for backward, as a dict from the storage's key to bytes."""
    return saved_storages(
        modules_of(state)[0],
        state.joint.num_fwd_outputs,
        count_outputs=state.count_outputs,
        memories=state.joint.memories,
    )
