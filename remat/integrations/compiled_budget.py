"""Budgets that hold in the code that Inductor wrote: what compiling a step taught, and planning by that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from remat.errors import BudgetError, warn
from remat.graph.joint import JointGraph
from remat.graph.lowering import Decision
from remat.passes.core.base import Pass
from remat.planning.fused_peak import within_fused_peak
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
        over: bytes by which what was compiled last is above its budget, on the rank where it takes the most.
        times: how often the step was planned again.
    """

    excess: int = 0
    tighter: Budget | None = None
    peaks: dict[Decision, int] = field(default_factory=dict)
    _chosen: Decision | None = None
    _capacity: int = 0
    _limit: int = 0
    over: int = 0
    times: int = 0

    @property
    def key(self) -> str:
        """What of it decides, for the keys of caches."""
        return f"{self.excess} {self.tighter} {[*self.peaks.values()]}"

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
        budget, last = request.budget, self.times == _most(request.budget)
        if last and budget.peak_bytes is None:
            # Copies may begin so early in compiled code that steps without any are lower.
            request = replace(request, offload=None, pack=())
        planner = Planner.of(joint, request, in_place=True)
        found = within_fused_peak(
            planner,
            budget,
            excess=self.excess,
            compiled=self.peaks,
            last=last,
        )
        self._limit, self._chosen = found.limit, found.decided.decision
        if budget.peak_bytes and self.peaks.get(self._chosen, 0) > found.limit:
            least = min(self.peaks.values())
            raise BudgetError(
                f"budget {budget.label} ({found.limit} bytes): the step has a peak of {format_bytes(least)} "
                f"({least} bytes) as Inductor compiled it, the least of the plans tried "
                f"({len(self.peaks)}). {_UNSHRUNK}. To run that plan, give budget={least}"
            )
        return planner.finish(found.decided, budget, agree)

    def replans(
        self,
        made: Plan,
        request: PlanRequest,
        *,
        largest: Callable[[int], int] = int,
        can_hold: bool = True,
    ) -> bool:
        """Whether a step is to be planned again, since as compiled it takes more than its budget.

        Args:
            made: its plan, with the figures of what was compiled.
            request: what was asked for.
            largest: by how much the step takes more than its budget on the rank where it takes the most, given
                that of this rank: all ranks that run on a plan plan again together.
            can_hold: whether there may be a plan within the budget; else it is planned again for other ranks alone.

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
        if self._chosen is not None:
            self.peaks[self._chosen] = taken
        most = _most(asked) if can_hold else MOST_REPLANS
        if self.times == most or self.over <= 0:
            if can_hold:
                least = min(self.peaks.values(), default=taken)
                self._tell(made, asked, least, limit, elsewhere=own <= 0)
            return False
        if asked.on_peak:
            excess = taken - (made.predicted_peak_bytes or limit)
            self.excess = max(excess, 2 * self.excess)
        else:
            self.tighter = Budget(nbytes=max(0, made.planned_saved_bytes - (taken - limit)))
            self._capacity = made.capacity
        self.times += 1
        return True

    def is_over(self, made: Plan, request: PlanRequest) -> bool:
        """Whether a step takes more than its budget as it was compiled."""
        taken, limit = self._taken(made, request)
        return taken > limit

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
        what = "has a peak of" if asked.on_peak else "keeps"
        more, most = format_apart(taken, limit)
        instead = "A share is held as nearly as can be; a peak in bytes is held or refused"
        if asked.peak_share is None:
            least = f". To run that plan, give budget={taken}" if asked.on_peak else ""
            instead = f"{_UNSHRUNK}{least}"
        told = (
            f"'{made.graph}' {what} {more} ({taken} bytes) as Inductor compiled it"
            f"{' on another rank' if elsewhere else ''}, "
            f"{f'the least of {self.times + 1} plans tried, ' if self.times and asked.on_peak else ''}"
            f"above the {most} ({limit} bytes) of its budget, and was planned again {self.times} times. "
            f"{instead}"
        )
        if asked.peak_bytes is not None:
            raise BudgetError(told)
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
