"""One whole training step within a memory: what it takes under a plan, which plan to take, and how long it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from remat.errors import BudgetError
from remat.graph.costs import DEVICES, CostModel, Device, Profile, calibrated, node_costs
from remat.graph.costs.auto import preset_of
from remat.graph.lowering import Decision
from remat.planning.decider import Decided
from remat.planning.fit import FitRow
from remat.planning.fit_fixed import Fixed
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
        on_cpu: whether the step is to run on this machine's CPU.
    """

    planner: Planner
    fixed: Fixed
    memory_bytes: int
    other_bytes: int
    link_gbps: float
    on_cpu: bool
    _memories: dict[Decision, StepMemory] = field(default_factory=dict, repr=False)

    def row(self, batch: int) -> FitRow:
        """The cheapest plan found that fits, and what it comes to."""
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
            return FitRow(batch=batch, fits=False, budget=None, peak_bytes=stepping, reason=reason)
        found: tuple[Decided, Budget] | None = None
        least = peak = self._peak(full)
        if peak <= self.memory_bytes:
            found = full, Budget(share=1.0)
        elif sharding.ranks == 1:
            found, least = self._within_peak()
        else:
            found, least = self._within_share()
        if found is None:
            reason = (
                f"the least peak of batch {batch} that was found, or is possible, is {format_bytes(least)}, "
                f"{format_bytes(least - self.memory_bytes)} more than there is: take a smaller batch, an "
                "optimizer with less state, or more ranks with FSDP"
            )
            return FitRow(batch=batch, fits=False, budget=None, peak_bytes=least, reason=reason)
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

    def _memory(self, decided: Decided) -> StepMemory:
        known = self._memories.get(decided.decision)
        if known is None:
            known = StepMemory.of(
                self.planner,
                decided,
                workspaces=self.on_cpu,
                block_sizes=self.fixed.sharding.block_sizes,
            )
            self._memories[decided.decision] = known
        return known

    def _peak(self, decided: Decided) -> int:
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

    def _within_peak(self) -> tuple[tuple[Decided, Budget] | None, int]:
        """The cheapest decision found whose peak fits, with the budget for it; and the least peak known.

        What a compiler, or workspaces, make of the simulated peak is off it by about as much for one plan
        as for the next, so the search is aimed by what the last plan was off. Where that comes to nothing,
        shares of what may be saved are tried.
        """
        planner = self.planner
        least = self._peak(planner.full)
        beside = least - self._memory(planner.full).peak
        room = self.memory_bytes - beside
        off = least - beside - planner.peak(planner.full)
        possible = planner.peaks.search.least_possible
        aim = room - off
        # What fuses is planned by its expected peak; of other graphs the simulated one is bounded.
        eager = planner.state.joint.lower == "eager"
        for turn in range(_SEARCHES):
            if aim < possible:
                lower = max(possible + off + beside, self.memory_bytes + 1)
                least = lower if turn == 0 else min(least, lower)
                break
            try:
                decided = planner.decide(Budget(peak_bytes=aim))
            except BudgetError:
                least = min(least, planner.peaks.least_found + off + beside)
                break
            peak = self._peak(decided)
            if peak <= self.memory_bytes:
                return (decided, Budget(peak_bytes=aim if eager else room)), peak
            least = min(least, peak)
            simulated = planner.peak(decided)
            off = peak - beside - simulated
            aim = min(aim, simulated) - (1 + turn) * (peak - self.memory_bytes)
        if eager and not off:
            return None, least
        found, seen = self._within_share()
        within = None
        if found is not None:
            bound = planner.peak(found[0]) if eager else room
            within = found[0], Budget(peak_bytes=bound)
        return within, seen

    def _within_share(self) -> tuple[tuple[Decided, Budget] | None, int]:
        """The decision at the highest share that fits, and the least peak seen."""
        least = self._peak(self.planner.full)
        best: tuple[Decided, Budget] | None = None
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

    def _at(self, share: float, least: int) -> tuple[Decided | None, int]:
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

    def _step_s(self, decided: Decided) -> float:
        computing = self._once_s + decided.cost / 1e12
        sending = self.fixed.sharding.sent_bytes / (self.link_gbps * 1e9)
        tbps = device_of(self.planner.request.cost).memory_tbps
        return max(computing, sending) + self.fixed.use.moved_bytes / (tbps * 1e12)


def is_cpu(device: Device) -> bool:
    """Whether a device is a CPU: a preset, or this machine's, measured."""
    return device.name.startswith("cpu") or device.name == preset_of("cpu")


def device_of(cost: CostModel) -> Device:
    """The device that a cost model is about; an H100 where it does not say."""
    device = getattr(cost, "device", None)
    if isinstance(device, Device):
        return device
    if isinstance(cost, Profile):
        return calibrated(device or "here")
    return DEVICES["h100"]
