"""Budgets that hold in the code that Inductor wrote: what compiling a step taught, and planning by that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from remat.errors import BudgetError, warn
from remat.graph.joint import JointGraph
from remat.graph.lowering import Decision
from remat.passes.core.base import Pass
from remat.planning.fused_peak import input_bytes, within_fused_peak
from remat.planning.plan import Plan
from remat.planning.planner import Planner, plan_graph
from remat.planning.request import PlanRequest
from remat.units import Budget, format_apart, format_bytes

#: How often a step is planned again that takes more than its budget as it was compiled, at most.
MOST_REPLANS = 3
#: Likewise where the budget is a share of the peak, which can be held nearly only.
_OF_SHARES = 2
#: A share of the peak is held nearly: to within this part of it, as one over it.
_NEARLY = 200
#: What takes more than a share by this part of it, as one over it, is warned of.
_FAR = 20
#: What a step is planned under before a peak in bytes is refused; how often it may be planned again in all, therefore.
_LEAST = Budget(peak_share=0.0)
_OF_PEAKS = MOST_REPLANS + 1 + _OF_SHARES
_UNSHRUNK = (
    "Weights, gradients and what one operator needs at once do not shrink with the budget. Raise the budget, "
    "or make the model or the batch smaller"
)


class BudgetWarning(UserWarning):
    """A budget that does not mean what one may think."""


@dataclass(slots=True)
class CompiledBudget:
    """What is known of one step from compiling it: plans are made by that.

    Attributes:
        excess: bytes by which plans are expected to take less than the budget: what a compiled step was above
            its expectation, and at least twice the last excess.
        tighter: what is planned within instead of a budget in bytes or a share of them.
        peaks: the peaks of the decisions that were compiled, and are above it.
        lowest: what is known of the step as one under the least peak. It is planned so, from the beginning, before a
            peak in bytes is refused.
        over: bytes by which what was compiled last is above its budget, on the rank where it takes the most.
        times: how often the step was planned again.
    """

    excess: int = 0
    tighter: Budget | None = None
    peaks: dict[Decision, int] = field(default_factory=dict)
    lowest: CompiledBudget | None = None
    _chosen: Decision | None = None
    _capacity: int = 0
    _limit: int = 0
    _inputs: int = 0
    over: int = 0
    times: int = 0

    @property
    def key(self) -> str:
        """What of it decides, for the keys of caches."""
        own = f"{self.excess} {self.tighter} {[*self.peaks.values()]}"
        return own if self.lowest is None else f"{own}, then {self.lowest.key}"

    def plan(self, joint: JointGraph, request: PlanRequest, agree: Pass | None) -> Plan:
        """Plans a graph that Inductor will compile.

        Raises:
            BudgetError: none is within the budget, or none is expected to be.
        """
        if _by_peak(request):
            return self._within_peak(joint, request, agree)
        if self.tighter is None:
            return plan_graph(joint, request, in_place=True, agree=agree)
        try:
            within = replace(request, budget=self.tighter)
            made = plan_graph(joint, within, in_place=True, agree=agree)
        except BudgetError as error:
            raise BudgetError(
                f"budget {request.budget.label}: the plan within it takes more as Inductor compiled it, and there "
                f"is none for what is left then: {error}"
            ) from None
        budget = request.budget
        return replace(made, budget=str(budget), capacity=self._capacity, _asked=budget)

    def _within_peak(self, joint: JointGraph, request: PlanRequest, agree: Pass | None) -> Plan:
        budget, last = request.budget, self.times >= _most(request.budget)
        if self.lowest is not None:
            made = self.lowest._within_peak(joint, replace(request, budget=_LEAST), agree)
            return replace(made, budget=str(budget), _asked=budget, peak_limit=0)
        if last and budget.peak_bytes is None:
            # Copies may begin so early in compiled code that steps without any are lower.
            request = replace(request, offload=None)
        # Once something was compiled, this may find nothing else; then the graph is planned once more.
        planner = Planner.of(joint, request, in_place=not self.peaks)
        found = within_fused_peak(
            planner,
            budget,
            excess=self.excess,
            compiled=self.peaks,
            last=last,
        )
        self._limit, self._inputs = found.choice.peak_limit, input_bytes(joint)
        self._chosen = found.decision
        if budget.peak_bytes and self.peaks.get(self._chosen, 0) > budget.peak_bytes:
            self.lowest = CompiledBudget()
            return self._within_peak(joint, request, agree)
        return planner.finish(found, budget, agree)

    def replans(
        self,
        made: Plan,
        request: PlanRequest,
        *,
        largest: Callable[[int], int] = int,
        can_hold: bool = True,
        together: bool = False,
    ) -> bool:
        """Whether a step is to be planned again, since as compiled it takes more than its budget.

        Args:
            made: its plan, with the figures of what was compiled.
            request: what was asked for.
            largest: by how much the step takes more than its budget on the rank where it takes the most, given
                that of this rank: all ranks that run on a plan plan again together.
            can_hold: whether there may be a plan within the budget; else it is planned again for other ranks alone.
            together: whether other ranks may plan it again as well. All of them then do so equally often.

        Raises:
            BudgetError: it takes more, is not planned again, and the budget is a peak in bytes.
        """
        if not _decides(request):
            return False
        asked = request.budget
        taken, limit = self._taken(made, request)
        own = taken - limit if can_hold else 0
        self.over = largest(own)
        if max(own, self.over) <= 0:
            return False
        limit = limit or asked.peak_bytes or self._limit or made.capacity
        taken = max(taken, limit + self.over)
        now = self.lowest or self
        if asked.on_peak:  # a step that was found in a cache was chosen by another process
            now.peaks[made.decision if now._chosen is None else now._chosen] = taken
        if self.over <= 0 or self._is_last(asked, can_hold=can_hold, together=together):
            if can_hold:
                self._tell(made, asked, taken, limit, elsewhere=own <= 0)
            return False
        if asked.peak_bytes and can_hold and self.lowest is None and self.times == MOST_REPLANS:
            self.lowest = CompiledBudget()
        elif asked.on_peak:
            excess = taken - (made.predicted_peak_bytes or limit)
            now.excess = max(excess, 2 * now.excess)
            if self.lowest is not None:
                self.lowest.times += 1
        else:
            self.tighter = Budget(nbytes=max(0, made.planned_saved_bytes - (taken - limit)))
            self._capacity = made.capacity
        self.times += 1
        now._chosen = None
        return True

    def _is_last(self, asked: Budget, *, can_hold: bool, together: bool) -> bool:
        """Whether a step is planned again no more, though it takes more than its budget."""
        if asked.peak_bytes is None or not can_hold:
            most = _OF_PEAKS if asked.on_peak else MOST_REPLANS
            return self.times == (_most(asked) if can_hold else most)
        lowest = self.lowest
        return self.times == _OF_PEAKS or (
            lowest is not None and lowest.times == _OF_SHARES and not together
        )

    def is_open(self, made: Plan, request: PlanRequest) -> bool:
        """Whether a later process has to plan the step itself, as it takes more than its budget as it was compiled.

        Which bytes a share of the peak stands for, only who planned the step knows.
        """
        taken, limit = self._taken(made, request)
        seeks = self.lowest is not None or request.budget.peak_share is not None
        return seeks and taken > limit

    def _taken(self, made: Plan, request: PlanRequest) -> tuple[int, int]:
        """Bytes that a compiled step takes of what its budget is on, and those of the budget; 0, 0: it has no say."""
        asked = request.budget
        if not made.planned_peak_bytes or not _decides(request):
            return 0, 0
        if asked.on_peak:
            taken, limit = made.peak_bytes, asked.peak_bytes or self._limit
            if not asked.peak_bytes:
                limit += limit // _NEARLY
            if not _by_peak(request):
                return 0, 0
        else:
            taken, limit = made.saved_bytes, made.capacity
            if taken <= made.planned_saved_bytes:
                return 0, 0
        return (taken, limit) if limit else (0, 0)

    def _tell(self, made: Plan, asked: Budget, taken: int, limit: int, *, elsewhere: bool) -> None:
        """Says that a compiled step takes more than its budget; of a share of the peak, if it is far more."""
        where = " on another rank" if elsewhere else ""
        compiled = {**self.peaks, **(self.lowest.peaks if self.lowest else {})}
        taken = min(compiled.values(), default=taken)
        more, most = format_apart(taken, limit)
        if asked.peak_bytes is not None:
            # Under these bytes the plans of the least peak are tried again, if no other is within them.
            sure = min(self.lowest.peaks.values(), default=taken) if self.lowest else taken
            inputs = max(self._inputs, self.lowest._inputs if self.lowest else 0)
            raise BudgetError(
                f"budget {asked.label} ({limit} bytes): '{made.graph}' has a peak of {more} ({taken} bytes) as "
                f"Inductor compiled it{where}, the least of the plans that were compiled ({len(compiled)}). It is "
                f"proven only that none is below {inputs} bytes ({format_bytes(inputs)}), which parameters and inputs "
                f"take. {_UNSHRUNK}. To run {'that plan' if sure == taken else 'one that is found again for sure'}, "
                f"give budget={sure}"
            )
        what = "has a peak of" if asked.on_peak else "keeps"
        instead = "A share is held as nearly as can be; a peak in bytes is held or refused"
        if asked.peak_share is None:
            instead = _UNSHRUNK
        told = (
            f"'{made.graph}' {what} {more} ({taken} bytes) as Inductor compiled it{where}, "
            f"{f'the least of {self.times + 1} plans tried, ' if self.times and asked.on_peak else ''}"
            f"above the {most} ({limit} bytes) of its budget, and was planned again {self.times} times. "
            f"{instead}"
        )
        if asked.peak_share is None or taken > limit + limit // _FAR:
            warn(told, BudgetWarning, stacklevel=4)


def warn_of_saved(made: Plan) -> None:
    """Warns of a step that a saved plan is for, and that takes more than its budget in bytes as Inductor compiled it.

    One with symbolic sizes is refused at those at which it does.
    """
    if not made.planned_peak_bytes or made.symbolic:
        return
    asked = made.asked
    if asked.on_peak:
        what, taken, limit = "has a peak of", made.peak_bytes, asked.peak_bytes or 0
    else:
        what, taken = "keeps", made.saved_bytes
        limit = max(made.capacity, made.planned_saved_bytes)
    if limit and taken > limit:
        more, most = format_apart(taken, limit)
        warn(
            f"'{made.graph}' {what} {more} ({taken} bytes) as Inductor compiled it by a saved plan, above the "
            f"{most} ({limit} bytes) of its budget. A saved plan is applied as it is: give the budget instead, and the "
            "step is planned again until it holds",
            BudgetWarning,
            stacklevel=4,
        )


def _most(budget: Budget) -> int:
    return MOST_REPLANS if budget.peak_share is None else _OF_SHARES


def _decides(request: PlanRequest) -> bool:
    return request.plan is None and request.pipeline is None


def _by_peak(request: PlanRequest) -> bool:
    """Whether plans are chosen by the peak that is expected of them; what hooks pack is not known before."""
    return _decides(request) and request.budget.on_peak and request.hooks is None
