"""Plan a joint graph: find a decision for a request, and build a plan from the decision.

`docs/architecture.md` lists the source files that take part in planning. Once a graph is split into a forward and a
backward module, the function `finish` computes the plan's bytes and costs, and verifies both modules.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, Self

from remat.errors import BudgetError, BudgetWarning, PeakWarning, PlanError, RematError, warn
from remat.graph.collection import paused_collection
from remat.graph.costs import Roofline
from remat.graph.joint import JointGraph
from remat.graph.memory.storages import has_symbols
from remat.graph.memory.user_mutations import reread_outputs
from remat.graph.policies import Policies, read_policies
from remat.passes.core.base import Pass
from remat.passes.core.provenance import Provenance, SavedLimits
from remat.passes.core.state import State
from remat.passes.decide.budgeted import Budgeted
from remat.passes.decide.min_cut import require_tangents
from remat.passes.decide.policies import has_policies, tag_policies
from remat.passes.joint.chunk_loss import read_chunk
from remat.planning.context import Baseline, GraphContext, fingerprint_of
from remat.planning.finish import finish, later_figures, saved_in
from remat.planning.pipelines import (
    PassManager,
    count_workspaces,
    initial_state,
    prepare,
    split,
    with_agreement,
    with_copies,
)
from remat.planning.plan import Plan
from remat.planning.plan_apply import check_applied, exposed_time
from remat.planning.request import PlanRequest
from remat.planning.search.candidates import Candidate
from remat.planning.search.compiled import CompiledSearch
from remat.planning.search.effort import DEFAULT
from remat.planning.search.measures import Measures, curve_of
from remat.planning.search.peak_bounds import peak_bounds
from remat.planning.search.proposals import search_of
from remat.planning.search.search import Search
from remat.plugins.registry import registry
from remat.report.before_after import BeforeAfter
from remat.running.workspace import measure_deferred
from remat.solvers.kernel import missing
from remat.units import Budget, counted, format_bytes


def plan_graph(
    joint: JointGraph,
    request: PlanRequest,
    *,
    in_place: bool = False,
    agree: Pass | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan one joint graph: apply the request's saved plan, run the user's pipeline, or search for a decision.

    Args:
        joint: the captured step.
        request: the options.
        in_place: whether to change ``joint`` itself instead of a copy.
        agree: a pass that may change the decision before the split, such as a pass that makes all ranks decide
            alike; None: no such pass.
        on_progress: called with a line of text before each stage of deciding.

    Raises:
        BudgetError: no plan is within the budget.
        PlanError: nothing requires a gradient, tags conflict, the saved plan is for another graph, or the
            split graphs break a rule of the verifier.
        PassError: a pass of the pipeline failed.
        SolverError: the solver refuses the problem, raises an error, or answers wrongly.
    """
    fingerprint = fingerprint_of(joint)
    request = request.for_graph(joint, fingerprint)
    if isinstance(request.plan, Plan):
        return _apply(joint, request.plan, request, in_place=in_place)
    if request.pipeline is None:
        planner = Planner.of(
            joint,
            request,
            fingerprint=fingerprint,
            in_place=in_place,
            on_progress=on_progress,
            at_budget=True,
            on_demand=True,
        )
        return planner.plan(planner.decide(request.budget), agree)
    pipeline = request.pipeline if agree is None else with_agreement(request.pipeline, agree)
    state = initial_state(
        joint,
        in_place=in_place,
        count_outputs=request.count_outputs,
        reread_inputs=request.reread_inputs,
    )
    require_tangents(state)
    # The option `policies` is refused beside a pipeline, so only regions in the user's code can have policies.
    if has_policies(state, request.policies):
        tag_policies(state, request.policies)
    budgeted = [p for p in pipeline.flat() if isinstance(p, Budgeted)]
    # Each deciding pass replaces the decision of the pass before, so the plan records the last one's options.
    cost = budgeted[-1].cost if budgeted else Roofline()
    count_workspaces(state, cost.for_graph(state.joint))
    return finish(
        pipeline.run(state, in_place=True).state,
        cost=cost,
        budget=budgeted[-1].budget if budgeted else Budget(share=1.0),
        fingerprint=fingerprint,
    )


def _apply(joint: JointGraph, plan: Plan, request: PlanRequest, *, in_place: bool) -> Plan:
    """Split a joint graph as its saved plan says; return the plan with bytes and costs computed on this graph."""
    if plan.reread_inputs and not request.reread_inputs:
        raise PlanError(
            f"this plan for '{plan.graph}' may read inputs again in backward, but reread_inputs is "
            "False; plan again with remat.plan(joint, …, reread_inputs=False): the saved plan carries "
            "the option"
        )
    if plan.offloads and request.hooks is not None:
        raise PlanError(
            f"this plan for '{plan.graph}' offloads {len(plan.offloads)} values, but hooks={request.hooks.name!r} "
            "would pack their copies in the host's memory; leave hooks out, or plan again without offload"
        )
    if request.policies and str(request.policies) != plan.policies:
        raise PlanError(
            f"this plan for '{plan.graph}' was made under the policies {plan.policies or '{}'}, and "
            f"{request.policies} are given; plan again, or leave policies out: the saved plan carries them"
        )
    chunk = read_chunk(plan.chunk)
    if request.chunk not in (None, "auto", chunk):
        raise PlanError(
            f"this plan for '{plan.graph}' was made with {plan.chunk or 'no chunks of the loss'}, and {request.chunk} "
            "is given; plan again, or leave chunk out: the saved plan carries it"
        )
    prepared = prepare(
        joint,
        in_place=in_place,
        hooks=request.hooks,
        reread_inputs=plan.reread_inputs,
        policies=read_policies(plan.policies),
        chunk=chunk,
    )
    # The plan names the copies among the nodes that it saves, so they must exist before the split.
    if plan.copied_outputs:
        prepared = with_copies(prepared, plan.copied_outputs)
    request = replace(request, cost=registry().cost_model(plan.cost).for_graph(prepared.joint))
    count_workspaces(prepared, request.cost)
    limits = SavedLimits(
        capacity=plan.capacity,
        full_bytes=plan.full_bytes,
        least_bytes=plan.least_bytes,
        region_budget=Budget.parse(plan.region_budget).share if plan.region_budget else None,
        least_because=plan.least_because,
    )
    exposed_ps = exposed_time(prepared, plan, request)
    provenance = Provenance(solver=plan.solver, items=plan.items, deterministic=plan.deterministic)
    state = split(replace(prepared, decision=plan.decision, limits=limits, provenance=provenance))
    if has_symbols(state.index.values):
        # The capacity was computed for other symbolic sizes. At the present sizes, the plan may save more bytes.
        saved_bytes = sum(saved_in(state).values())
        state = replace(state, limits=replace(limits, capacity=max(plan.capacity, saved_bytes)))
    applied = finish(
        state,
        cost=request.cost,
        budget=plan.requested,
        fingerprint=plan.fingerprint,
        baseline=Baseline(
            peak_bytes=plan.without_peak_bytes,
            estimated_bytes=plan.without_estimated_bytes,
            cost=plan.without_cost,
        ),
        link=plan.link,
        host_bytes=request.host_memory,
        exposed_time=exposed_ps,
        peak_limit=plan.peak_limit,
    )
    applied = replace(applied, copied_outputs=plan.copied_outputs)
    check_applied(plan, applied, alone=not request.of_several)
    return applied


def warn_of_peak(plan: Plan, figures: BeforeAfter | None = None) -> None:
    """Warn if a plan under a budget on saved bytes hardly lowers the peak of the step.

    `remat.report.before_after.BeforeAfter.is_lower` defines when a plan lowers the peak enough.

    Args:
        plan: a finished plan.
        figures: the plan's comparison with the step without remat; None: `PlanRecord.before_after` of the plan.
    """
    if plan.requested.on_peak or plan.capacity >= plan.full_bytes:
        return
    figures = figures or plan.before_after
    if not figures.without_peak_bytes:
        return
    # Estimates of compiled peaks take time. They are not needed if the simulated peaks differ clearly.
    is_estimated = plan.lower == "inductor"
    if is_estimated and figures.peak_bytes * DEFAULT.lower_surely >= figures.without_peak_bytes:
        figures = replace(
            figures,
            peak_bytes=plan.estimated_peak_bytes,
            without_peak_bytes=plan.without_estimated_bytes,
        )
    subject = f"budget {plan.requested.label} for '{plan.graph}'"
    ratio = plan.capacity / plan.full_bytes
    figures.warn_if_not_lower(subject, ratio, of_graph=True, is_estimated=is_estimated)


@cache
def warn_without_kernel() -> None:
    """Warn once per process if the compiled C++ kernel is missing, without which plans within a peak are worse."""
    if reason := missing():
        warn(
            f"solver 'native' cannot run: {reason}. Without it, plans within a peak may recompute several times as "
            "much, or not be found",
            PeakWarning,
        )


class Planner:
    """Planner of one prepared graph: decides under any number of budgets, and builds plans from decisions.

    Args:
        search: the search for candidates of the graph.
        ends: peaks in bytes that the ratios 0 and 1 of the request's budget stand for. None: the least peak found, and
            the peak of the plan for budget 1.
        baseline: peak and cost of the step without remat; None: computed when first read.
    """

    def __init__(
        self,
        search: Search,
        *,
        ends: tuple[int, int] | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        self.context, self.search = search.context, search
        self._ends, self._baseline = ends, baseline

    @classmethod
    def of(cls, joint: JointGraph, request: PlanRequest, **options: Any) -> Self:
        """Return the planner of a joint graph; with ``chunk="auto"``, also choose the number of chunks of the loss.

        A step whose loss cannot be split is planned without chunks, with a warning. ``options`` are keyword arguments
        of `GraphContext.of`.

        Raises:
            PlanError: the loss cannot be split into the given number of chunks.
        """
        if request.budget.on_peak:
            warn_without_kernel()
        if request.chunk != "auto":
            return cls(search_of(GraphContext.of(joint, request, **options)))
        contexts: list[GraphContext] = []
        try:
            for each in request.each_chunk():
                # The pass that splits the loss edits the graph, so each number of chunks has a copy.
                contexts += [GraphContext.of(joint, each, **{**options, "in_place": False})]
        except PlanError as error:
            if not contexts:
                raise
            warn(f"'{joint.name}' is planned without chunks: {error}", BudgetWarning)
        searches, ends = [*map(search_of, contexts)], None
        unchunked = searches[0]
        if request.budget.peak_share is not None:
            at_budget_one = unchunked.measures.simulated(unchunked.decisions.allowed_at_budget_one)
            ends = min(s.least_found for s in searches), at_budget_one
        baseline = cls(unchunked).baseline
        return cls._cheapest_of([cls(s, ends=ends, baseline=baseline) for s in searches])

    @classmethod
    def _cheapest_of(cls, planners: Sequence[Self]) -> Self:
        """Return the planner whose step is cheapest within the budget, or has the least peak if none is within."""
        budget = planners[0].context.request.budget
        limit = planners[0].limit_of(budget)
        best, least = min(planners, key=lambda p: p.search.least_found), math.inf
        for planner in planners:
            context = planner.context
            # A step costs at least `step_cost`, and its peak is at least `least_found` unless values are offloaded. So
            # steps that cannot be better than the best one, or within the limit, are skipped.
            below = context.request.offload or planner.search.least_found <= limit
            if context.step_cost >= least or not below:
                continue
            with contextlib.suppress(BudgetError):
                candidate = planner.decide(budget)
                cost = context.step_cost + candidate.cost
                best, least = (planner, cost) if cost < least else (best, least)
        return best

    def estimated(self, before: CompiledSearch | None = None) -> CompiledSearch:
        """Return a search for candidates by estimated peak; if ``before`` has an equal graph, reuse its candidates."""
        # If planning chose the number of chunks, the peak ratio 1 stands for the step without chunks.
        most = 0 if self._ends is None else self.baseline.estimated_bytes
        return CompiledSearch(self.search, most, before)

    def limit_of(self, budget: Budget) -> int:
        """Return the peak in bytes that a budget on the peak stands for."""
        ends = self._ends if budget == self.context.request.budget else None
        return self.search.peak_of(budget, ends)

    def decide(self, budget: Budget) -> Candidate:
        """Return the decision within a budget and, if the user's code sets a budget for the graph, within both.

        Raises:
            BudgetError: no decision is within the budget.
            SolverError: the solver refuses the problem, raises an error, or answers wrongly.
        """
        if budget.on_peak:
            started, limit = time.perf_counter(), self.limit_of(budget)
            candidate = self.search.within_peak(limit)
            took = time.perf_counter() - started
            return candidate.with_provenance(elapsed_s=took)
        if not self.context.tagged:
            replace(self.context.request, budget=budget).check("nothing tagged")
            return self._saving(budget)
        with_tagged = self.search.offloads.with_tagged
        if budget.nbytes is not None:
            # The graph problem counts tagged values as saved bytes, although every plan offloads them. So a first try
            # raises the budget by the bytes of tagged values.
            offloaded_bytes = with_tagged(self.search.decisions.at_budget_one).host_bytes
            candidate = with_tagged(self._saving(Budget(nbytes=budget.nbytes + offloaded_bytes)))
            if candidate.saved_bytes <= budget.nbytes:
                return candidate
        return with_tagged(self._saving(budget))

    def _saving(self, budget: Budget) -> Candidate:
        """Return the decision under a budget on saved bytes; values tagged for offloading are not offloaded yet."""
        context, decisions = self.context, self.search.decisions
        limits = replace(context.request.deciding(), budget=budget).limits(context.state)
        if limits.capacity != context.full_bytes:
            return decisions.search_within(limits)
        return replace(decisions.at_budget_one, limits=limits)

    @cached_property
    def baseline(self) -> Baseline:
        """Peak and cost of the step without remat, hooks, policies and chunks; 0 if no plan is found for budget 1."""
        if self._baseline is not None:
            return self._baseline
        context, search = self.context, self.search
        plain = context.state.plain
        if plain is not None:
            count_workspaces(plain, context.request.cost)
            request = replace(context.request, policies=Policies(), chunk=None)
            plain_context = GraphContext(plain, request, fingerprint=context.fingerprint)
            return Planner(search_of(plain_context)).baseline
        try:
            without_remat = search.decisions.without_remat
        except RematError:
            return Baseline()
        measures = search.measures
        if context.request.hooks is not None:
            measures = Measures(replace(context.state, hooks=None), context.on_progress)
        return Baseline(
            peak_bytes=measures.simulated(without_remat),
            estimated_bytes=0 if context.is_eager else search.measures.estimated(without_remat),
            cost=context.step_cost + without_remat.cost,
            curve=measures.curve(without_remat),
        )

    def reread_outputs(self, decided: Candidate) -> tuple[int, ...]:
        """Return the positions of the outputs of the user's model whose memory backward reads under a decision."""
        state = self.context.state
        saved = (state.index.nodes[state.index.by_name[name]] for name in decided.decision.saved)
        return reread_outputs(state.joint, saved)

    def plan(
        self, decided: Candidate, agree: Pass | None = None, copied_outputs: tuple[int, ...] = ()
    ) -> Plan:
        """Build the plan of a decision under the request's budget; warn if the plan hardly lowers the step's peak."""
        budget = self.context.request.budget
        plan = self.finish(decided, budget, agree, copied_outputs=copied_outputs)
        if budget.on_peak or plan.capacity >= plan.full_bytes:
            return plan
        # Bounds need no simulation, and mostly show that no warning is due.
        bounded, is_exact = _by_bounds(self.search, plan)
        if bounded is None or not bounded.is_lower(is_estimated=False):
            warn_of_peak(plan, bounded if is_exact else None)
        return plan

    def finish(
        self,
        decided: Candidate,
        budget: Budget,
        agree: Pass | None = None,
        *,
        peak_limit: int | None = None,
        measure: str = "simulated",
        copied_outputs: tuple[int, ...] = (),
    ) -> Plan:
        """Build the plan of a decision; under a budget on saved bytes, peak and some costs are computed when read.

        Args:
            decided: the decision.
            budget: what the plan records as its budget.
            agree: a pass that may change the decision before the split; None: no such pass.
            peak_limit: the peak in bytes that a ratio of the peak stands for; None: computed from the search.
            measure: the peak by which the decision was chosen: simulated or estimated.
            copied_outputs: positions of the outputs that the step returns as copies.
        """
        context, measures = self.context, self.search.measures
        if context.tagged:
            decided = self.search.offloads.with_tagged(decided)
        limits = decided.limits or replace(
            context.limits, capacity=max(context.full_bytes, decided.saved_bytes)
        )
        if budget.on_peak:
            limits = replace(limits, region_budget=context.region_budget)
        origin: dict[str, Any] = {"limits": limits, "provenance": decided.provenance}
        if agree is not None:
            state = replace(context.state, decision=decided.decision, **origin)
            state = split(PassManager((agree,)).run(state, in_place=True, verify=False).state)
        elif context.request.hooks is None:
            # The search has split the graph to measure peaks, and the plan reuses these modules.
            state = replace(measures.take_split(decided), **origin)
        else:
            state = split(replace(context.state, decision=decided.decision, **origin))
        if peak_limit is None:
            peak_limit = 0 if budget.peak_share is None else self.limit_of(budget)
        # A budget on saved bytes has no limit on the peak, so no search is described.
        limit = budget.peak_bytes or peak_limit
        return finish(
            state,
            cost=context.request.cost,
            budget=budget,
            fingerprint=context.fingerprint,
            later=partial(_figures, self, replace(state, forward=None, backward=None), decided),
            link=context.link,
            host_bytes=context.request.host_memory,
            exposed_time=decided.exposed_time,
            peak_limit=peak_limit,
            search=self._described(decided, limit, measure) if limit else "",
            copied_outputs=copied_outputs,
        )

    def _described(self, decided: Candidate, limit: int, measure: str) -> str:
        """Return text that states how many candidates each proposer found, and why the decision was chosen."""
        counts, peaks = self.search.decisions.proposed, self.search.measures
        each = ", ".join(f"{count} {proposer}" for proposer, count in counts.most_common())
        rounds_run = self.search.rounds_run
        rounds = " and ".join(
            f"{counted(count, 'round')} {proposer}" for proposer, count in rounds_run.items()
        )
        proposer = decided.provenance.proposer or "the runtime-optimal cut"
        peak = peaks.estimated(decided) if measure == "estimated" else peaks.simulated(decided)
        why = "cheapest within" if peak <= limit else "lowest peak found, above"
        return (
            f"{counted(counts.total(), 'candidate')}, {each}; {rounds or 'no round of searching'}; chosen: {proposer}, the {why} "
            f"{format_bytes(limit)} by the {measure} peak"
        )


def _by_bounds(search: Search, plan: Plan) -> tuple[BeforeAfter | None, bool]:
    """Compare bounds on the peaks with and without remat; return the comparison, and whether the bounds are exact."""
    context = search.context
    if not context.is_eager or context.request.hooks is not None or context.state.plain:
        return None, False
    try:
        without_remat = search.decisions.without_remat
    except RematError:
        return None, False
    measure_deferred(context.state.joint.graph)
    own, other = (peak_bounds(context.state, d) for d in (plan.decision, without_remat.decision))
    if own is None or other is None:
        return None, False
    # The highest peak that the plan may have, and the lowest that the step without remat may have.
    figures = BeforeAfter(
        peak_bytes=own[1],
        without_peak_bytes=other[0],
        step_cost=context.step_cost,
        recompute_cost=plan.recompute_cost,
        without_cost=context.step_cost + without_remat.cost,
        unit=plan.unit,
        exposed_time=plan.exposed_time,
    )
    return figures, own[0] == own[1] and other[0] == other[1]


@paused_collection()
def _figures(planner: Planner, state: State, decided: Candidate) -> dict[str, Any]:
    """Return the plan fields that are computed only when read (see `LATER`), as a dict from name to value."""
    measures, context = planner.search.measures, planner.context
    measure_deferred(context.state.joint.graph)
    alone = context.request.hooks is None and state.decision == decided.decision
    # Whoever got the plan's modules may have changed them, so the joint graph is split again.
    curve = measures.curve(decided) if alone else curve_of(split(state))
    return later_figures(state, curve.peak_bytes, planner.baseline, context.step_costs)
