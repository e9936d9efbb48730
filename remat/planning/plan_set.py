"""The plans of all graphs of one step, as a sequence with bytes and costs of the whole step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, overload

from remat.errors import ProblemError
from remat.files import Form, Record, check_figures
from remat.planning.plan import Plan
from remat.planning.reading.plan_text import MOST_SHOWN
from remat.report.before_after import BeforeAfter
from remat.units import Budget, format_bytes, format_cost


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanSet(Record, Sequence[Plan]):
    """The plans of all graphs of one step, under one budget.

    Attributes:
        plans: one for each graph, in the order in which the graphs run.
        passed_bytes: bytes of the activations that one graph passes to a later graph, and that at least one of these
            graphs saves for backward; each activation counts once.
        capacity: the most bytes that the budget allows all graphs together to save. Under a budget on the peak, which
            does not limit saved bytes, ``capacity`` is at least the saved bytes.
        peak_bytes: most bytes alive at once while the forwards of all graphs run, first to last, and then
            their backwards, last to first; parameters and inputs included. 0 if unknown.
        budget: the requested budget; empty if unknown.
        runs: how often each graph runs in a step; empty if each graph runs once.
        without_peak_bytes: simulated peak of the step without remat, for which every graph is planned at budget 1.
            0 if unknown.
    """

    form: ClassVar[Form] = Form("set of plans", "remat_plans", 1)

    capacity: int
    passed_bytes: int
    plans: tuple[Plan, ...]
    peak_bytes: int = 0
    budget: str = ""
    runs: tuple[int, ...] = ()
    without_peak_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.plans:
            raise ProblemError("it holds no plan")
        if self.runs and (len(self.runs) != len(self.plans) or min(self.runs) < 1):
            raise ProblemError(f"it holds {len(self.plans)} plans, and runs is {self.runs}")
        check_figures(self, ("capacity", "passed_bytes", "peak_bytes", "without_peak_bytes"))
        if self.budget:
            self._check_budget(Budget.parse(self.budget))

    def _check_budget(self, budget: Budget) -> None:
        """Raise a ProblemError if the step's recorded peak, or the saved bytes of all plans, exceed ``budget``."""
        # The budget of each single plan is checked when the plan is applied to its graph.
        bounds = (("peak_bytes", budget.peak_bytes), ("saved_bytes", budget.nbytes))
        for name, limit in bounds:
            if limit is not None and getattr(self, name) > limit:
                raise ProblemError(
                    f"its budget is {budget}, and {name} of its plans together is {getattr(self, name)}"
                )

    @property
    def saved_bytes(self) -> int:
        """Bytes that all runs of all graphs together save for backward."""
        each = zip(self._runs, self.plans, strict=True)
        return sum(runs * p.saved_bytes for runs, p in each) + self.passed_bytes

    @property
    def recompute_cost(self) -> int:
        """Summed recompute cost of all runs, in the unit of the plans."""
        return self._summed("recompute_cost")

    @property
    def exposed_time(self) -> int:
        """Summed exposed transfer time of all runs, in the unit of the plans."""
        return self._summed("exposed_time")

    @property
    def host_bytes(self) -> int:
        """Bytes that all runs of all graphs offload, and that are in the host's memory when forward ends."""
        return self._summed("host_bytes")

    @property
    def before_after(self) -> BeforeAfter:
        """Comparison of the step under the plans of this set with the step without remat."""
        # `step_cost` is 0 if unknown. A sum in which one of the costs is unknown would be too low.
        costs_are_known = all(p.step_cost for p in self.plans)
        return BeforeAfter(
            peak_bytes=self.peak_bytes,
            without_peak_bytes=self.without_peak_bytes,
            step_cost=self._summed("step_cost") if costs_are_known else 0,
            recompute_cost=self.recompute_cost,
            exposed_time=self.exposed_time,
            without_cost=self._summed("without_cost"),
            unit=self.plans[0].unit,
        )

    def _summed(self, name: str) -> int:
        """Return the sum of the plan field ``name`` over all runs of all graphs."""
        return sum(runs * getattr(p, name) for runs, p in zip(self._runs, self.plans, strict=True))

    @property
    def _runs(self) -> tuple[int, ...]:
        """Number of times that each graph runs in a step."""
        return self.runs or (1,) * len(self.plans)

    @property
    def has_equal_graphs(self) -> bool:
        """Whether several plans are for equal graphs, such as equal layers."""
        return len({p.fingerprint for p in self.plans}) < len(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, i: int) -> Plan: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, i: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[i]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def explain(self) -> str:
        """Return a text: a line with the summed bytes and costs of all plans, then `Plan.explain` of each plan."""
        return "\n\n".join(
            [f"{len(self)} graphs: {self._head}", *(p.explain() for p in self.plans)]
        )

    def __repr__(self) -> str:
        shown = [f"  {plan!r}" for plan in self.plans[:MOST_SHOWN]]
        rest = len(self) - len(shown)
        shown += [f"  and {rest} more"] if rest else []
        return "\n".join([f"<plans for {len(self)} graphs: {self._head}", *shown]) + ">"

    @property
    def _head(self) -> str:
        """One line of text with the summed bytes and costs of all plans."""
        unit = self.plans[0].unit
        on_peak = self.budget and Budget.parse(self.budget).on_peak
        allowed = "" if on_peak else f" of {format_bytes(self.capacity)} allowed"
        peak = f"; peak of the step {self.before_after.line}" if self.peak_bytes else ""
        peak += f"; {format_bytes(self.host_bytes)} offloaded" if self.host_bytes else ""
        peak += f" (budget {Budget.parse(self.budget).label})" if on_peak else ""
        return (
            f"{format_bytes(self.saved_bytes)} saved{allowed}, "
            f"{format_bytes(self.passed_bytes)} of it passed from graph to graph; "
            f"{format_cost(self.recompute_cost, unit)} recomputed{peak}"
        )
