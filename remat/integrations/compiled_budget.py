"""Plan a step that Inductor compiles, and plan the step again if its compiled code exceeds the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from remat.errors import BudgetError, BudgetWarning, warn
from remat.graph.joint import JointGraph
from remat.graph.problems.lowering import Decision
from remat.passes.ranks.agree_ranks import AgreeRanks
from remat.planning.plan import Plan
from remat.planning.planner import Planner, plan_graph
from remat.planning.reading.plan_text import learned_text
from remat.planning.request import PlanRequest
from remat.planning.search.compiled import CompiledRound
from remat.planning.search.effort import DEFAULT
from remat.units import Budget, format_apart, format_bytes

#: The budget under which planning finds the least peak. Before a peak in bytes is refused, the step is also planned
#: under this budget.
LEAST = Budget(peak_share=0.0)
_UNSHRUNK = (
    "Weights, gradients and what one operator needs at once do not shrink with the budget. Raise the budget, "
    "or make the model or the batch smaller"
)


class CompiledBudget:
    """Measurements of those compilations of one step that exceeded its budget, for planning the step again.

    Args:
        largest: function from this rank's excess over the budget, in bytes, to the largest excess
            of all ranks that run this plan. If the largest excess is above 0, all these ranks
            replan.
        together: whether other ranks may replan too, so that all ranks must replan equally often.

    Attributes:
        rounds: measurements of the compilations planned for the budget and, before a peak in bytes
            is refused, of those planned for the least peak.
        over: bytes by which the last compiled step exceeds its budget, on the rank that exceeds the
            budget most.
    """

    def __init__(self, largest: Callable[[int], int] = int, *, together: bool = False) -> None:
        self.rounds = [CompiledRound()]
        self.over = 0
        self._largest, self._together = largest, together
        # Dict from a plan's decision, which ranks have agreed on, to the decision that this rank had chosen.
        self._chosen: dict[Decision, Decision] = {}

    @property
    def times(self) -> int:
        """Number of times that the step was planned again because its compiled code exceeded the budget."""
        return sum(each.times for each in self.rounds)

    @property
    def key(self) -> str:
        """The measurements of earlier compilations that affect the next plan of the step, as text for cache keys."""
        return str([(each.excess, each.limit, [*each.peaks.values()]) for each in self.rounds])

    def plan(self, joint: JointGraph, request: PlanRequest, *, agree: AgreeRanks | None) -> Plan:
        """Plan a graph that Inductor will compile, using measurements of earlier compilations.

        Args:
            joint: the joint graph; it is changed.
            request: the options of planning.
            agree: the pass by which ranks agree on a decision; None if this rank decides alone.

        Raises:
            BudgetError: no plan is within the budget or, in a replan, within the smaller budget.
        """
        # Ranks must not mistake the decision of an earlier plan for the decision of this replan.
        if agree is not None and self.times:
            agree = replace(agree, options=f"{agree.options}, planned again {self.times} times")
        if _by_peak(request):
            return self._plan_within_peak(joint, request, agree)
        if not self.times:
            return plan_graph(joint, request, in_place=True, agree=agree)
        budget, current = request.budget, self.rounds[-1]
        smaller = Budget(nbytes=max(0, current.limit - current.excess))
        try:
            plan = plan_graph(joint, replace(request, budget=smaller), in_place=True, agree=agree)
        except BudgetError as error:
            raise BudgetError(
                f"budget {budget.label}: the plan within it takes more as Inductor compiled it, and there "
                f"is none for what is left then: {error}"
            ) from None
        return replace(plan, budget=str(budget), capacity=current.limit, _requested=budget)

    def _plan_within_peak(
        self, joint: JointGraph, request: PlanRequest, agree: AgreeRanks | None
    ) -> Plan:
        """Plan a graph under a budget on the peak, using the compiled peaks of earlier plans."""
        requested, current = request.budget, self.rounds[-1]
        is_first = current is self.rounds[0]
        budget = requested if is_first else LEAST
        within = replace(request, budget=budget)
        if budget.peak_bytes is None and current.is_last(budget):
            # In compiled code, copies to or from the host may start so early that a step without offloading
            # has a lower peak.
            within = replace(within, offload=None)
        # If the round has no candidate left, this method calls itself with the same graph. So a graph that was compiled
        # before must stay unchanged.
        planner = Planner.of(joint, within, in_place=not current.peaks)
        current.search = search = planner.estimated(current.search)
        candidate = search.search_within(budget, current)
        if budget.peak_bytes and candidate.decision in current.peaks:
            self.rounds.append(CompiledRound())
            return self._plan_within_peak(joint, request, agree)
        limit = 0 if budget.peak_bytes else search.limit or 0
        plan = planner.finish(candidate, budget, agree, peak_limit=limit, measure="estimated")
        self._chosen[plan.decision] = candidate.decision
        return (
            plan
            if is_first
            else replace(plan, budget=str(requested), _requested=requested, peak_limit=0)
        )

    def replans(self, plan: Plan, request: PlanRequest, *, can_hold: bool = True) -> bool:
        """Return whether to replan a step because the compiled step exceeds its budget.

        If the result is True, the next call of `plan` plans for fewer bytes.

        Args:
            plan: the plan, with the memory of the compiled step.
            request: the options that the step was planned under.
            can_hold: whether a plan within the budget may exist. If not, this rank replans only
                because other ranks do.

        Raises:
            BudgetError: the compiled step exceeds a budget that is a peak in bytes, and no replan
                is left.
        """
        if not request.decides:
            return False
        budget, current = request.budget, self.rounds[-1]
        taken, limit = compiled_bytes(plan, request)
        own = taken - limit if can_hold else 0
        self.over = self._largest(own)
        if max(own, self.over) <= 0:
            return False
        limit = limit or budget.peak_bytes or plan.peak_limit or plan.capacity
        taken = max(taken, limit + self.over)
        if budget.on_peak:
            current.peaks[self._chosen.get(plan.decision, plan.decision)] = taken
        if self.over <= 0 or self._is_last(budget, can_hold=can_hold):
            if can_hold:
                self._tell(plan, request, taken, limit, elsewhere=own <= 0)
            return False
        if budget.peak_bytes and can_hold and len(self.rounds) == 1 and current.is_last(budget):
            # The search starts anew: its plans do not depend on the refused budget, so another budget leads to them, too.
            self.rounds.append(CompiledRound())
        elif budget.on_peak:
            # The estimate of the next plan's peak may be off by more bytes, so a quarter is added to the excess.
            excess = (taken - (plan.estimated_peak_bytes or limit)) * 5 // 4
            current.excess = max(excess, 2 * current.excess)
        else:
            current.limit, current.excess = limit, taken - plan.planned_saved_bytes
        current.times += 1
        return True

    def _is_last(self, budget: Budget, *, can_hold: bool) -> bool:
        """Return whether a step that exceeds its budget was replanned as often as is allowed."""
        current, effort = self.rounds[-1], DEFAULT.compiling
        if budget.peak_bytes is None and (can_hold or not budget.on_peak):
            return current.is_last(budget)
        # The replans within the budget, the first plan for the least peak, and its replans.
        most = effort.replans + 1 + effort.of_ratio
        is_least = current is not self.rounds[0] and current.is_last(LEAST)
        return self.times == most or (is_least and not self._together)

    def is_open(self, plan: Plan, request: PlanRequest) -> bool:
        """Return whether a later process must plan this step itself instead of loading its plan.

        The result is True if the compiled step exceeds a ratio of the peak, or exceeds its budget even after planning
        for the least peak. Only the process that planned the step knows how many bytes a ratio of the peak stands for.
        """
        taken, limit = compiled_bytes(plan, request)
        seeks = len(self.rounds) > 1 or request.budget.peak_share is not None
        return seeks and taken > limit

    def _tell(
        self, plan: Plan, request: PlanRequest, taken: int, limit: int, *, elsewhere: bool
    ) -> None:
        """Report that a compiled step exceeds its budget: raise an error for a peak in bytes, or else warn."""
        budget, where = request.budget, " on another rank" if elsewhere else ""
        compiled = {d: peak for each in self.rounds for d, peak in each.peaks.items()}
        taken = min(compiled.values(), default=taken)
        more, most = format_apart(taken, limit)
        if budget.peak_bytes is not None:
            # Under a budget of `sure` bytes, the same plans for the least peak would be tried last. One of them has
            # this compiled peak, so that budget can be met.
            current = self.rounds[-1]
            sure = min(current.peaks.values())
            without, given = "", current.search.input_bytes if current.search else 0
            if plan.without_estimated_bytes:
                without = f", and about {format_bytes(plan.without_estimated_bytes)} without remat"
            which = "that plan" if sure == taken else "one that is found again for sure"
            # If a model is compiled block by block, the memory of the other blocks is unknown here.
            advice = request.how_to_run(sure, f"{which}, if the step has no other graph")
            raise BudgetError(
                f"budget {budget.label} ({limit} bytes): '{plan.graph}' has a peak of {more} ({taken} bytes) as "
                f"Inductor compiled it{where}, the least of the plans that were compiled ({len(compiled)}){without}. "
                f"It is proven only that none is below {given} bytes ({format_bytes(given)}), which "
                f"parameters and inputs take. {_UNSHRUNK}. `remat plan MODEL --budget peak:0` estimates the least peak, without "
                f"compiling. {advice[0].upper()}{advice[1:]}{learned_text(plan.forward.graph.nodes)}"
            )
        verb = "has a peak of" if budget.on_peak else "keeps"
        near = "A share is held as nearly as can be; a peak in bytes is held or refused"
        instead = _UNSHRUNK if budget.peak_share is None else near
        message = (
            f"'{plan.graph}' {verb} {more} ({taken} bytes) as Inductor compiled it{where}, "
            f"{f'the least of {self.times + 1} plans tried, ' if self.times and budget.on_peak else ''}"
            f"above the {most} ({limit} bytes) of its budget, and was planned again {self.times} times. "
            f"{instead}"
        )
        if budget.peak_share is None or taken > limit + limit // DEFAULT.compiling.warned:
            warn(message, BudgetWarning)


def warn_of_saved(plan: Plan) -> None:
    """Warn if a compiled step that applies a saved plan exceeds the budget of that plan.

    A budget that is a ratio of the peak is not checked. A saved plan with symbolic sizes is checked
    by `step_guards.guard_sizes` instead.
    """
    if not plan.planned_peak_bytes or plan.symbolic:
        return
    budget = plan.requested
    if budget.on_peak:
        verb, taken, limit = "has a peak of", plan.peak_bytes, budget.peak_bytes or 0
    else:
        verb, taken = "keeps", plan.saved_bytes
        limit = max(plan.capacity, plan.planned_saved_bytes)
    if limit and taken > limit:
        more, most = format_apart(taken, limit)
        warn(
            f"'{plan.graph}' {verb} {more} ({taken} bytes) as Inductor compiled it by a saved plan, above the "
            f"{most} ({limit} bytes) of its budget. A saved plan is applied as it is: give the budget instead, and the "
            "step is planned again until it holds",
            BudgetWarning,
        )


def compiled_bytes(plan: Plan, request: PlanRequest) -> tuple[int, int]:
    """Return the bytes of a compiled step that count against its budget, and the bytes that the budget allows.

    Under a budget on the peak, both returned numbers are bytes of the peak; otherwise both are saved bytes. A
    budget that is a ratio of the peak allows slightly more bytes than the ratio stands for; see
    `Compiling.nearly`. Both returned numbers are 0 if the compiled bytes are unknown or not limited.
    """
    budget = request.budget
    if not plan.planned_peak_bytes or not request.decides:
        return 0, 0
    if not budget.on_peak:
        taken, limit = plan.saved_bytes, plan.capacity
        return (taken, limit) if limit and taken > plan.planned_saved_bytes else (0, 0)
    limit = budget.peak_bytes or plan.peak_limit + plan.peak_limit // DEFAULT.compiling.nearly
    return (plan.peak_bytes, limit) if limit and _by_peak(request) else (0, 0)


def _by_peak(request: PlanRequest) -> bool:
    """Return whether candidate plans are compared by an estimate of their peak in compiled code."""
    # With saved-tensor hooks, the sizes of packed values are unknown before the step runs.
    return request.decides and request.budget.on_peak and request.hooks is None
