"""Result of `fit`: training steps at several batch sizes within a device's memory, as a table and as code to paste."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from remat.units import Budget, columns, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """Result for one batch size: whether the whole training step fits, under which budget, and how fast it is.

    Attributes:
        batch: batch size: the samples in one micro-batch of one rank.
        fits: whether a plan was found whose step fits the memory.
        budget: the budget to pass to `torch.compile`: ``"1"``, ``"peak:52412345678B"`` or, with several
            ranks, a ratio such as ``"0.35"``. None if no plan fits.
        peak_bytes: most bytes alive at once on one rank: parameters, inputs, activations, gradients, the optimizer's
            state, buffers of collectives. If no plan fits: with ``proven``, a lower bound on the peak of every plan;
            else the least peak that was found.
        step_s: modelled seconds of one step; None if no plan fits.
        samples_per_s: samples of all ranks per second; None if no plan fits.
        recompute_s: modelled seconds of recomputation and exposed transfers in one step; None if no plan fits.
        reason: why no plan fits; empty if a plan fits.
        proven: whether it is proven that no plan fits. False if a plan fits, or if one may exist that was not found.
        chunks: number of chunks into which the loss is split; 1 if the loss is not split.
    """

    batch: int
    fits: bool = False
    budget: str | None = None
    peak_bytes: int
    step_s: float | None = None
    samples_per_s: float | None = None
    recompute_s: float | None = None
    reason: str = ""
    proven: bool = False
    chunks: int = 1

    @property
    def recomputing(self) -> float | None:
        """Fraction of the modelled step time that is recomputation and exposed transfers; None if no plan fits."""
        return None if not self.step_s else (self.recompute_s or 0.0) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Table of whole training steps at several batch sizes within a device's memory, as `remat.fit` returns it.

    Attributes:
        model: name of the model.
        memory_bytes: bytes of the memory of one rank's device.
        optimizer: name of the optimizer, as requested.
        margin: part of the memory that a step must leave free, from 0 to below 1.
        optimizer_code: Python expression that makes the optimizer of ``model.parameters()``; empty if the user gave a
            callable instead of a name.
        accumulate: number of micro-batches whose gradients are summed before the optimizer steps.
        cost: the cost model.
        lower: the lowering that steps were traced for.
        ranks: number of ranks that train.
        sharding: how the ranks train together, as text, such as ``"8 ranks by DDP"``; empty for one rank.
        parameter_bytes: bytes of parameters on one rank between steps.
        gradient_bytes: bytes of gradients on one rank after backward.
        state_bytes: bytes of the optimizer's state on one rank.
        optimizer_bytes: most bytes that the optimizer's step allocates temporarily.
        rows: the rows, smallest batch first.
        offload: the link over which saved values may be offloaded; empty if none may.
        host_memory: bytes that offloaded values may take in the host's memory; None: no limit.
        policies: policies by module, as JSON; empty if there are none.
        asked_cost: name of the requested cost model; empty for the default one, and for one that is not registered.
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
    host_memory: int | None = None
    policies: str = ""
    asked_cost: str = ""
    margin: float = 0.0
    optimizer_code: str = ""
    accumulate: int = 1

    @property
    def largest(self) -> FitRow | None:
        """The row of the largest batch that fits; None if no batch fits."""
        return max((r for r in self.rows if r.fits), key=lambda r: r.batch, default=None)

    @property
    def best(self) -> FitRow | None:
        """The row with the most samples per second; among equally fast rows, the one with the smallest batch.

        None if no batch fits.
        """
        fits = (r for r in self.rows if r.fits)
        return max(fits, key=lambda r: (r.samples_per_s or 0.0, -r.batch), default=None)

    @property
    def largest_batch(self) -> int | None:
        """The largest batch of one rank that fits; None if no batch fits."""
        return None if self.largest is None else self.largest.batch

    @property
    def best_batch(self) -> int | None:
        """The batch of one rank with the most samples per second; None if no batch fits."""
        return None if self.best is None else self.best.batch

    @property
    def code(self) -> str:
        """Python code for the row `best`: the call of `torch.compile` with the row's budget, then the optimizer.

        The code leaves out the optimizer if the user gave it as a callable. With several micro-batches in a step, the
        code ends with a function that runs one step. The code is empty if no batch fits.
        """
        if self.best is None:
            return ""
        lines = [self.code_for(self.best)]
        if self.optimizer_code:
            lines.append(f"optimizer = {self.optimizer_code}")
        if self.accumulate > 1:
            lines += [line.format(self.accumulate, self.best.batch) for line in _ACCUMULATING]
        return "\n".join(lines)

    def code_for(self, row: FitRow) -> str:
        """Return the line of code that calls `torch.compile` with the budget of a row; empty if no plan fits."""
        if row.budget is None:
            return ""
        budget = Budget.parse(row.budget)
        # `torch.compile` takes a plain int as a peak in bytes.
        shown = str(budget.peak_bytes) if budget.on_peak else row.budget
        options = [f'"budget": {shown}']
        if self.lower != "inductor":
            options.append(f'"lower": "{self.lower}"')
        if self.asked_cost:
            options.append(f'"cost": "{self.asked_cost}"')
        # `torch.compile` refuses `offload` beside a budget on saved bytes.
        if budget.on_peak and self.offload:
            options.append(f'"offload": "{self.offload}"')
        if self.host_memory is not None:
            options.append(f'"host_memory": {self.host_memory}')
        if self.policies:
            options.append(f'"policies": {self.policies}')
        if row.chunks > 1:
            options.append(f'"chunk": {row.chunks}')
        return f'model = torch.compile(model, backend="remat", options={{{", ".join(options)}}})'

    def to_json(self) -> str:
        """Return the table as JSON text: all fields, ``largest_batch``, ``best_batch`` and ``code``."""
        names = ("largest_batch", "best_batch", "code")
        properties = {name: getattr(self, name) for name in names}
        return json.dumps(asdict(self) | properties, indent=2) + "\n"

    def __str__(self) -> str:
        ranks = f" on each of {self.sharding}" if self.sharding else ""
        note = f", of which {100 * self.margin:g} % stays free" if self.margin else ""
        note += f", {self.accumulate} micro-batches in a step" if self.accumulate > 1 else ""
        lines = [
            f"{self.model}, {self.optimizer}, {format_bytes(self.memory_bytes)} of memory{ranks}{note}",
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
        limit = self.memory_bytes * (1 - self.margin)
        refused = [r for r in self.rows if not r.fits and r.peak_bytes <= limit]
        if refused and self.largest:
            # The memory suffices, so another limit is exceeded, such as `host_memory`.
            lines.append(f"batch {refused[0].batch}: {refused[0].reason}")
        if self.largest is None or self.best is None:
            return "\n".join([*lines, f"no batch fits: {self.rows[0].reason}"])
        largest, best = self.largest, self.best
        each = " on each rank" if self.ranks > 1 else ""
        lines.append(
            f"largest batch that fits: {largest.batch}{each}; most samples per second: batch "
            f"{best.batch}{each}, by {self.cost}"
        )
        first, *others = self.code.split("\n")
        lines += [f"{first}  # batch {best.batch}", *others]
        if self.code_for(largest) != self.code_for(best):
            lines.append(f"{self.code_for(largest)}  # batch {largest.batch}")
        return "\n".join(lines)


#: Last lines of `Fit.code` if a step has several micro-batches: ``{0}`` is their number, ``{1}`` the samples in each.
_ACCUMULATING = (
    "def train_step(micro_batches, loss_of):  # {0} micro-batches of {1}",
    "    for batch in micro_batches:",
    "        (loss_of(model, batch) / {0}).backward()",
    "    optimizer.step()",
    "    optimizer.zero_grad()",
)
_HEAD = ("batch", "peak", "step", "recomputing", "samples/s", "budget")


def _cells(row: FitRow) -> tuple[str, ...]:
    """Format a row of the table as cells, one for each heading in `_HEAD`."""
    peak = format_bytes(row.peak_bytes)
    if row.budget is None:
        verdict = "does not fit" if row.proven else "no plan found"
        return (str(row.batch), peak, "–", "–", "–", verdict)
    rate = row.samples_per_s or 0.0
    return (
        str(row.batch),
        peak,
        f"{1e3 * (row.step_s or 0.0):,.4g} ms",
        f"{row.recomputing or 0.0:.1%}",
        f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}",
        Budget.parse(row.budget).label,
    )
