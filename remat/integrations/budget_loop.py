"""Make the code that Inductor generates meet a budget: plan, compile, simulate its memory, and replan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning, PlanError, record_warnings, warn
from remat.graph.branch_values import branches_on_16_bits, has_16_bits
from remat.graph.index import index_graph
from remat.graph.joint import JointGraph, copy_module
from remat.graph.lowering import Decision
from remat.graph.regions import calls_regions, is_region, split_region
from remat.graph.roles import classify
from remat.graph.source import located
from remat.integrations import plan_cache
from remat.integrations.compiled_memory import (
    CompiledGraph,
    compiled_timeline,
    held_bytes,
    write_timeline,
)
from remat.integrations.partitioner import (
    StepPartition,
    code_of,
    joint_of,
    name_of,
    parameters_of,
)
from remat.integrations.plan_cache import CachedPlan
from remat.integrations.workarounds import (
    GeneratedCode,
    compile_graph,
    deferred_kernels,
    masks_from_bytes,
    masks_to_bytes,
    rounded_as_in_eager,
)
from remat.passes.ranks.agree_ranks import AgreeRanks
from remat.planning.plan import Plan
from remat.planning.plan_text import learned_text
from remat.planning.planner import Planner, plan_graph
from remat.planning.request import PlanRequest
from remat.planning.search.compiled import CompiledSearch, input_bytes
from remat.units import Budget, format_apart, format_bytes

_LOG = logging.getLogger(__name__)

#: How often a step may be replanned because the compiled step exceeds its budget.
MOST_REPLANS = 3
#: How often a step may be replanned if its budget is a ratio of the peak, which can be met only approximately.
_OF_SHARES = 2
#: A budget that is a ratio of the peak counts as met if the compiled peak is at most 1/200 above the ratio's bytes.
_NEARLY = 200
#: If the budget is a ratio of the peak, a compiled peak more than 1/20 above the ratio's bytes causes a warning.
_FAR = 20
#: The budget that asks for the least peak. Before a peak in bytes is refused, the step is also planned for the least
#: peak.
_LEAST = Budget(peak_share=0.0)
#: Most replans in total under a budget that is a peak in bytes: `MOST_REPLANS` within the budget, then the first plan
#: for the least peak, then `_OF_SHARES` replans for the least peak.
_OF_PEAKS = MOST_REPLANS + 1 + _OF_SHARES
_UNSHRUNK = (
    "Weights, gradients and what one operator needs at once do not shrink with the budget. Raise the budget, "
    "or make the model or the batch smaller"
)


def compile_within_budget(
    step: StepPartition,
    known: CompiledBudget,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """Compile a step with Inductor, and replan until the compiled step meets its budget.

    The number of replans is limited. If no compiled step meets the budget, a peak in bytes raises
    an error, and a budget on saved bytes causes a warning. If the budget is a ratio of the peak, the
    returned step is the one with the least compiled peak.

    Args:
        step: partitions the graph, with a plan from ``known.plan``.
        known: measurements of this step's earlier compilations; it is updated.
        gm: the graph from Dynamo.
        inputs: example inputs of the compilation.
        patches: Inductor settings.

    Returns:
        The compiled step.

    Raises:
        RematError: planning failed, or no compiled step meets a budget that is a peak in bytes.
    """
    tried: list[tuple[int, Plan, Callable[..., Any], Sequence[GeneratedCode]]] = []
    try:
        while True:
            compiled, code = _compile_once(step, known, gm, inputs, patches)
            again = _plans_again(step, known)
            if step.made is not None:
                # Every rank knows the largest excess of all ranks. Comparing by it makes all ranks pick the same plan.
                taken = known.over if step.options.with_others else step.made.peak_bytes
                tried.append((taken, step.made, compiled, code))
            if not again:
                break
            step.stage(
                f"compiling again: the step takes {format_bytes(known.over)} more than its budget"
            )
    finally:
        known.search = None
    share = step.options.request.budget.peak_share
    nearly = share is not None or (step.over and not step.options.with_others)
    if len(tried) > 1 and nearly:
        # A replanned step may have a higher peak than an earlier one.
        _, step.made, compiled, code = min(tried, key=lambda one: one[0])
    if code:
        step.stage("compiling kernels")
        with torch_compat.inductor_config.patch(patches):
            for one in code:
                one.load()
    return compiled


def _compile_once(
    step: StepPartition,
    known: CompiledBudget,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
) -> tuple[Callable[..., Any], Sequence[GeneratedCode]]:
    """Plan and compile a step once, or load the compiled step with its plan from a cache.

    Afterwards the plan in ``step.made`` has the figures of the compiled code, if these are known.

    Returns:
        The compiled step, and the part of its generated code whose kernels are not compiled yet.
    """
    # Inductor compiles each nested region as a separate graph, so the step then has more than two graphs.
    whole = not calls_regions(gm)
    if whole and step.options.keeps_steps:
        attempt = Attempt(step, known, whole=True, traces=plan_cache.traces_of(gm, inputs))
        compiled = attempt.compile(gm, inputs, patches)
        if attempt.is_new:
            attempt.finish()
            return compiled, attempt.unloaded
        keys = plan_cache.graph_keys(compiled)
        if len(keys) == 1:  # no backward graph, hence no plan
            return compiled, attempt.unloaded
        record = plan_cache.find(keys) if keys else None
        if record is not None:
            with contextlib.suppress(PlanError):  # the record holds no valid plan
                restore(step, gm, record)
                return compiled, attempt.unloaded
    # The cached step has no usable plan: compile without AOTAutograd's cache, so that it is partitioned.
    attempt = Attempt(step, known, whole=whole)
    compiled = attempt.compile(gm, inputs, patches)
    attempt.finish()
    return compiled, attempt.unloaded


def _plans_again(step: StepPartition, known: CompiledBudget) -> bool:
    """Return whether to replan a step because the compiled step exceeds its budget.

    Raises:
        BudgetError: the compiled step exceeds a peak in bytes, and no replan is left.
    """
    made, options = step.made, step.options
    if made is not None and step.applied:
        warn_of_saved(made)
        return False
    if made is None or (step.over and not options.with_others) or options.check is not None:
        return False
    try:
        return known.replans(
            made,
            step.asked,
            largest=options.largest,
            can_hold=not step.over,
            together=options.with_others,
        )
    except BudgetError as error:
        if not step.runs_anyway:
            raise
        step.over = str(error)
        return False


class Attempt(torch_compat.CustomPartitionerFn):
    """One compilation of a step. Inductor calls this object to partition and to compile graphs.

    Args:
        step: plans and partitions the joint graph.
        known: measurements from earlier compilations of the step.
        whole: whether the step has exactly one forward and one backward graph. If not, nested
            compile regions (``torch.compiler.nested_compile_region``) are compiled as further
            graphs.
        traces: a digest to add to AOTAutograd's cache key, from `plan_cache.traces_of`. The whole
            compiled step may then come from AOTAutograd's cache. None: only single compiled graphs
            may come from a cache, that of Inductor.

    Attributes:
        is_new: whether a graph was partitioned or compiled; False if the whole step came from
            AOTAutograd's cache.
        record: the record to store beside the compiled step, so that a later process can restore
            the plan. `finish` adds the plan itself. None to store no record.
        unloaded: generated code of the step whose kernels are not compiled yet.
    """

    def __init__(
        self, step: StepPartition, known: CompiledBudget, *, whole: bool, traces: str | None = None
    ) -> None:
        self._step, self._known, self._whole = step, known, whole
        self._keeps, self._traces = traces is not None, traces or ""
        self.record: CachedPlan | None = None
        self._graphs: list[CompiledGraph] = []
        self._masks: frozenset[str] = frozenset()
        self._exact_branches = False
        self.is_new = False
        self.unloaded: list[GeneratedCode] = []

    def uuid(self) -> str:
        """Return the cache key of this compilation."""
        step = self._step
        return step.options.key(
            graphs_only=not self._keeps,
            traces=self._traces,
            compiled=self._known.key,
            beside=step.beside,
            over=step.over,
        )

    def __reduce__(self) -> Any:
        """Pickle the partitioner that holds the step's options, instead of this object.

        Inductor and AOTAutograd copy and pickle their settings, of which this object is one. A copy
        must not keep the step alive. `uuid`, the cache key, covers everything else that affects the
        compilation.
        """
        return self._step.options.__reduce_ex__(2)

    def compile(
        self, gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
    ) -> Callable[..., Any]:
        """Plan and compile the step with Inductor.

        Args:
            gm: the graph from Dynamo.
            inputs: example inputs of the compilation.
            patches: Inductor settings.

        Returns:
            The compiled step.
        """
        settings: dict[str, Any] = {
            # PyTorch may compile backward only when it first runs. The memory of the whole step is needed here.
            "force_non_lazy_backward_lowering": True
        }
        if not self._keeps:
            # On a hit in AOTAutograd's cache the partitioner is not called, so `remat.plans` would not list
            # the plan. Inductor's own cache of compiled graphs stays in use.
            settings["enable_autograd_cache"] = False
        if not self._whole:
            # Inductor knows the indices of the inputs that the step's backward may overwrite. It applies these
            # indices to the backward of a nested region too. That backward has other inputs, so it would overwrite
            # values before their last read.
            settings["donated_buffer"] = False
        deferred = self._whole and _on_cpu(gm, inputs)
        with (
            torch_compat.functorch_config.patch(settings),
            deferred_kernels(self.unloaded) if deferred else contextlib.nullcontext(),
        ):
            return torch_compat.compile_fx(  # type: ignore[return-value]
                gm,
                inputs,
                inner_compile=self.compile_graph,
                config_patches={**patches, "custom_partitioner_fn": self},
            )

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **convention: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph into forward and backward graph; Inductor calls this method.

        If the whole compiled step may be cached, the method also sets ``record``.

        Args:
            gm: the joint graph; it is changed.
            joint_inputs: example inputs; empty for a nested region, which is partitioned without a
                budget.
            convention: ``num_fwd_outputs`` and ``static_lifetime_input_indices``, as AOTAutograd
                gives them.
        """
        # After this call, Inductor computes the cache keys of both compiled graphs by `uuid`. These keys must not
        # depend on source lines, which are part of the digest `_traces`.
        self.is_new, self._traces = True, ""
        joint = joint_of(gm, self._step.options.lower, **convention)
        self._exact_branches |= self._rounds_as_eager(joint)
        if is_region(gm, joint_inputs):
            return split_region(gm, **convention)
        if not self._keeps:
            return self._step.split(joint)
        # The text of the graph is taken before planning changes the graph in place.
        record = CachedPlan(
            joint=plan_cache.text_of(joint),
            parameters=parameters_of(joint),
            operators=plan_cache.operators_of(joint),
        )
        with record_warnings() as warned:
            graphs = self._step.split(joint)
        if record.joint:
            self.record = replace(record, warnings=plan_cache.repeated(warned))
        return graphs

    def _rounds_as_eager(self, joint: JointGraph) -> bool:
        """Return whether Inductor rounds each 16-bit result of a graph, because the graph branches on one.

        The joint graph alone decides, so that forward is the same at every budget.
        """
        if not self._step.options.exact_branches or not has_16_bits(joint.graph):
            return False
        index = index_graph(joint.graph)
        found = branches_on_16_bits(index, classify(joint, index))
        if found:
            _LOG.info(
                "%d values of '%s' branch on numbers of 16 bits, first %s: each 16-bit result is rounded as in eager "
                "PyTorch; options={'exact_branches': False} turns this off",
                len(found),
                joint.name,
                located(index.nodes[found[0]]),
            )
        return bool(found)

    def compile_graph(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile the forward or the backward graph with Inductor, and record its generated code.

        Args:
            gm: the graph; a copy is compiled.
            example_inputs: example inputs of the graph.
            kwargs: further arguments of Inductor's ``compile_fx_inner``.

        Returns:
            The compiled graph, as ``compile_fx_inner`` returns it.
        """
        self.is_new, self._traces = True, ""
        self._step.stage("compiling backward" if self._graphs else "compiling forward")
        graph = CompiledGraph.of(gm, example_inputs)
        # Inductor changes the graph that it compiles; the plan keeps the original.
        gm = copy_module(gm)
        if self._whole and not self._graphs:
            self._masks = masks_to_bytes(gm.graph, graph.own)
        elif self._whole:
            example_inputs = masks_from_bytes(gm.graph, example_inputs, self._masks)
        with rounded_as_in_eager(gm.graph) if self._exact_branches else contextlib.nullcontext():
            compiled = compile_graph(gm, example_inputs, **kwargs)
        graph.code = getattr(compiled, "source_code", "")
        graph.constants = getattr(compiled, "constants", None) or {}
        graph.key = torch_compat.cache_key(compiled)
        self._graphs.append(graph)
        return compiled

    def finish(self) -> None:
        """Replace the plan's estimated figures by those of the compiled code, and cache the plan.

        The new figures come from simulating the generated code. If this code cannot be simulated,
        the plan keeps its estimated figures. The plan is written to the plan cache.
        """
        made = self._step.made
        if not self._whole or len(self._graphs) != 2 or made is None or self._step.options.check:
            return
        forward, backward = self._graphs
        symbolic = self._step.options.in_bytes and (made.symbolic or made.learns_sizes)
        timeline = None
        for kind in (True, False) if symbolic else (False,):
            try:
                timeline = timeline or compiled_timeline(forward, backward, symbolic=kind)
            except Exception:  # this generated code cannot be simulated, for example a C++ wrapper
                _LOG.info("the memory of '%s' as compiled is not known", made.graph, exc_info=True)
        if timeline is not None:
            self._step.made = made = made.as_compiled(timeline, held_bytes(timeline))
        keys = [graph.key for graph in self._graphs if graph.key is not None]
        # Without a record, a later process that finds the step in a cache plans the step again. That is necessary if
        # sizes are data-dependent, or if the step exceeds its budget in the cases of `CompiledBudget.is_open`.
        if self.record is None or len(keys) != 2 or made.learns_sizes:
            return
        if not self._known.is_open(made, self._step.asked):
            timed = "" if timeline is None else write_timeline(timeline)
            plan_cache.keep(keys, replace(self.record, plan=made.to_json(), timeline=timed))


def _on_cpu(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether all tensors of a graph from Dynamo are on a CPU."""
    values = (*inputs, *(n.meta.get("example_value") for n in gm.graph.nodes))
    leaves = torch_compat.pytree.tree_leaves(values)
    return all(x.device.type == "cpu" for x in leaves if isinstance(x, torch.Tensor))


def restore(step: StepPartition, gm: fx.GraphModule, record: CachedPlan) -> None:
    """Restore the plan of a cached step and repeat the warnings of its planning, without planning.

    Args:
        step: receives the plan.
        gm: the graph from Dynamo.
        record: the record that was stored beside the compiled step.

    Raises:
        PlanError: the record does not hold a valid plan.
    """
    record.warn_again()
    step.take(record.read(step.options.request, name_of(gm)), code_of(record.parameters))


@dataclass(slots=True)
class CompiledBudget:
    """Measurements of one step's compilations, which limit the next plan of this step.

    Attributes:
        excess: safety margin in bytes by which the estimated peak must be below the budget. It is
            five quarters of the compiled peak minus the estimated peak, and at least twice the last margin.
        tighter: a smaller budget on saved bytes to plan under instead of the given one. None before
            the first replan, and under a budget on the peak.
        peaks: dict from each decision (what a plan saves, and in which order nodes run) whose
            compiled step exceeded the budget, to its compiled peak in bytes.
        within: None until planning for the least peak begins, as the last attempt before a budget
            that is a peak in bytes is refused. Then ``within`` has the former value of ``peaks``,
            and ``peaks`` has only decisions for the least peak.
        over: bytes by which the last compiled step exceeds its budget, on the rank that exceeds the
            budget most.
        times: number of replans so far.
        search: state of the search that found the last plan; the search for the next plan continues
            from this state. None again after the last compilation, because a search refers to
            traced graphs, and the compiled step refers to this object.
    """

    excess: int = 0
    tighter: Budget | None = None
    peaks: dict[Decision, int] = field(default_factory=dict)
    within: dict[Decision, int] | None = None
    _chosen: Decision | None = None
    _capacity: int = 0
    _limit: int = 0
    _inputs: int = 0
    over: int = 0
    times: int = 0
    _before: int = 0  # replans before the first plan for the least peak
    search: CompiledSearch | None = None

    @property
    def key(self) -> str:
        """The measurements that affect the next plan, as text for cache keys."""
        own = f"{self.excess} {self.tighter} {[*self.peaks.values()]}"
        return own if self.within is None else f"{[*self.within.values()]}, then {own}"

    def _seek_least(self) -> None:
        """Make the next calls of `plan` plan for the least peak."""
        # A search anew: its plans do not depend on the refused budget, so another budget leads to the same plans.
        self.search = None
        self.within, self.peaks, self.excess, self._before = self.peaks, {}, 0, self.times

    def plan(self, joint: JointGraph, request: PlanRequest, agree: AgreeRanks | None) -> Plan:
        """Plan a graph that Inductor will compile.

        Args:
            joint: the joint graph; it is changed.
            request: the options of planning.
            agree: the pass by which ranks agree on a decision; None if this rank decides alone.

        Raises:
            BudgetError: no plan is within the budget or, in a replan, within the smaller budget.
        """
        # Ranks must not mistake the decision of an earlier plan for the decision of this replan.
        if agree is not None and self.times:
            agree = replace(agree, asked=f"{agree.asked}, planned again {self.times} times")
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

    def _within_peak(
        self, joint: JointGraph, request: PlanRequest, agree: AgreeRanks | None
    ) -> Plan:
        """Plan a graph under a budget on the peak, using the compiled peaks of earlier plans."""
        asked, budget = request.budget, request.budget if self.within is None else _LEAST
        request = replace(request, budget=budget)
        last = self.times - self._before >= _most(budget)
        if last and budget.peak_bytes is None:
            # In compiled code, copies to or from the host may start so early that a step without offloading
            # has a lower peak.
            request = replace(request, offload=None)
        # After a compilation the search may return a decision that has exceeded the budget. This method then calls
        # itself with the same graph, so the graph must be unchanged.
        planner = Planner.of(joint, request, in_place=not self.peaks)
        self.search = planner.estimated(self.search)
        found = self.search.within(budget, excess=self.excess, compiled=self.peaks, last=last)
        limit = 0 if budget.peak_bytes else self.search.limit or 0
        self._limit, self._inputs = limit, input_bytes(joint)
        self._chosen = found.decision
        if budget.peak_bytes and self.peaks.get(self._chosen, 0) > budget.peak_bytes:
            self._seek_least()
            return self._within_peak(joint, request, agree)
        made = planner.finish(found, budget, agree, peak_limit=limit, measure="estimated")
        if self.within is None:
            return made
        return replace(made, budget=str(asked), _asked=asked, peak_limit=0)

    def replans(
        self,
        made: Plan,
        request: PlanRequest,
        *,
        largest: Callable[[int], int] = int,
        can_hold: bool = True,
        together: bool = False,
    ) -> bool:
        """Return whether to replan a step because the compiled step exceeds its budget.

        If the result is True, the next call of `plan` plans for fewer bytes.

        Args:
            made: the plan, with the figures of the compiled step.
            request: the options that the step was planned under.
            largest: function from this rank's excess over the budget, in bytes, to the largest
                excess of all ranks that run this plan. If the largest excess is above 0, all these
                ranks replan.
            can_hold: whether a plan within the budget may exist. If not, this rank replans only
                because other ranks do.
            together: whether other ranks may replan too. All ranks then replan equally often.

        Raises:
            BudgetError: the compiled step exceeds a budget that is a peak in bytes, and no replan
                is left.
        """
        if not request.decides:
            return False
        asked = request.budget
        taken, limit = self._taken(made, request)
        own = taken - limit if can_hold else 0
        self.over = largest(own)
        if max(own, self.over) <= 0:
            return False
        limit = limit or asked.peak_bytes or self._limit or made.capacity
        taken = max(taken, limit + self.over)
        # `_chosen` is None if the plan came from a cache, where another process made it.
        if asked.on_peak:
            self.peaks[made.decision if self._chosen is None else self._chosen] = taken
        if self.over <= 0 or self._is_last(asked, can_hold=can_hold, together=together):
            if can_hold:
                self._tell(made, request, taken, limit, elsewhere=own <= 0)
            return False
        self.times += 1
        self._chosen = None
        if asked.peak_bytes and can_hold and self.within is None and self.times == MOST_REPLANS + 1:
            self._seek_least()
        elif asked.on_peak:
            # The next plan's estimate may be off by more, so a quarter is added.
            excess = (taken - (made.predicted_peak_bytes or limit)) * 5 // 4
            self.excess = max(excess, 2 * self.excess)
        else:
            self.tighter = Budget(nbytes=max(0, made.planned_saved_bytes - (taken - limit)))
            self._capacity = made.capacity
        return True

    def _is_last(self, asked: Budget, *, can_hold: bool, together: bool) -> bool:
        """Return whether no replan is left for a step that exceeds its budget.

        Args:
            asked: the requested budget.
            can_hold: see `replans`.
            together: see `replans`.
        """
        if asked.peak_bytes is None or not can_hold:
            most = _OF_PEAKS if asked.on_peak else MOST_REPLANS
            return self.times == (_most(asked) if can_hold else most)
        is_least = self.within is not None and self.times - self._before == _OF_SHARES
        return self.times == _OF_PEAKS or (is_least and not together)

    def is_open(self, made: Plan, request: PlanRequest) -> bool:
        """Return whether a later process must plan this step itself instead of loading its plan.

        The result is True if the compiled step exceeds its budget, and the budget is a ratio of the
        peak or the step was also planned for its least peak. Only the process that planned the step
        knows how many bytes a ratio of the peak stands for.

        Args:
            made: the plan, with the figures of the compiled step.
            request: the options that the step was planned under.
        """
        taken, limit = self._taken(made, request)
        seeks = self.within is not None or request.budget.peak_share is not None
        return seeks and taken > limit

    def _taken(self, made: Plan, request: PlanRequest) -> tuple[int, int]:
        """Return the compiled step's bytes, and the bytes that its budget allows.

        Under a budget on the peak, both numbers are bytes of the peak; otherwise they are saved
        bytes. A budget that is a ratio of the peak allows 1/200 more bytes than the ratio stands
        for. Both numbers are 0 if the compiled bytes are unknown or not limited.
        """
        asked = request.budget
        if not made.planned_peak_bytes or not request.decides:
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

    def _tell(
        self, made: Plan, request: PlanRequest, taken: int, limit: int, *, elsewhere: bool
    ) -> None:
        """Raise an error or warn because a compiled step exceeds its budget.

        A budget that is a peak in bytes raises an error. A budget on saved bytes causes a warning.
        A ratio of the peak causes a warning only if the compiled peak exceeds the ratio's bytes by
        more than 1/20.

        Args:
            made: the plan.
            request: the options that the step was planned under.
            taken: compiled bytes of the step.
            limit: bytes that the budget allows.
            elsewhere: whether only other ranks exceed the budget, not this rank.

        Raises:
            BudgetError: the budget is a peak in bytes.
        """
        asked, where = request.budget, " on another rank" if elsewhere else ""
        compiled = {**(self.within or {}), **self.peaks}
        taken = min(compiled.values(), default=taken)
        more, most = format_apart(taken, limit)
        if asked.peak_bytes is not None:
            # Under a budget of `sure` bytes, the same plans for the least peak would be tried last. One of them has
            # this compiled peak, so that budget can be met.
            sure = taken if self.within is None else min(self.peaks.values(), default=taken)
            without = ""
            if made.without_expected_bytes:
                without = f", and about {format_bytes(made.without_expected_bytes)} without remat"
            what = "that plan" if sure == taken else "one that is found again for sure"
            # If a model is compiled block by block, the memory of the other blocks is unknown here.
            advice = request.how_to_run(sure, f"{what}, if the step has no other graph")
            raise BudgetError(
                f"budget {asked.label} ({limit} bytes): '{made.graph}' has a peak of {more} ({taken} bytes) as "
                f"Inductor compiled it{where}, the least of the plans that were compiled ({len(compiled)}){without}. "
                f"It is proven only that none is below {self._inputs} bytes ({format_bytes(self._inputs)}), which "
                f"parameters and inputs take. {_UNSHRUNK}. `remat plan MODEL --budget peak:0` estimates the least peak, without "
                f"compiling. {advice[0].upper()}{advice[1:]}{learned_text(made.forward.graph.nodes)}"
            )
        what = "has a peak of" if asked.on_peak else "keeps"
        instead = "A share is held as nearly as can be; a peak in bytes is held or refused"
        if asked.peak_share is None:
            instead = _UNSHRUNK
        message = (
            f"'{made.graph}' {what} {more} ({taken} bytes) as Inductor compiled it{where}, "
            f"{f'the least of {self.times + 1} plans tried, ' if self.times and asked.on_peak else ''}"
            f"above the {most} ({limit} bytes) of its budget, and was planned again {self.times} times. "
            f"{instead}"
        )
        if asked.peak_share is None or taken > limit + limit // _FAR:
            warn(message, BudgetWarning)


def warn_of_saved(made: Plan) -> None:
    """Warn if a compiled step that applies a saved plan exceeds the budget of that plan.

    A budget that is a ratio of the peak is not checked. A saved plan with symbolic sizes is checked
    by `step_guards.guard_sizes` instead.
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
        )


def _most(budget: Budget) -> int:
    """Return how often a step may be replanned under a budget."""
    return MOST_REPLANS if budget.peak_share is None else _OF_SHARES


def _by_peak(request: PlanRequest) -> bool:
    """Return whether plans are chosen by an estimate of their compiled peak.

    With saved-tensor hooks the result is False, because the sizes of packed values are unknown
    before the step runs.
    """
    return request.decides and request.budget.on_peak and request.hooks is None
