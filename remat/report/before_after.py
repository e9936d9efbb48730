"""Comparison of a step under a plan with the same step without remat: peak, modelled time, recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from remat.errors import PeakWarning, warn
from remat.units import format_apart, format_bytes, format_cost

#: Fraction of the peak or cost of the step without remat, below which a difference from this peak or cost is
#: negligible.
_LITTLE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Peak and costs of a step under a plan, and of the same step without remat.

    In the fields, "without remat" means under the plan for budget 1.

    Attributes:
        peak_bytes: peak of the step under the plan.
        without_peak_bytes: peak without remat; 0 if unknown. Either both this peak and ``peak_bytes`` are
            simulated, or both are estimated.
        step_cost: cost of running every operator of the step once, in ``unit``; 0 if unknown.
        recompute_cost: cost of the operators that the plan runs again, in ``unit``.
        without_cost: cost of the step without remat, in ``unit``; meaningless if ``step_cost`` is 0.
        exposed_time: time for which the plan's operators wait for copies to and from host memory,
            in ``unit``.
        unit: unit of the costs; ``"ps"`` for times.
    """

    peak_bytes: int
    without_peak_bytes: int
    step_cost: int
    recompute_cost: int
    without_cost: int
    unit: str
    exposed_time: int = 0

    @property
    def cost(self) -> int:
        """Cost of the step under the plan, in ``unit``; meaningless if ``step_cost`` is 0."""
        return self.step_cost + self.recompute_cost + self.exposed_time

    @property
    def more(self) -> float | None:
        """Cost that the plan adds to the step, as a fraction of the step's cost without remat: 0.04 for 4 % more.

        The fraction is negative if the step costs less under the plan, and None if cost or peak without
        remat is unknown.
        """
        if not self.step_cost or not self.without_peak_bytes:
            return None
        return (self.cost - self.without_cost) / self.without_cost

    @property
    def recomputing(self) -> float | None:
        """Recompute cost as a fraction of the step's cost under the plan; None if the step's cost is unknown."""
        return self.recompute_cost / self.cost if self.step_cost else None

    @property
    def line(self) -> str:
        """The plan's peak and added cost as one line of text: "2.42 GiB instead of 5.1 GiB, 4.1% of the step more"."""
        parts = [format_bytes(self.peak_bytes)]
        if self.without_peak_bytes:
            parts[0] += f" instead of {format_bytes(self.without_peak_bytes)}"
        if self.more is not None:
            parts.append(more_text(self.more, "of the step "))
        return ", ".join(parts)

    @property
    def step_text(self) -> str:
        """Cost of the step under the plan as text, usually a modelled time; empty if the cost is unknown."""
        if self.recomputing is None:
            return ""
        text = f"{format_cost(self.cost, self.unit)} modelled"
        if self.more is not None:
            without = format_cost(self.without_cost, self.unit)
            text += f", {more_text(self.more)} than the {without} without remat"
        else:
            text += f", {self.recomputing:.1%} of it recomputing"
        if self.exposed_time:
            text += f", {self.exposed_time / self.cost:.1%} of it exposed transfer time"
        return text

    def is_lower(self, *, is_estimated: bool) -> bool:
        """Whether the plan lowers the step's peak enough to justify the cost that the plan adds.

        The result is False if the plan's peak is above the peak without remat, or if the plan adds more than 1 %
        to the step's cost and lowers the peak by less than 1 %.

        Args:
            is_estimated: whether the peaks are estimates of compiled peaks.
        """
        peak, without = self.peak_bytes, self.without_peak_bytes
        # Estimates of compiled peaks are inexact, so an estimate only slightly above the peak without remat is no
        # reason to warn.
        above = peak > without * (1 + _LITTLE * is_estimated)
        useless = (self.more or 0.0) > _LITTLE and without - peak < _LITTLE * without
        return not above and not useless

    def warn_if_not_lower(
        self, subject: str, ratio: float, *, of_graph: bool, is_estimated: bool
    ) -> None:
        """Issue a `PeakWarning` unless the plan lowers the step's peak as `is_lower` defines it.

        Args:
            subject: text that names the budget and the graph, for the message.
            ratio: bytes that the budget allows to be saved, divided by the bytes saved without remat.
            of_graph: whether the plan is for one graph, which may be one of several in the step.
            is_estimated: as in `is_lower`.
        """
        if self.is_lower(is_estimated=is_estimated):
            return
        peak, most, more = self.peak_bytes, self.without_peak_bytes, self.more or 0.0
        lower, higher = format_apart(peak, most)
        costs = f" and costs {more:.1%} of the step more" if more > 0 else ""
        planned, estimated = "", ""
        if is_estimated:
            planned = ", estimated before compiling: plan.estimated_peak_bytes"
            estimated = ", likewise: plan.without_estimated_bytes"
        alone = (
            " of this graph; or by bytes if the graph is the whole step"
            if of_graph
            else "; or by bytes"
        )
        warn(
            f"{subject} has a peak of {lower} ({peak} bytes{planned}){costs}; budget 1 has {higher} ({most} bytes"
            f"{estimated}). The budget bounds the saved bytes, not the peak. To lower the peak, bound it: "
            f"budget=remat.Peak({ratio:.2f}), as text peak:{ratio:.2f}, where 0 is the least peak found and 1 that of "
            f"budget 1{alone}",
            PeakWarning,
        )


def more_text(share: float, of: str = "") -> str:
    """Format a relative change as text: "4.1% more" or "0.3% less".

    Args:
        share: the change as a fraction of the amount before the change; negative for a decrease.
        of: text before "more" or "less", with a blank at its end, such as ``"of the step "``.
    """
    rounded = round(share, 3)  # digits as shown: -0.0001 must not give "0.0% less"
    return f"{abs(rounded):.1%} {of}{'less' if rounded < 0 else 'more'}"
