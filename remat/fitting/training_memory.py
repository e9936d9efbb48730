"""Find a plan with which one training step fits a rank's memory, with the rank's bytes and the modelled time.

A rank is a process with one device. A step is forward, backward and the optimizer's step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch

from remat.errors import BudgetError, RematError
from remat.fitting.sharding import Sharding, shard
from remat.fitting.table import FitRow
from remat.graph.costs import DEVICES, CostModel, Device, Profile, calibrated
from remat.graph.costs.auto import is_cpu
from remat.graph.joint import JointGraph, primals_of, split_outputs
from remat.graph.memory.fused_liveness import FusedWalk
from remat.graph.memory.liveness import StepWalk, StorageKind, sums_of
from remat.graph.memory.storages import storage_bytes, storage_key
from remat.graph.problems.lowering import Decision
from remat.options import Training
from remat.passes.core.state import Costs
from remat.planning.pipelines import for_walk, step_costs_of
from remat.planning.planner import Planner
from remat.planning.search.aim import aim
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT
from remat.planning.search.measures import Measures
from remat.planning.search.pool import CandidatePool, Limits
from remat.planning.search.proposals import search_of
from remat.running.optimizer import OptimizerUse, trace_optimizer
from remat.solvers.graph.problem import evaluate
from remat.torch_compat import pytree
from remat.units import Budget, bytes_of_share, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank (a process with one device), and the bytes on its device that depend on neither batch nor plan.

    Attributes:
        memory_bytes: bytes of the device's memory that the step may take.
        link_gbps: GB/s that the rank can send to other ranks.
        accumulate: number of micro-batches whose gradients are summed before the optimizer steps.
        sharding: bytes of parameters, of gradients, and of the buffers of collectives.
        use: bytes of the optimizer's state, and bytes that the optimizer's step allocates.
    """

    memory_bytes: int
    link_gbps: float
    accumulate: int
    sharding: Sharding
    use: OptimizerUse

    @classmethod
    def of(
        cls,
        model: Any,
        parameters: Sequence[torch.Tensor],
        training: Training,
        memory_bytes: int,
        cost: CostModel,
        joint: JointGraph | None = None,
    ) -> Self:
        """Build rank 0, whose shards are the largest: compute its sharding, and trace the optimizer on its parameters.

        Args:
            model: a module or a function.
            parameters: the parameters of ``model``.
            training: how the model is trained.
            memory_bytes: bytes of a rank's memory that a step may take.
            cost: the cost model.
            joint: a captured step, which shows which parameters get a gradient. None: all parameters that are not
                frozen get a gradient.
        """
        unused = _without_gradient(model, parameters, joint)
        used = (p for i, p in enumerate(parameters) if i not in unused)
        trained = {key for p in used if (key := storage_key(p)) is not None}
        sharding = Sharding.of(model, list(parameters), trained, training.ranks, training.fsdp)
        shards = [shard(p, sharding.shards) for p in parameters]
        # PyTorch's default: on a GPU, an optimizer works on all parameters at once, which takes more memory.
        foreach = not is_cpu(device_of(cost))
        use = trace_optimizer(training.optimizer, shards, without_gradient=unused, foreach=foreach)
        return cls(
            memory_bytes=memory_bytes,
            link_gbps=training.link_gbps,
            accumulate=training.accumulate,
            sharding=sharding,
            use=use,
        )

    @property
    def stepping_bytes(self) -> int:
        """Bytes on the rank while the optimizer steps, without the model's inputs, buffers and outputs."""
        s = self.sharding
        own = s.parameter_bytes + s.gradient_bytes + s.bucket_bytes
        return own + self.use.state_bytes + self.use.step_bytes

    def check(self, name: str, model: Any, parameters: Sequence[torch.Tensor]) -> None:
        """Check that the parameters of a model fit the rank's memory.

        Raises:
            BudgetError: the memory is too small. The message names the missing bytes and, if sharding can help, the
                number of ranks that suffice.
        """
        s = self.sharding
        short = s.parameter_bytes - self.memory_bytes
        if short <= 0:
            return
        trained = {key for p in parameters if p.requires_grad and (key := storage_key(p))}
        # A single rank cannot shard parameters, so the advice is computed for two ranks.
        shared = Sharding.of(model, list(parameters), trained, max(2, s.ranks), fsdp=True)
        room = self.memory_bytes - max(
            shared.gathered_bytes + shared.reduced_bytes, shared.final_bytes
        )
        advice = "take a smaller model, or a type of fewer bytes"
        if room > 0:
            parts = -(-self.stepping_bytes * s.shards // room)
            advice = (
                f"share them among {parts} ranks or more by FSDP (ranks={parts}, fsdp=True; on the command "
                f"line --ranks {parts} --fsdp), or {advice}"
            )
        raise BudgetError(
            f"the parameters of {name} alone take {format_bytes(s.parameter_bytes)} on a rank, "
            f"{format_bytes(short)} more than the {format_bytes(self.memory_bytes)} that a step may take; with gradients and "
            f"the state of {self.use.name} it is {format_bytes(self.stepping_bytes)}: {advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory of forward and backward under one plan, at each program point.

    Attributes:
        total: bytes alive at each program point, parameters and inputs included.
        gradients: bytes of gradients at each program point, which ``total`` includes.
        root_gradients: bytes of the root's gradients, which ``gradients`` includes. FSDP2 divides a model into blocks
            and a root, see `Sharding`. A gradient counts as the root's if no parameter of a block has its size.
        boundary: number of program points of forward; those of backward follow.
        input_bytes: bytes of the parameters, buffers and inputs that the graph reads.
        output_bytes: bytes of the outputs of forward that are not inputs.
    """

    total: tuple[int, ...]
    gradients: tuple[int, ...]
    root_gradients: tuple[int, ...]
    boundary: int
    input_bytes: int
    output_bytes: int

    @classmethod
    def of(
        cls,
        measures: Measures,
        candidate: Candidate,
        *,
        block_sizes: frozenset[int] = frozenset(),
    ) -> StepMemory:
        """Compute the memory of a step under a candidate: simulated for an eager graph, estimated for fused code.

        Args:
            measures: object that splits the graph into forward and backward.
            candidate: the candidate.
            block_sizes: sizes in bytes of the parameters of FSDP2 blocks. A gradient of another size counts as a
                gradient of the root.
        """
        split = measures.split_of(candidate)
        kind_of_walk = FusedWalk if split.joint.lower == "inductor" else StepWalk
        walk = kind_of_walk(*for_walk(split))
        lifetimes = list(walk.lifetimes())
        spans = [lifetime[2:] for lifetime in lifetimes]
        gradients = [
            (nbytes, first, last)
            for storage, node, nbytes, first, last in lifetimes
            if walk.kind(storage, first, node) is StorageKind.GRADIENT
        ]
        program_points = len(walk.program_points)
        return cls(
            total=sums_of(spans, program_points),
            gradients=sums_of(gradients, program_points),
            root_gradients=sums_of(
                (g for g in gradients if g[0] not in block_sizes), program_points
            ),
            boundary=walk.boundary,
            input_bytes=sum(walk.sizes.nbytes[k] for k in walk.inputs),
            output_bytes=sum(b for k, b in walk.outputs.items() if k not in walk.inputs),
        )

    @property
    def peak(self) -> int:
        """Most bytes alive at one program point of forward or backward."""
        return max(self.total)

    def sharded_peak(self, shards: int, *, forward_bytes: int, backward_bytes: int) -> int:
        """Return the most bytes alive at once on one rank, if the gradients of blocks are sharded.

        Args:
            shards: number of parts of each gradient.
            forward_bytes: bytes on the rank during forward, among them the graph's parameters and other inputs.
            backward_bytes: bytes on the rank during backward, among them these parameters and inputs.
        """
        peak = 0
        curves = zip(self.total, self.gradients, self.root_gradients, strict=True)
        for program_point, (total, gradients, root) in enumerate(curves):
            # Of a block's gradient, only the rank's shard counts. A gradient of the root counts whole.
            rest = total - gradients - self.input_bytes + root - (root - gradients) // shards
            peak = max(
                peak, rest + (forward_bytes if program_point < self.boundary else backward_bytes)
            )
        return peak


@dataclass(frozen=True, kw_only=True, eq=False)
class StepFit:
    """Search for a plan that fits one captured step into the memory of a rank.

    Attributes:
        planner: planner of the step's graph.
        rank: the rank.
        other_bytes: bytes of inputs and buffers.
    """

    planner: Planner
    rank: Rank
    other_bytes: int
    _memories: dict[Decision, StepMemory] = field(default_factory=dict, repr=False)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions whose memory was computed for this batch size, to be tried for other batch sizes, too."""
        return tuple(self._memories)

    def row(self, batch: int, others: Sequence[Decision] = ()) -> FitRow:
        """Return the step's row of the table: figures of the cheapest fitting plan found, or the reason why none fits.

        Args:
            batch: batch size of the step.
            others: decisions of other batch sizes, to try if no search within the memory succeeds.
        """
        at_budget_one, sharding = self._at_budget_one, self.rank.sharding
        memory_bytes = self.rank.memory_bytes
        stepping = (
            self.rank.stepping_bytes + self.other_bytes + self._memory(at_budget_one).output_bytes
        )
        if stepping > memory_bytes:
            reason = (
                f"while the optimizer steps, parameters, gradients, its state, inputs and outputs take "
                f"{format_bytes(stepping)}, {format_bytes(stepping - memory_bytes)} more than they may; "
                "no plan changes that: take a smaller batch, an optimizer with less state or whose step takes "
                "less (such as adamw:fused=True), or more ranks with FSDP"
            )
            return FitRow(batch=batch, peak_bytes=stepping, reason=reason, proven=True)
        fitting: tuple[Candidate, Budget] | None = None
        if self._fits(at_budget_one):
            fitting = at_budget_one, Budget(share=1.0)
        elif sharding.ranks > 1:
            fitting = self._within_ratio()
        elif self._least_possible <= memory_bytes:
            fitting = self._within_peak(others)
        if fitting is None:
            proven = self._least_possible > memory_bytes
            peaks = map(self._peak_of, self._memories.values())
            least = self._least_possible if proven else min(peaks)
            which = "that any plan can have" if proven else "that was found"
            reason = (
                f"the least peak of batch {batch} {which} is {format_bytes(least)}, "
                f"{format_bytes(least - memory_bytes)} more than it may be: take a smaller batch, an "
                "optimizer with less state, or more ranks with FSDP"
            )
            return FitRow(batch=batch, peak_bytes=least, reason=reason, proven=proven)
        candidate, budget = fitting
        step_s = self._step_s(candidate)
        return FitRow(
            batch=batch,
            fits=True,
            budget=str(budget),
            # The peak may be in the optimizer's step.
            peak_bytes=max(self._peak(candidate), stepping),
            step_s=step_s,
            samples_per_s=batch * self.rank.accumulate * sharding.ranks / step_s,
            recompute_s=self.rank.accumulate * candidate.cost / 1e12,
        )

    @cached_property
    def _at_budget_one(self) -> Candidate:
        """The step's candidate at budget 1, which is the step without remat."""
        return self.planner.search.offloads.with_tagged(self.planner.search.decisions.at_budget_one)

    @property
    def _eager(self) -> bool:
        """Whether the step's graph runs unfused, so that proven bounds on the simulated peak hold for the step."""
        # Peaks of fused code are only estimated, and no bound on them is proven.
        return self.planner.context.is_eager

    @cached_property
    def _least_possible(self) -> int:
        """Proven lower bound in bytes on the step's peak, whatever the plan; 0 if no bound is proven."""
        if not self._eager or self.rank.sharding.ranks > 1:
            return 0
        return self.planner.search.schedules.least_possible + self._outside_graph

    @cached_property
    def _outside_graph(self) -> int:
        """Bytes, such as optimizer state, on the rank during forward and backward that are not in the graph's peak."""
        at_budget_one = self._at_budget_one
        return self._peak(at_budget_one) - self._memory(at_budget_one).peak

    def _memory(self, candidate: Candidate) -> StepMemory:
        """Return the memory of the step under a candidate; the memory is computed once for each decision."""
        memory = self._memories.get(candidate.decision)
        if memory is None:
            sizes = self.rank.sharding.block_sizes
            memory = StepMemory.of(self.planner.search.measures, candidate, block_sizes=sizes)
            self._memories[candidate.decision] = memory
        return memory

    def _peak(self, candidate: Candidate) -> int:
        """Return the most bytes alive on a rank while forward and backward run under a candidate."""
        return self._peak_of(self._memory(candidate))

    def _peak_of(self, memory: StepMemory) -> int:
        """Return the most bytes alive on a rank while forward and backward run, from the memory of the step's graph."""
        s = self.rank.sharding
        always = s.parameter_bytes + self.other_bytes + self.rank.use.state_bytes + s.bucket_bytes
        if self.rank.accumulate > 1:  # the gradients of earlier micro-batches are on the rank, too
            always += s.gradient_bytes
        if s.shards == 1:
            # `memory.peak` and `always` both count the inputs that the graph reads, so these are subtracted once.
            return memory.peak + always - memory.input_bytes
        forward = always + s.gathered_bytes
        running = memory.sharded_peak(
            s.shards, forward_bytes=forward, backward_bytes=forward + s.reduced_bytes
        )
        return max(running, always + s.gradient_bytes + s.final_bytes + memory.output_bytes)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether the bytes of forward and backward under a candidate plan fit the rank's memory."""
        return self._peak(candidate) <= self.rank.memory_bytes

    def _within_peak(self, others: Sequence[Decision]) -> tuple[Candidate, Budget] | None:
        """Return the cheapest candidate found whose peak fits the rank's memory, with a budget; None if none fits."""
        # Decisions of other batches are tried only if no search near the rank's memory succeeds. Searches at other peaks
        # follow only if none of these decisions fits.
        limits = Limits(peak_bytes=self.rank.memory_bytes, measure=self._peak)
        pool = CandidatePool(self._aimed())
        for candidates in (self._adapted(others), self._searched()):
            if pool.cheapest(limits) is None:
                pool.add(*candidates)
        pool.add(*map(self._at_ratio, DEFAULT.fitting.few_ratios))
        best = pool.cheapest(limits, lambda d: (d.cost, self._peak(d)))
        if best is None:
            return None
        bound = (
            self.planner.search.measures.simulated(best)
            if self._eager
            else self.rank.memory_bytes - self._outside_graph
        )
        return best, Budget(peak_bytes=bound)

    def _aimed(self) -> Iterator[Candidate]:
        """Yield candidates whose peaks on the rank approach the bytes of the rank's memory."""
        # A search limits the simulated peak. For similar plans, this peak differs from the peak on the rank by similar
        # bytes.
        planner, memory_bytes = self.planner, self.rank.memory_bytes

        def decide(peak_bytes: int) -> Candidate | None:
            try:
                return planner.decide(Budget(peak_bytes=peak_bytes))
            except BudgetError:
                return None

        at_budget_one = self._at_budget_one
        start = (
            memory_bytes
            - self._peak(at_budget_one)
            + planner.search.measures.simulated(at_budget_one)
        )
        return aim(decide, self._peak, memory_bytes, start=start, rounds=DEFAULT.fitting.searches)

    def _searched(self) -> Iterator[Candidate]:
        """Yield candidates that do not depend on the rank's memory; other batch sizes try their decisions, too."""
        search = self.planner.search
        with_tagged, at_budget_one = search.offloads.with_tagged, search.decisions.at_budget_one
        # A new search does not start from decisions that `_aimed` found, which depend on the memory.
        peaks = search_of(search.context)
        yield with_tagged(peaks.least_peak)
        low, high = peaks.least_found, search.measures.simulated(at_budget_one)
        count = DEFAULT.fitting.peaks(len(search.context.state.index))
        for k in range(1, count):
            candidate = peaks.searched(peaks.limits(low + (high - low) * k // count))
            if candidate is not None:
                yield with_tagged(candidate)

    def _adapted(self, others: Iterable[Decision]) -> Iterator[Candidate]:
        """Yield candidates with valid decisions of other batch sizes, and with bytes and costs of this step."""
        context = self.planner.context
        state, lowered = context.state, context.lowered
        costs = state.get(Costs(context.request.cost))
        for decision in others:
            try:
                scored = evaluate(lowered.problem, lowered.saved_of(decision))
                cost = scored.recompute_cost
                if decision.is_ordered:
                    cost = sum(costs[state.index.by_name[name]] for name in decision.further_runs)
                # Offloads record bytes, which differ at another batch size.
                decision = replace(decision, offloads=())
                candidate = self.planner.search.offloads.with_tagged(
                    Candidate.of(lowered, decision, cost)
                )
                # Computing the peak splits the graph, which may fail: whether a value is a view can depend on sizes.
                self._peak(candidate)
            except (RematError, KeyError):  # another batch may have other operators
                continue
            yield candidate

    def _within_ratio(self) -> tuple[Candidate, Budget] | None:
        """Return the candidate at the highest ratio of saved bytes that fits, with the budget; None if none fits."""

        def fits(ratio: float) -> bool:
            return self._fits(self._at_ratio(ratio))

        low = next(filter(fits, DEFAULT.fitting.ratios), None)
        if low is None:
            return None
        high = (1.0, *DEFAULT.fitting.ratios)[DEFAULT.fitting.ratios.index(low)]
        for _ in range(3):
            middle = round((low + high) / 2, 3)
            low, high = (middle, high) if fits(middle) else (low, middle)
        return self._at_ratio(low), Budget(share=low)

    def _at_ratio(self, ratio: float) -> Candidate:
        """Return the candidate under a budget that is a ratio of the bytes that the runtime-optimal partition saves."""
        context, search = self.planner.context, self.planner.search
        nbytes = max(context.least_bytes, bytes_of_share(ratio, context.full_bytes))
        return search.offloads.with_tagged(search.decisions.at(nbytes))

    def _step_s(self, candidate: Candidate) -> float:
        """Return the modelled seconds of a step: the longer of computing and sending, plus the optimizer's time."""
        context, rank = self.planner.context, self.rank
        costs = step_costs_of(context.state, context.request.cost, required=True)
        # Costs are in ps.
        computing = rank.accumulate * (sum(costs) + candidate.cost) / 1e12
        sending = rank.sharding.sent_bytes / (rank.link_gbps * 1e9)
        # DDP sends the gradients once in a step. FSDP2 sends parameters and gradients in every micro-batch.
        if rank.sharding.shards > 1:
            sending *= rank.accumulate
        # The optimizer computes little, so its time is the time of its memory traffic.
        tbps = device_of(context.request.cost).memory_tbps
        return max(computing, sending) + rank.use.moved_bytes / (tbps * 1e12)


def device_of(cost: CostModel) -> Device:
    """Return the device that a cost model is for: the measured device of a `Profile`, or an H100 if none is named."""
    device = getattr(cost, "device", None)
    if isinstance(device, Device):
        return device
    if isinstance(cost, Profile):
        return calibrated(device or "here")
    return DEVICES["h100"]


def parameters_of(model: Any, arguments: Any) -> list[torch.Tensor]:
    """Return the parameters of a module, or a function's arguments that require a gradient; each once."""
    if isinstance(model, torch.nn.Module):
        return list(model.parameters())
    leaves = pytree.tree_leaves(arguments)
    distinct = {id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}
    return list(distinct.values())


def other_bytes(model: Any, arguments: Any, parameters: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a model's buffers, and of its inputs that are not parameters."""
    leaves = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        leaves += model.buffers()
    of_parameters = {storage_key(p) for p in parameters}
    sizes = {storage_key(t): storage_bytes(t) for t in leaves}
    return sum(nbytes for key, nbytes in sizes.items() if key not in of_parameters)


def _without_gradient(
    model: Any, parameters: Sequence[torch.Tensor], joint: JointGraph | None
) -> frozenset[int]:
    """Return positions of parameters that get no gradient: frozen ones, and those that the step does not use."""
    # A captured graph does not tell which parameter an input stands for. So inputs with a gradient and parameters are
    # matched by shape and dtype.
    without = {i for i, p in enumerate(parameters) if not p.requires_grad}
    if joint is None:
        return frozenset(without)
    gradients = Counter(_gradients(joint, only_static=isinstance(model, torch.nn.Module)))
    for i, parameter in enumerate(parameters):
        if i not in without:
            key = (tuple(parameter.shape), parameter.dtype)
            if not gradients[key]:
                without.add(i)
            gradients[key] -= 1
    return frozenset(without)


def _gradients(joint: JointGraph, *, only_static: bool) -> Iterator[tuple[Any, torch.dtype]]:
    """Yield shape and dtype of each input for which backward returns a gradient, or only of each static input."""
    returned = split_outputs(joint)[1]
    for i, (node, gradient) in enumerate(zip(primals_of(joint), returned, strict=False)):
        value = node.meta.get("val")
        if gradient is None or not isinstance(value, torch.Tensor):
            continue
        if i in joint.static_inputs or not only_static:
            yield tuple(map(int, value.shape)), value.dtype
