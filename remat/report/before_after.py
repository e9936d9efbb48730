"""A step without remat and with it, in words: its peak, its modelled time, and the share that recomputing is."""

from __future__ import annotations

from dataclasses import dataclass

from remat.errors import PeakWarning, warn
from remat.units import format_apart, format_bytes, format_cost

#: The part of budget 1's peak, and of its step's cost, that is not worth a warning.
_LITTLE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """What a step takes without remat, which is under the plan at budget 1, and under another plan.

    Attributes:
        peak_bytes: peak of the step under the plan.
        without_peak_bytes: peak without remat, found in the same way; 0 where it is not known.
        step_cost: cost of running every operator of the step once, in ``unit``; 0 where it is not known.
        recompute_cost: cost of what the plan runs again.
        without_recompute_cost: cost of what runs again without remat.
        exposed_time: exposed transfer time of the plan: the time that runs wait for copies to and from the host.
        unit: unit of the costs; that of a time is ``"ps"``.
    """

    peak_bytes: int
    without_peak_bytes: int
    step_cost: int
    recompute_cost: int
    without_recompute_cost: int
    unit: str
    exposed_time: int = 0

    @property
    def more(self) -> float | None:
        """Share of the step without remat by which the plan's costs more; below 0 where it costs less.

        None where the step without remat is not known.
        """
        without = self.step_cost + self.without_recompute_cost
        if not self.step_cost or not self.without_peak_bytes:
            return None
        added = self.recompute_cost + self.exposed_time
        return (added - self.without_recompute_cost) / without

    @property
    def recomputing(self) -> float | None:
        """Share of the plan's step that is recomputing; None where the cost of the step is not known."""
        whole = self.step_cost + self.recompute_cost + self.exposed_time
        return self.recompute_cost / whole if self.step_cost else None

    @property
    def line(self) -> str:
        """Both in one line: "2.42 GiB instead of 5.1 GiB, 4.1% of the step more"."""
        parts = [format_bytes(self.peak_bytes)]
        if self.without_peak_bytes:
            parts[0] += f" instead of {format_bytes(self.without_peak_bytes)}"
        if self.more is not None:
            parts.append(more_text(self.more, "of the step "))
        return ", ".join(parts)

    @property
    def step_text(self) -> str:
        """The modelled time of the step, or its cost in another unit; empty where it is not known."""
        if self.recomputing is None:
            return ""
        whole = self.step_cost + self.recompute_cost + self.exposed_time
        text = f"{format_cost(whole, self.unit)} modelled"
        if self.more is not None:
            without = format_cost(self.step_cost + self.without_recompute_cost, self.unit)
            text += f", {more_text(self.more)} than the {without} without remat"
        else:
            text += f", {self.recomputing:.1%} of it recomputing"
        if self.exposed_time:
            text += f", {self.exposed_time / whole:.1%} of it exposed transfer time"
        return text

    def warn_if_not_lower(
        self, what: str, ratio: float, *, of_graph: bool, is_estimated: bool, stacklevel: int
    ) -> None:
        """Warn if the plan peaks above budget 1's, or costs over 1 % of the step and lowers its peak by less.

        Args:
            what: the budget and the graph, for the message.
            ratio: the saved bytes that the budget allows, over those of budget 1.
            of_graph: whether that is one graph, which may be one of several of a step.
            is_estimated: whether the peaks are estimates of compiled ones, so that 1 % more is not above.
            stacklevel: frames from here to the caller whom the warning names.
        """
        peak, most, more = self.peak_bytes, self.without_peak_bytes, self.more or 0.0
        above = peak > most * (1 + _LITTLE * is_estimated)
        if not above and not (more > _LITTLE and most - peak < _LITTLE * most):
            return
        lower, higher = format_apart(peak, most)
        costs = f" and costs {more:.1%} of the step more" if more > 0 else ""
        planned, expected = "", ""
        if is_estimated:
            planned = ", estimated before compiling: plan.predicted_peak_bytes"
            expected = ", likewise: plan.without_expected_bytes"
        nbytes = f"bytes, such as budget='{format_bytes(0.8 * most).replace(' ', '')}'"
        alone = (
            f" of this graph. If it is the whole step, so do {nbytes}"
            if of_graph
            else f", or {nbytes}"
        )
        warn(
            f"{what} has a peak of {lower} ({peak} bytes{planned}){costs}; budget 1 has {higher} ({most} bytes"
            f"{expected}). The budget bounds the saved bytes, not the peak. To lower the peak, bound it: "
            f"budget=remat.Peak({ratio:.2f}), as text peak:{ratio:.2f}, where 0 is the least peak found and 1 that of "
            f"budget 1{alone}",
            PeakWarning,
            stacklevel=stacklevel + 1,
        )


def more_text(share: float, of: str = "") -> str:
    """How much is added, for people: "4.1% more", or "0.3% less".

    Args:
        share: what is added, as a share of what there was; below 0 where something is taken away.
        of: what it is a share of, with a blank behind it.
    """
    rounded = round(share, 3)
    return f"{abs(rounded):.1%} {of}{'less' if rounded < 0 else 'more'}"
