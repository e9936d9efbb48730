"""Result of `fit`: training steps at several batch sizes within a memory, as a table and as code to paste."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from remat.units import Budget, columns, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """The whole step at one batch: forward, backward, and the optimizer's step.

    Attributes:
        batch: samples in one step of one rank.
        fits: whether a plan was found whose step is within the memory.
        budget: the budget to set, as `torch.compile` takes it: ``"1"``, ``"peak:52412345678B"``, and with
            several ranks a share such as ``"0.35"``; None where none fits.
        peak_bytes: most bytes alive at once, on one rank: parameters, inputs, activations, gradients, the
            optimizer's state, buffers of collectives. Where none fits, the least that was found, or is possible.
        step_s: modelled seconds of one step; None where none fits.
        samples_per_s: samples of all ranks in a second; None where none fits.
        recompute_s: modelled seconds of what runs twice, and of exposed transfers; None where none fits.
        reason: why none fits; empty where one does.
        proven: where none fits, whether that is proven; else none was found.
    """

    batch: int
    fits: bool
    budget: str | None
    peak_bytes: int
    step_s: float | None = None
    samples_per_s: float | None = None
    recompute_s: float | None = None
    reason: str = ""
    proven: bool = False

    @property
    def recomputing(self) -> float | None:
        """Recompute time as a fraction of the modelled step time; None if no plan fits."""
        return None if not self.step_s else (self.recompute_s or 0.0) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whole training steps at several batches within a memory.

    Attributes:
        model: what was fitted.
        memory_bytes: the memory of one rank.
        optimizer: as it was asked for.
        cost: the cost model.
        lower: the lowering that steps were traced for.
        ranks: how many ranks train.
        sharding: how they share the work; empty for one rank.
        parameter_bytes: parameters on one rank, between steps.
        gradient_bytes: gradients on one rank, when backward has run.
        state_bytes: the optimizer's state on one rank.
        optimizer_bytes: what the optimizer's step allocates and frees.
        offload: the link over which saved values may go to the host; empty where none may.
        asked_cost: the cost model by the name that it was asked for with; empty for the default, and without one.
        rows: by batch, the smallest first.
    """

    model: str
    memory_bytes: int
    optimizer: str
    cost: str
    lower: str
    ranks: int
    sharding: str
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    optimizer_bytes: int
    rows: tuple[FitRow, ...]
    offload: str = ""
    asked_cost: str = ""

    @property
    def largest(self) -> FitRow | None:
        """The row with the largest batch that fits."""
        return max((r for r in self.rows if r.fits), key=lambda r: r.batch, default=None)

    @property
    def best(self) -> FitRow | None:
        """The row with the most samples per second; of equal ones, the smaller batch."""
        fits = (r for r in self.rows if r.fits)
        return max(fits, key=lambda r: (r.samples_per_s or 0.0, -r.batch), default=None)

    @property
    def largest_batch(self) -> int | None:
        """The largest batch that fits, of one rank; None where none does."""
        return None if self.largest is None else self.largest.batch

    @property
    def best_batch(self) -> int | None:
        """The batch with the most samples per second, of one rank; None where none fits."""
        return None if self.best is None else self.best.batch

    @property
    def code(self) -> str:
        """The line that trains with the best throughput; empty where no batch fits."""
        return "" if self.best is None else self.code_for(self.best)

    def code_for(self, row: FitRow) -> str:
        """The line that compiles a model for a row; empty where it does not fit."""
        if row.budget is None:
            return ""
        budget = Budget.parse(row.budget)
        shown = str(budget.peak_bytes) if budget.on_peak else row.budget
        options = [f'"budget": {shown}']
        if self.lower != "inductor":
            options.append(f'"lower": "{self.lower}"')
        if self.asked_cost:
            options.append(f'"cost": "{self.asked_cost}"')
        if budget.on_peak and self.offload:
            options.append(f'"offload": "{self.offload}"')
        return f'model = torch.compile(model, backend="remat", options={{{", ".join(options)}}})'

    def to_json(self) -> str:
        """The figures as JSON: those of the step, ``rows``, ``largest_batch``, ``best_batch``, ``code``."""
        chosen = {
            "largest_batch": self.largest_batch,
            "best_batch": self.best_batch,
            "code": self.code,
        }
        return json.dumps(asdict(self) | chosen, indent=2) + "\n"

    def __str__(self) -> str:
        by = f" on each of {self.sharding}" if self.sharding else ""
        lines = [
            f"{self.model}, {self.optimizer}, {format_bytes(self.memory_bytes)} of memory{by}",
            f"parameters {format_bytes(self.parameter_bytes)}, gradients "
            f"{format_bytes(self.gradient_bytes)}, optimizer state {format_bytes(self.state_bytes)}, "
            f"and {format_bytes(self.optimizer_bytes)} while it steps",
            "",
            *columns([_HEAD, *map(_cells, self.rows)], left=[5]),
            "",
        ]
        if any(not row.fits and not row.proven for row in self.rows):
            lines.append(
                "no plan found: of the plans that were tried none fits; that there is none is not proven"
            )
        if self.largest is None or self.best is None:
            return "\n".join([*lines, f"no batch fits: {self.rows[0].reason}"])
        largest, best = self.largest, self.best
        each = " on each rank" if self.ranks > 1 else ""
        lines.append(
            f"largest batch that fits: {largest.batch}{each}; most samples per second: batch "
            f"{best.batch}{each}, by {self.cost}"
        )
        lines.append(f"{self.code_for(best)}  # batch {best.batch}")
        if largest.budget != best.budget:
            lines.append(f"{self.code_for(largest)}  # batch {largest.batch}")
        return "\n".join(lines)


_HEAD = ("batch", "peak", "step", "recomputing", "samples/s", "budget")


def _cells(row: FitRow) -> tuple[str, ...]:
    peak = format_bytes(row.peak_bytes)
    if row.budget is None:
        return (
            str(row.batch),
            peak,
            "–",
            "–",
            "–",
            "does not fit" if row.proven else "no plan found",
        )
    rate = row.samples_per_s or 0.0
    return (
        str(row.batch),
        peak,
        f"{1e3 * (row.step_s or 0.0):,.4g} ms",
        f"{row.recomputing or 0.0:.1%}",
        f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}",
        Budget.parse(row.budget).label,
    )
