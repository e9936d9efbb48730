"""Budgets that hold in the code that Inductor writes: plan, compile, measure, and plan again by what was measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning, PlanError, record_warnings, warn
from remat.graph.costs import CostWarning
from remat.graph.joint import JointGraph, copy_module
from remat.graph.lowering import Decision
from remat.graph.regions import calls_regions, is_region, split_region
from remat.integrations import plan_cache, plan_log
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
from remat.integrations.workarounds import compile_graph, masks_from_bytes, masks_to_bytes
from remat.passes.ranks.agree_ranks import AgreeRanks
from remat.planning.fused_peak import input_bytes, within_fused_peak
from remat.planning.plan import Plan
from remat.planning.planner import Planner, plan_graph
from remat.planning.request import PlanRequest
from remat.units import Budget, format_apart, format_bytes

_LOG = logging.getLogger(__name__)

#: The most times that a step is planned again because the compiled step exceeds its budget.
MOST_REPLANS = 3
#: The same if the budget is a ratio of the peak, which can be met only approximately.
_OF_SHARES = 2
#: A budget given as a ratio of the peak counts as met up to 1/200 above it.
_NEARLY = 200
#: More than 1/20 above a ratio of the peak: warn.
_FAR = 20
#: Before a peak in bytes is refused, the step is also planned for its least peak. `_OF_PEAKS` counts all these replans.
_LEAST = Budget(peak_share=0.0)
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
    """Compile a step with Inductor, and replan by its compiled memory until it meets its budget.

    Args:
        step: plans the graph, using ``known``.
        known: measurements from earlier compilations of this step.
        gm: the graph as Dynamo handed it over.
        inputs: example inputs of the compilation.
        patches: settings of Inductor.

    Raises:
        RematError: a budget that cannot be held, among others.
    """
    tried: list[tuple[int, Plan, Callable[..., Any]]] = []
    with step.compiling():
        while True:
            compiled = _compile_once(step, known, gm, inputs, patches)
            made = step.made
            again = _plans_again(step, known)
            if made is not None:
                # All ranks have the same figures.
                taken = known.over if step.options.with_others else made.peak_bytes
                tried.append((taken, made, compiled))
            if again:
                step.stage(
                    f"compiling again: the peak is {format_bytes(known.over)} above its budget"
                )
                continue
            share = step.options.request.budget.peak_share
            nearly = share is not None or (step.over and not step.options.with_others)
            if len(tried) > 1 and made is not None and nearly:
                # The budget is held as nearly as can be: what was planned again may take more.
                _, best, compiled = min(tried, key=lambda one: one[0])
                if best is not made:
                    step.use(best)
            return compiled


def _compile_once(
    step: StepPartition,
    known: CompiledBudget,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """Plan and compile a step, or find it in a cache, and record the compiled memory on its plan."""
    # Regions are compiled with the halves that they are in, which are then more than two.
    whole = not calls_regions(gm)
    if whole and step.options.keeps_steps:
        attempt = Attempt(step, known, whole=True, traces=plan_cache.traces_of(gm, inputs))
        compiled = attempt.compile(gm, inputs, patches)
        if attempt.is_new:
            attempt.finish()
            return compiled
        if _restore(step, gm, compiled):
            return compiled
    attempt = Attempt(step, known, whole=whole)
    compiled = attempt.compile(gm, inputs, patches)
    attempt.finish()
    return compiled


def _plans_again(step: StepPartition, known: CompiledBudget) -> bool:
    """Whether to replan a step because the compiled step exceeds its budget.

    If so, its plan is removed from `remat.plans`.

    Raises:
        BudgetError: the step exceeds its budget, and no replan is left.
    """
    made, options = step.made, step.options
    if made is not None and step.applies_saved:
        warn_of_saved(made)
        return False
    if made is None or (step.over and not options.with_others):
        return False
    try:
        again = known.replans(
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
    if again:
        step.use(None)
    return again


class Attempt(torch_compat.CustomPartitionerFn):
    """One compilation of a step. Inductor calls it to partition the joint graph and to compile each graph.

    Args:
        step: plans the joint graph.
        known: measurements from earlier attempts.
        whole: whether the step has exactly one forward and one backward graph; forward is compiled first.
        traces: what AOTAutograd's key is to tell besides, if the whole step may come from its cache; else halves
            alone are looked up.

    Attributes:
        is_new: whether something was planned or compiled, so that the step was not found in AOTAutograd's cache.
        record: what is kept beside the compiled step, its plan aside; None if nothing is.
    """

    def __init__(
        self, step: StepPartition, known: CompiledBudget, *, whole: bool, traces: str | None = None
    ) -> None:
        self._step, self._known, self._whole = step, known, whole
        self._keeps, self._traces = traces is not None, traces or ""
        self.record: CachedPlan | None = None
        self._graphs: list[tuple[CompiledGraph, str | None]] = []
        self._masks: frozenset[str] = frozenset()
        self.is_new = False

    def uuid(self) -> str:
        """Cache key of this compilation."""
        step = self._step
        return step.options.key(
            graphs_only=not self._keeps,
            traces=self._traces,
            compiled=self._known.key,
            beside=step.beside,
            over=step.over,
        )

    def __reduce__(self) -> Any:
        """Reduce to the options, since Inductor and AOTAutograd copy and pickle their settings.

        Inductor keeps copies, which are not to hold the step; what else decides is in `uuid`.
        """
        return self._step.options.__reduce_ex__(2)

    def compile(
        self, gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
    ) -> Callable[..., Any]:
        """Plan and compile the step."""
        settings: dict[str, Any] = {
            # Backward too is compiled before forward runs: what the step takes is known in time.
            "force_non_lazy_backward_lowering": True
        }
        if not self._keeps:
            # Whoever finds a step in AOTAutograd's cache is not asked to partition, and `plans()` would not
            # know what the step runs on. Inductor's own cache of compiled halves stays in use.
            settings["enable_autograd_cache"] = False
        if not self._whole:
            # Inductor takes the places of the inputs that backward may overwrite for places among the
            # inputs of a region's backward too, and overwrites what is still to be read.
            settings["donated_buffer"] = False
        with torch_compat.functorch_config.patch(settings):
            return torch_compat.compile_fx(  # type: ignore[return-value]
                gm,
                inputs,
                inner_compile=self.compile_graph,
                config_patches={**patches, "custom_partitioner_fn": self},
            )

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **convention: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph, and record what a later process needs if it finds the compiled step in a cache."""
        self.is_new, self._traces = True, ""
        if is_region(gm, joint_inputs):
            return split_region(gm, **convention)
        joint = joint_of(gm, self._step.options.lower, **convention)
        if not self._keeps:
            return self._step.split(joint)
        # Planning edits the graph in place, so its text is taken before.
        record = CachedPlan(
            joint=plan_cache.text_of(joint) or "",
            parameters=parameters_of(joint),
            operators=plan_cache.operators_of(joint),
        )
        with record_warnings() as warned:
            graphs = self._step.split(joint)
        if record.joint:
            noted = tuple(
                (kind.__module__, kind.__qualname__, message)
                for message, kind in warned
                if not issubclass(kind, (BudgetWarning, CostWarning))  # of this process
            )
            self.record = replace(record, warnings=noted)
        return graphs

    def compile_graph(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile the forward or the backward graph, and record its generated code."""
        self.is_new, self._traces = True, ""
        self._step.stage("compiling backward" if self._graphs else "compiling forward")
        graph = CompiledGraph.of(gm, example_inputs)
        gm = copy_module(gm)
        if self._whole and not self._graphs:
            self._masks = masks_to_bytes(gm.graph, graph.own)
        elif self._whole:
            example_inputs = masks_from_bytes(gm.graph, example_inputs, self._masks)
        compiled = compile_graph(gm, example_inputs, **kwargs)
        graph.code = getattr(compiled, "source_code", "")
        graph.constants = getattr(compiled, "constants", None) or {}
        self._graphs.append((graph, torch_compat.cache_key(compiled)))
        return compiled

    def finish(self) -> None:
        """Record the compiled memory of the step on its plan, and cache the plan beside the compiled graphs."""
        made = self._step.made
        if not self._whole or len(self._graphs) != 2 or made is None:
            return
        (forward, _), (backward, _) = self._graphs
        symbolic = self._step.options.in_bytes and (made.symbolic or made.learns_sizes)
        timeline = None
        for kind in (True, False) if symbolic else (False,):
            try:
                timeline = timeline or compiled_timeline(forward, backward, symbolic=kind)
            except Exception:  # code of a kind that is not known
                _LOG.info("the memory of '%s' as compiled is not known", made.graph, exc_info=True)
        if timeline is not None:
            measured = made.as_compiled(timeline, held_bytes(timeline))
            plan_log.replace(made, measured)
            self._step.made = made = measured
        keys = [key for _, key in self._graphs if key is not None]
        # A step of whose plan nothing is kept is planned again by whoever finds it in a cache. Only who planned a
        # step knows which sizes to look at, and which bytes a share of its peak stands for.
        if self.record is None or len(keys) != 2 or made.learns_sizes:
            return
        if not self._known.is_open(made, self._step.asked):
            timed = "" if timeline is None else write_timeline(timeline)
            plan_cache.keep(keys, replace(self.record, plan=made.to_json(), timeline=timed))


def _restore(step: StepPartition, gm: fx.GraphModule, compiled: Any) -> bool:
    """Restore the plan of a step from AOTAutograd's cache; False if that cannot be done."""
    keys = plan_cache.graph_keys(compiled)
    if keys is None:
        return False
    if len(keys) == 1:  # nothing to differentiate
        return True
    record = plan_cache.find(keys)
    if record is None:
        return False
    try:
        restore(step, gm, record)
    except PlanError:
        return False
    return True


def restore(step: StepPartition, gm: fx.GraphModule, record: CachedPlan) -> None:
    """Restore warnings and plan of a step that was found in a cache, without planning.

    Raises:
        PlanError: the record holds no plan.
    """
    record.warn_again()
    if record.plan:
        step.take(record.read(step.options.request, name_of(gm)), code_of(record.parameters))


@dataclass(slots=True)
class CompiledBudget:
    """Measurements of one compiled step, by which it is planned again.

    Attributes:
        excess: safety margin below the budget, in bytes: the compiled peak minus the estimated one, and at least
            twice the last margin.
        tighter: the budget to plan under instead of the given one.
        peaks: compiled peaks of the decisions that exceeded the budget.
        lowest: what is known of the step as one under the least peak. It is planned so, from the beginning, before a
            peak in bytes is refused.
        over: bytes by which what was compiled last is above its budget, on the rank where it takes the most.
        times: how often the step was planned again.
    """

    excess: int = 0
    tighter: Budget | None = None
    peaks: dict[Decision, int] = field(default_factory=dict)
    lowest: CompiledBudget | None = None
    _chosen: Decision | None = None
    _capacity: int = 0
    _limit: int = 0
    _inputs: int = 0
    over: int = 0
    times: int = 0

    @property
    def key(self) -> str:
        """The fields that affect planning, as text for cache keys."""
        own = f"{self.excess} {self.tighter} {[*self.peaks.values()]}"
        return own if self.lowest is None else f"{own}, then {self.lowest.key}"

    def plan(self, joint: JointGraph, request: PlanRequest, agree: AgreeRanks | None) -> Plan:
        """Plan a graph that Inductor will compile.

        Raises:
            BudgetError: no plan is within the budget, or none is expected to be.
        """
        if agree is not None and self.times:  # a decision of its own for each time
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
        budget, last = request.budget, self.times >= _most(request.budget)
        if self.lowest is not None:
            made = self.lowest._within_peak(joint, replace(request, budget=_LEAST), agree)
            return replace(made, budget=str(budget), _asked=budget, peak_limit=0)
        if last and budget.peak_bytes is None:
            # Copies may begin so early in compiled code that steps without any are lower.
            request = replace(request, offload=None)
        # Once something was compiled, this may find nothing else; then the graph is planned once more.
        planner = Planner.of(joint, request, in_place=not self.peaks)
        found = within_fused_peak(
            planner,
            budget,
            excess=self.excess,
            compiled=self.peaks,
            last=last,
        )
        self._limit, self._inputs = found.choice.peak_limit, input_bytes(joint)
        self._chosen = found.decision
        if budget.peak_bytes and self.peaks.get(self._chosen, 0) > budget.peak_bytes:
            self.lowest = CompiledBudget()
            return self._within_peak(joint, request, agree)
        return planner.finish(found, budget, agree)

    def replans(
        self,
        made: Plan,
        request: PlanRequest,
        *,
        largest: Callable[[int], int] = int,
        can_hold: bool = True,
        together: bool = False,
    ) -> bool:
        """Whether to replan a step because the compiled step exceeds its budget.

        Args:
            made: its plan, with the figures of what was compiled.
            request: what was asked for.
            largest: by how much the step takes more than its budget on the rank where it takes the most, given
                that of this rank: all ranks that run on a plan plan again together.
            can_hold: whether there may be a plan within the budget; else it is planned again for other ranks alone.
            together: whether other ranks may plan it again as well. All of them then do so equally often.

        Raises:
            BudgetError: it takes more, is not planned again, and the budget is a peak in bytes.
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
        now = self.lowest or self
        if asked.on_peak:  # a step that was found in a cache was chosen by another process
            now.peaks[made.decision if now._chosen is None else now._chosen] = taken
        if self.over <= 0 or self._is_last(asked, can_hold=can_hold, together=together):
            if can_hold:
                self._tell(made, asked, taken, limit, elsewhere=own <= 0)
            return False
        if asked.peak_bytes and can_hold and self.lowest is None and self.times == MOST_REPLANS:
            self.lowest = CompiledBudget()
        elif asked.on_peak:
            excess = taken - (made.predicted_peak_bytes or limit)
            now.excess = max(excess, 2 * now.excess)
            if self.lowest is not None:
                self.lowest.times += 1
        else:
            self.tighter = Budget(nbytes=max(0, made.planned_saved_bytes - (taken - limit)))
            self._capacity = made.capacity
        self.times += 1
        now._chosen = None
        return True

    def _is_last(self, asked: Budget, *, can_hold: bool, together: bool) -> bool:
        """Whether no replan is left for a step that exceeds its budget."""
        if asked.peak_bytes is None or not can_hold:
            most = _OF_PEAKS if asked.on_peak else MOST_REPLANS
            return self.times == (_most(asked) if can_hold else most)
        lowest = self.lowest
        return self.times == _OF_PEAKS or (
            lowest is not None and lowest.times == _OF_SHARES and not together
        )

    def is_open(self, made: Plan, request: PlanRequest) -> bool:
        """Whether a later process must plan the step itself because the compiled step exceeds its budget.

        Only the process that planned the step knows how many bytes a ratio of the peak stands for.
        """
        taken, limit = self._taken(made, request)
        seeks = self.lowest is not None or request.budget.peak_share is not None
        return seeks and taken > limit

    def _taken(self, made: Plan, request: PlanRequest) -> tuple[int, int]:
        """Compiled bytes in the measure of the budget, and the budget in bytes; (0, 0) if there is no limit to check."""
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

    def _tell(self, made: Plan, asked: Budget, taken: int, limit: int, *, elsewhere: bool) -> None:
        """Raise or warn that a compiled step exceeds its budget; for a ratio of the peak, only if by far."""
        where = " on another rank" if elsewhere else ""
        compiled = {**self.peaks, **(self.lowest.peaks if self.lowest else {})}
        taken = min(compiled.values(), default=taken)
        more, most = format_apart(taken, limit)
        if asked.peak_bytes is not None:
            # Under these bytes the plans of the least peak are tried again, if no other is within them.
            sure = min(self.lowest.peaks.values(), default=taken) if self.lowest else taken
            inputs = max(self._inputs, self.lowest._inputs if self.lowest else 0)
            raise BudgetError(
                f"budget {asked.label} ({limit} bytes): '{made.graph}' has a peak of {more} ({taken} bytes) as "
                f"Inductor compiled it{where}, the least of the plans that were compiled ({len(compiled)}). It is "
                f"proven only that none is below {inputs} bytes ({format_bytes(inputs)}), which parameters and inputs "
                f"take. {_UNSHRUNK}. To run {'that plan' if sure == taken else 'one that is found again for sure'}, "
                f"give budget={sure}"
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
            warn(message, BudgetWarning, stacklevel=4)


def warn_of_saved(made: Plan) -> None:
    """Warn of a saved plan whose step, as Inductor compiled it, exceeds its budget in bytes.

    A plan with symbolic sizes is refused instead, at the sizes that exceed the budget.
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
            stacklevel=4,
        )


def _most(budget: Budget) -> int:
    return MOST_REPLANS if budget.peak_share is None else _OF_SHARES


def _by_peak(request: PlanRequest) -> bool:
    """Whether plans are chosen by their estimated peak; with saved-tensor hooks the packed sizes are unknown before."""
    return request.decides and request.budget.on_peak and request.hooks is None
