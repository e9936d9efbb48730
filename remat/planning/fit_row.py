"""One whole training step within a memory: what it takes under a plan, which plan to take, and how long it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from remat.errors import BudgetError
from remat.graph.costs import DEVICES, CostModel, Device, Profile, calibrated, node_costs
from remat.graph.joint import JointGraph, Role, role_of, split_outputs
from remat.graph.storages import storage_bytes, storage_key
from remat.planning.decider import Decided
from remat.planning.fit import FitRow
from remat.planning.planner import Planner
from remat.planning.sharding import Sharding, shard
from remat.planning.step_memory import StepMemory
from remat.running.optimizer import Make, OptimizerUse, trace_optimizer
from remat.torch_compat import pytree
from remat.units import Budget, bytes_of_share, format_bytes

#: Searches within a peak that there are at most, where a compiler's peak is off the simulated one.
_SEARCHES = 4
#: Shares that are tried where several ranks train, from the highest.
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What a step takes whatever the batch and the plan.

    Attributes:
        sharding: parameters, gradients and buffers of collectives.
        use: the optimizer's state, and what its step takes.
    """

    sharding: Sharding
    use: OptimizerUse

    @classmethod
    def of(
        cls,
        model: Any,
        parameters: Sequence[torch.Tensor],
        without_gradient: frozenset[int],
        optimizer: str | Make,
        *,
        ranks: int,
        fsdp: bool,
        foreach: bool,
    ) -> Fixed:
        """What a model and its optimizer take.

        Args:
            model: a module, or a function.
            parameters: its parameters.
            without_gradient: positions of those that get no gradient.
            optimizer: as for `remat.running.optimizer.trace_optimizer`.
            ranks: how many ranks there are.
            fsdp: whether they share the parameters.
            foreach: as for `trace_optimizer`.
        """
        trained = {
            key
            for i, p in enumerate(parameters)
            if i not in without_gradient and (key := storage_key(p)) is not None
        }
        sharding = Sharding.of(model, list(parameters), trained, ranks, fsdp)
        shards = [shard(p, sharding.shards) for p in parameters]
        use = trace_optimizer(optimizer, shards, without_gradient=without_gradient, foreach=foreach)
        return cls(sharding=sharding, use=use)

    @property
    def stepping_bytes(self) -> int:
        """Bytes while the optimizer steps, without inputs and outputs."""
        s = self.sharding
        own = s.parameter_bytes + s.gradient_bytes + s.bucket_bytes
        return own + self.use.state_bytes + self.use.step_bytes

    def check(
        self, memory_bytes: int, name: str, model: Any, parameters: Sequence[torch.Tensor]
    ) -> None:
        """Refuses a memory that the parameters alone do not fit.

        Raises:
            BudgetError: it is smaller; the message says by how much, and how many ranks would do.
        """
        s = self.sharding
        short = s.parameter_bytes - memory_bytes
        if short <= 0:
            return
        trained = {key for p in parameters if p.requires_grad and (key := storage_key(p))}
        shared = Sharding.of(model, list(parameters), trained, max(2, s.ranks), fsdp=True)
        room = memory_bytes - shared.gathered_bytes - shared.reduced_bytes
        advice = "take a smaller model, or a type of fewer bytes"
        if room > 0:
            parts = -(-self.stepping_bytes * s.shards // room)
            advice = (
                f"share them among {parts} ranks or more by FSDP (ranks={parts}, fsdp=True; on the command "
                f"line --ranks {parts} --fsdp), or {advice}"
            )
        raise BudgetError(
            f"the parameters of {name} alone take {format_bytes(s.parameter_bytes)} on a rank, "
            f"{format_bytes(short)} more than the memory of {format_bytes(memory_bytes)}; with gradients and "
            f"the state of {self.use.name} it is {format_bytes(self.stepping_bytes)}: {advice}"
        )


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

    def row(self, batch: int) -> FitRow:
        """The cheapest plan found that fits, and what it comes to."""
        full = self.planner.full
        sharding = self.fixed.sharding
        stepping = self.fixed.stepping_bytes + self.other_bytes + self._memory(full).output_bytes
        if stepping > self.memory_bytes:
            reason = (
                f"while the optimizer steps, parameters, gradients, its state, inputs and outputs take "
                f"{format_bytes(stepping)}, {format_bytes(stepping - self.memory_bytes)} more than there is; "
                "no plan changes that: take a smaller batch, an optimizer with less state, or more ranks "
                "with FSDP"
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
        return StepMemory.of(self.planner, decided, workspaces=self.on_cpu)

    def _peak(self, decided: Decided) -> int:
        """Most bytes alive on a rank while forward and backward run under a decision."""
        memory, s = self._memory(decided), self.fixed.sharding
        always = s.parameter_bytes + self.other_bytes + self.fixed.use.state_bytes + s.bucket_bytes
        if s.shards == 1:
            return memory.peak + always - memory.input_bytes
        forward = always + s.gathered_bytes
        return memory.sharded_peak(
            forward_bytes=forward, backward_bytes=forward + s.gradient_bytes + s.reduced_bytes
        )

    def _within_peak(self) -> tuple[tuple[Decided, Budget] | None, int]:
        """The cheapest decision found whose peak fits, with the budget for it; and the least peak known.

        What a compiler, or workspaces, make of the simulated peak is off it by about as much for one plan
        as for the next, so the search is aimed by what the last plan was off.
        """
        planner = self.planner
        full = planner.full
        beside = self._peak(full) - self._memory(full).peak
        room = self.memory_bytes - beside
        off = self._peak(full) - beside - planner.peak(full)
        aim = room - off
        least = self._peak(full)
        for _ in range(_SEARCHES):
            possible = planner.peaks.search.least_possible
            if aim < possible:
                return None, min(least, max(possible + off + beside, self.memory_bytes + 1))
            try:
                decided = planner.decide(Budget(peak_bytes=aim))
            except BudgetError:
                return None, min(least, planner.peaks.least_found + off + beside)
            peak = self._peak(decided)
            if peak <= self.memory_bytes:
                return (decided, Budget(peak_bytes=room)), peak
            least = min(least, peak)
            off = peak - beside - planner.peak(decided)
            aim = min(aim - 1, room - off)
        return None, least

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


def device_of(cost: CostModel) -> Device:
    """The device that a cost model is about; an H100 where it does not say."""
    device = getattr(cost, "device", None)
    if isinstance(device, Device):
        return device
    if isinstance(cost, Profile):
        return calibrated(device or "here")
    return DEVICES["h100"]


def parameters_of(model: Any, arguments: Any) -> list[torch.Tensor]:
    """Of a module its parameters, of a function the arguments that require a gradient; each once."""
    if isinstance(model, torch.nn.Module):
        return list(model.parameters())
    leaves = pytree.tree_leaves(arguments)
    found = {id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}
    return list(found.values())


def other_bytes(model: Any, arguments: Any, parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of buffers and inputs that are no parameters."""
    leaves = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        leaves += model.buffers()
    own = {storage_key(p) for p in parameters}
    found = {storage_key(t): storage_bytes(t) for t in leaves}
    return sum(nbytes for key, nbytes in found.items() if key not in own)


def without_gradient(
    model: Any, parameters: Sequence[torch.Tensor], joint: JointGraph | None
) -> frozenset[int]:
    """Positions of the parameters that a step gives no gradient: the frozen ones, and those it does not use.

    Which ones a graph uses is told by their shapes, of which alone there is anything to know.
    """
    frozen = {i for i, p in enumerate(parameters) if not p.requires_grad}
    if joint is None:
        return frozenset(frozen)
    given = Counter(_gradients(joint, only_static=isinstance(model, torch.nn.Module)))
    for i, parameter in enumerate(parameters):
        if i not in frozen:
            key = (tuple(parameter.shape), parameter.dtype)
            if not given[key]:
                frozen.add(i)
            given[key] -= 1
    return frozenset(frozen)


def _gradients(joint: JointGraph, *, only_static: bool) -> Iterator[tuple[Any, torch.dtype]]:
    """Shape and type of the inputs that backward returns a gradient for."""
    primals = [n for n in joint.graph.nodes if n.op == "placeholder" and role_of(n) is Role.PRIMAL]
    returned = split_outputs(joint)[1]
    for i, (node, gradient) in enumerate(zip(primals, returned, strict=False)):
        value = node.meta.get("val")
        if gradient is None or not isinstance(value, torch.Tensor):
            continue
        if i in joint.static_inputs or not only_static:
            yield tuple(map(int, value.shape)), value.dtype
