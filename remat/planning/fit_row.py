"""One whole training step within a memory: what it takes under a plan, which plan to take, and how long it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from remat.errors import BudgetError
from remat.graph.costs import DEVICES, CostModel, Device, Profile, calibrated, node_costs
from remat.graph.lowering import Decision
from remat.planning.candidates import Candidate
from remat.planning.fit import FitRow
from remat.planning.fit_fixed import Fixed
from remat.planning.fit_known import QUICK, Known, runnable
from remat.planning.planner import Planner
from remat.planning.step_memory import StepMemory
from remat.units import Budget, bytes_of_share, format_bytes

#: Searches within a peak that there are at most, where a compiler's peak is off the simulated one.
_SEARCHES = 4
#: Shares that are tried where several ranks train, from the highest.
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitting:
    """Fits one captured step into a memory.

    Attributes:
        planner: decides the step.
        fixed: what it takes whatever the plan.
        memory_bytes: the memory of one rank.
        other_bytes: bytes of inputs and buffers.
        link_gbps: GB/s that a rank sends.
    """

    planner: Planner
    fixed: Fixed
    memory_bytes: int
    other_bytes: int
    link_gbps: float
    _memories: dict[Decision, StepMemory] = field(default_factory=dict, repr=False)

    def row(self, batch: int, others: Callable[[], Known | None] = lambda: None) -> FitRow:
        """The cheapest plan found that fits, and what it comes to.

        Args:
            batch: of this step.
            others: finds what is known of the step of another batch, which then stands for what is found at this
                one; None where there is none, or it cannot be made.
        """
        full = self.planner.full
        sharding = self.fixed.sharding
        stepping = self.fixed.stepping_bytes + self.other_bytes + self._memory(full).output_bytes
        if stepping > self.memory_bytes:
            reason = (
                f"while the optimizer steps, parameters, gradients, its state, inputs and outputs take "
                f"{format_bytes(stepping)}, {format_bytes(stepping - self.memory_bytes)} more than there is; "
                "no plan changes that: take a smaller batch, an optimizer with less state or whose step takes "
                "less (such as adamw:fused=True), or more ranks with FSDP"
            )
            return _without_plan(batch, stepping, reason, proven=True)
        found: tuple[Candidate, Budget] | None = None
        least = peak = self._peak(full)
        if peak <= self.memory_bytes:
            found = full, Budget(share=1.0)
        elif sharding.ranks > 1:
            found, least = self._within_share()
        elif self._least_possible > self.memory_bytes:
            least = self._least_possible
        else:
            found, least = self._within_peak(others)
        if found is None:
            proven = least == self._least_possible
            which = "that any plan can have" if proven else "that was found"
            reason = (
                f"the least peak of batch {batch} {which} is {format_bytes(least)}, "
                f"{format_bytes(least - self.memory_bytes)} more than there is: take a smaller batch, an "
                "optimizer with less state, or more ranks with FSDP"
            )
            return _without_plan(batch, least, reason, proven=proven)
        decided, budget = found
        step_s = self._step_s(decided)
        return FitRow(
            batch=batch,
            fits=True,
            budget=str(budget),
            peak_bytes=max(self._peak(decided), stepping),
            step_s=step_s,
            samples_per_s=batch * sharding.ranks / step_s,
            recompute_s=decided.cost / 1e12,
        )

    @cached_property
    def known(self) -> Known:
        """Decisions on this step that no memory has a part in."""
        return Known(self.planner)

    @property
    def _eager(self) -> bool:
        """Whether the step runs as its graph stands: then simulated peaks are bounded from below.

        What fuses is planned by its expected peak, of which nothing is proven.
        """
        return self.planner.state.joint.lower == "eager"

    @cached_property
    def _least_possible(self) -> int:
        """Bytes that are alive at once under every plan on one rank; 0 where nothing is proven."""
        if not self._eager or self.fixed.sharding.ranks > 1:
            return 0
        return self.planner.search.least_possible + self._beside

    @cached_property
    def _beside(self) -> int:
        """Bytes of a step on one rank that the memory of its graph does not have."""
        full = self.planner.full
        return self._peak(full) - self._memory(full).peak

    def _memory(self, decided: Candidate) -> StepMemory:
        known = self._memories.get(decided.decision)
        if known is None:
            known = StepMemory.of(
                self.planner,
                decided,
                block_sizes=self.fixed.sharding.block_sizes,
            )
            self._memories[decided.decision] = known
        return known

    def _peak(self, decided: Candidate) -> int:
        """Most bytes alive on a rank while forward and backward run under a decision."""
        memory, s = self._memory(decided), self.fixed.sharding
        always = s.parameter_bytes + self.other_bytes + self.fixed.use.state_bytes + s.bucket_bytes
        if s.shards == 1:
            return memory.peak + always - memory.input_bytes
        forward = always + s.gathered_bytes
        running = memory.sharded_peak(
            s.shards, forward_bytes=forward, backward_bytes=forward + s.reduced_bytes
        )
        return max(running, always + s.gradient_bytes + s.final_bytes + memory.output_bytes)

    def _within_peak(
        self, others: Callable[[], Known | None]
    ) -> tuple[tuple[Candidate, Budget] | None, int]:
        """The cheapest decision found whose peak fits, with the budget for it; and the least peak known.

        What no memory has a part in is looked at first, up to where more would take long; then a search is aimed
        at this memory. What neither fits, the rest of the former may.
        """
        known = others()
        found = None if known is None else known.on(self.planner)
        if found is None:
            found = self.known.on(self.planner) or iter(())
        candidates = runnable(found, self._peak)
        seen = [self.planner.full, *islice(candidates, QUICK)]
        aimed = self._aimed()
        seen += [aimed] if aimed else candidates
        fits = [d for d in seen if self._peak(d) <= self.memory_bytes]
        if not fits:
            return None, min(map(self._peak, seen))
        best = min(fits, key=lambda d: (d.cost, self._peak(d)))
        bound = self.planner.peak(best) if self._eager else self.memory_bytes - self._beside
        return (best, Budget(peak_bytes=bound)), self._peak(best)

    def _aimed(self) -> Candidate | None:
        """A decision whose peak fits, by searches for a simulated peak; None where none does.

        What a compiler, or workspaces, make of the simulated peak is off it by about as much for one plan
        as for the next, so each search is aimed by what the last plan was off.
        """
        planner = self.planner
        off = self._peak(planner.full) - self._beside - planner.peak(planner.full)
        aim = self.memory_bytes - self._beside - off
        for turn in range(_SEARCHES):
            try:
                decided = planner.decide(Budget(peak_bytes=aim))
            except BudgetError:
                return None
            over = self._peak(decided) - self.memory_bytes
            if over <= 0:
                return decided
            aim = min(aim, planner.peak(decided)) - (1 + turn) * over
        return None

    def _within_share(self) -> tuple[tuple[Candidate, Budget] | None, int]:
        """The decision at the highest share that fits, and the least peak seen."""
        least = self._peak(self.planner.full)
        best: tuple[Candidate, Budget] | None = None
        above = 1.0
        for share in _SHARES:
            fits, least = self._at(share, least)
            if fits is not None:
                best = fits, Budget(share=share)
                break
            above = share
        for _ in range(3 if best else 0):
            assert best is not None
            middle = round(((best[1].share or 0.0) + above) / 2, 3)
            fits, least = self._at(middle, least)
            if fits is None:
                above = middle
            else:
                best = fits, Budget(share=middle)
        return best, least

    def _at(self, share: float, least: int) -> tuple[Candidate | None, int]:
        """The decision at a share if it fits, and the lesser of its peak and another."""
        capacity = max(self.planner.least_bytes, bytes_of_share(share, self.planner.full_bytes))
        decided = self.planner.at(capacity)
        peak = self._peak(decided)
        return (decided if peak <= self.memory_bytes else None), min(least, peak)

    @cached_property
    def _once_s(self) -> float:
        """Modelled seconds of every node once."""
        state = self.planner.state
        return sum(node_costs(state.index, state.storages, self.planner.request.cost)) / 1e12

    def _step_s(self, decided: Candidate) -> float:
        computing = self._once_s + decided.cost / 1e12
        sending = self.fixed.sharding.sent_bytes / (self.link_gbps * 1e9)
        tbps = device_of(self.planner.request.cost).memory_tbps
        return max(computing, sending) + self.fixed.use.moved_bytes / (tbps * 1e12)


def _without_plan(batch: int, peak_bytes: int, reason: str, *, proven: bool) -> FitRow:
    return FitRow(
        batch=batch, fits=False, budget=None, peak_bytes=peak_bytes, reason=reason, proven=proven
    )


def device_of(cost: CostModel) -> Device:
    """The device that a cost model is about; an H100 where it does not say."""
    device = getattr(cost, "device", None)
    if isinstance(device, Device):
        return device
    if isinstance(cost, Profile):
        return calibrated(device or "here")
    return DEVICES["h100"]
