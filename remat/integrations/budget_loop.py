"""Make the code that Inductor generates meet a budget: plan, compile, simulate the code's memory, and replan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import BudgetError, PlanError, record_warnings
from remat.graph.branch_values import branches_on_16_bits, has_16_bits
from remat.graph.capture.regions import calls_regions
from remat.graph.capture.source import located
from remat.graph.index import index_graph
from remat.graph.joint import JointGraph, copy_module
from remat.graph.roles import classify
from remat.integrations import plan_cache
from remat.integrations.alone import joint_of_whole, plan_whole
from remat.integrations.compiled_budget import CompiledBudget, warn_of_saved
from remat.integrations.compiled_memory import (
    CompiledGraph,
    compiled_timeline,
    held_bytes,
    write_timeline,
)
from remat.integrations.masks import masks_from_bytes, masks_to_bytes
from remat.integrations.plan_cache import CachedPlan
from remat.integrations.replaced_methods import GeneratedCode, deferred_kernels
from remat.integrations.stages import Arrived, Compiled, Planned
from remat.integrations.traced_graph import code_of, joint_of, name_of
from remat.integrations.workarounds import compile_graph, rounded_as_in_eager
from remat.units import format_bytes

_LOG = logging.getLogger(__name__)


def compile_within_budget(
    arrived: Arrived, gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
) -> Compiled:
    """Compile a step with Inductor, and replan until the compiled step meets its budget.

    The number of replans is limited. If no compiled step meets the budget, the function raises an error for a peak in
    bytes, and warns for saved bytes. If the budget is a ratio of the peak, the returned step is the one with the least
    compiled peak.

    Raises:
        RematError: planning failed, or no compiled step meets a budget that is a peak in bytes.
    """
    options = arrived.options
    budget = CompiledBudget(options.largest, together=options.with_others)
    attempts: list[tuple[int, Planned, Compiled]] = []
    again, over = True, ""
    try:
        while again:
            compiled = compile_once(arrived, budget, gm, inputs, patches)
            planned = compiled.planned
            if planned is None:
                break
            again, over = plans_again(planned, budget)
            # Every rank knows the largest excess of all ranks. All ranks compare this excess and pick the same plan.
            taken = budget.over if options.with_others else planned.plan.peak_bytes
            attempts.append((taken, planned, compiled))
            if again:
                arrived = replace(arrived, over=over)
                more = format_bytes(budget.over)
                arrived.stage(f"compiling again: the step takes {more} more than its budget")
    finally:
        # The compiled step refers to ``budget``, and candidates refer to traced graphs.
        for each in budget.rounds:
            each.search = None
    if attempts:
        is_near = options.request.budget.peak_share is not None
        if is_near or (over and not options.with_others):
            # A replanned step may have a higher peak than an earlier one.
            attempts = [min(attempts, key=lambda attempt: attempt[0])]
        _, planned, compiled = attempts[-1]
        compiled = replace(compiled, planned=replace(planned, over=over))
    if compiled.unloaded:
        arrived.stage("compiling kernels")
        compiled.load(patches)
    return compiled


def plans_again(planned: Planned, budget: CompiledBudget) -> tuple[bool, str]:
    """Return whether to replan a step that exceeds its budget, and why the budget cannot be met (`Planned.over`).

    Args:
        planned: the graph, whose plan has the memory of the compiled step.
        budget: measurements from this and earlier compilations of the step; they are updated.

    Raises:
        BudgetError: the compiled step exceeds a peak in bytes, and no replan is left.
    """
    options, over = planned.arrived.options, planned.over
    if planned.saved_plan is not None:
        warn_of_saved(planned.plan)
        return False, over
    if (over and not options.with_others) or options.check is not None:
        return False, over
    try:
        return budget.replans(planned.plan, planned.request, can_hold=not over), over
    except BudgetError as error:
        if not planned.arrived.runs_anyway(planned.kind):
            raise
        return False, str(error)


def compile_once(
    arrived: Arrived,
    budget: CompiledBudget,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
) -> Compiled:
    """Plan and compile a step once, or load the compiled step with its plan from a cache.

    Args:
        arrived: the graph to compile.
        budget: measurements from earlier compilations of the step.
        gm: the graph from Dynamo.
        inputs: example inputs of the compilation.
        patches: Inductor settings.
    """
    # Inductor compiles each nested region as a separate graph, so a step with such regions has more than two graphs.
    has_two_graphs = not calls_regions(gm)
    if has_two_graphs and arrived.options.keeps_steps:
        attempt = Attempt(
            arrived, budget, has_two_graphs=True, traces=plan_cache.traces_of(gm, inputs)
        )
        compiled = attempt.compile(gm, inputs, patches)
        keys = () if attempt.is_new else plan_cache.graph_keys(compiled.run)
        record = plan_cache.find(keys) if keys else None
        # A single graph usually has no plan; see `remat.integrations.alone`.
        if attempt.is_new or (len(keys) == 1 and record is None):
            return compiled
        if record is not None:
            with contextlib.suppress(PlanError):  # the record holds no valid plan
                return replace(compiled, planned=restore(arrived, gm, record))
    # The cached step has no usable plan: compile without AOTAutograd's cache, so that it is partitioned.
    return Attempt(arrived, budget, has_two_graphs=has_two_graphs).compile(gm, inputs, patches)


def restore(arrived: Arrived, gm: fx.GraphModule, record: CachedPlan) -> Planned:
    """Restore the plan of a cached step, and repeat the warnings of its planning, without planning again.

    Args:
        arrived: the step.
        gm: the graph from Dynamo.
        record: the record that was stored beside the compiled step.

    Raises:
        PlanError: the record does not hold a valid plan.
    """
    request = arrived.options.request
    plan = record.read(request, name_of(gm))
    planned = Planned(
        arrived=arrived,
        plan=plan,
        request=arrived.of_step(request),
        kind=code_of(record.parameters),
    ).recorded()
    arrived.options.graphs.partitioned[plan.fingerprint] += 1
    return planned


@dataclass(eq=False)
class Attempt(torch_compat.CustomPartitionerFn):
    """An object that compiles one step: Inductor calls the object to partition and to compile the step's graphs.

    Attributes:
        arrived: the graph to plan and to partition.
        budget: measurements from earlier compilations of the step.
        has_two_graphs: whether the step has exactly one forward and one backward graph. If not, nested
            compile regions (``torch.compiler.nested_compile_region``) are compiled as further
            graphs.
        traces: a digest to add to AOTAutograd's cache key, from `plan_cache.traces_of`. The whole
            compiled step may then come from AOTAutograd's cache. None: only single compiled graphs
            may come from a cache, that of Inductor.
        is_new: whether a graph was partitioned or compiled; False if the whole step came from
            AOTAutograd's cache.
        planned: the planned graph; None if nothing was planned, or nothing is differentiable.
        record: the record to store beside the compiled step, so that a later process can restore
            the plan; the plan itself is added when the step is compiled. None to store no record.
    """

    arrived: Arrived
    budget: CompiledBudget
    has_two_graphs: bool
    traces: str | None = None
    is_new: bool = False
    planned: Planned | None = None
    record: CachedPlan | None = None
    _graphs: list[CompiledGraph] = field(default_factory=list)
    _masks: frozenset[str] = frozenset()
    _exact_branches: bool = False

    def uuid(self) -> str:
        """Return the cache key of this compilation."""
        arrived = self.arrived
        return arrived.options.key(
            graphs_only=self.traces is None,
            traces=self.traces,
            compiled=self.budget.key,
            other_graphs=(arrived.other_graphs_runs, arrived.other_graphs_bytes),
            over=arrived.over,
        )

    def __reduce__(self) -> Any:
        """Pickle the partitioner that has the step's options, instead of this `Attempt`.

        Inductor and AOTAutograd copy and pickle their settings, of which this object is one. A copy of this object must
        not keep the step alive. Besides the options, the cache key `uuid` covers everything that affects the
        compilation.
        """
        return self.arrived.options.__reduce_ex__(2)

    def compile(
        self, gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
    ) -> Compiled:
        """Plan and compile the step with Inductor.

        If the memory of the compiled code is known, the plan of the result states this memory. The result has no plan
        if the whole step came from AOTAutograd's cache.
        """
        unloaded: list[GeneratedCode] = []
        settings: dict[str, Any] = {
            # By default, PyTorch may compile backward only when backward first runs, too late to plan again.
            "force_non_lazy_backward_lowering": True
        }
        if self.traces is None:
            # On a hit in AOTAutograd's cache the partitioner is not called, so `remat.plans` would not list
            # the plan. Inductor's own cache of compiled graphs stays in use.
            settings["enable_autograd_cache"] = False
        if not self.has_two_graphs:
            # Inductor knows the indices of the inputs that the step's backward may overwrite. It applies these
            # indices to the backward of a nested region too. That backward has other inputs, so it would overwrite
            # values before their last read.
            settings["donated_buffer"] = False
        deferred = self.has_two_graphs and _on_cpu(gm, inputs)
        with (
            torch_compat.functorch_config.patch(settings),
            deferred_kernels(unloaded) if deferred else contextlib.nullcontext(),
        ):
            run: Any = torch_compat.compile_fx(
                gm,
                inputs,
                inner_compile=self.compile_graph,
                config_patches={**patches, "custom_partitioner_fn": self},
            )
        return Compiled(planned=self._as_compiled(), run=run, unloaded=tuple(unloaded))

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **convention: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph into forward and backward graph; Inductor calls this method.

        If the whole compiled step may be cached, the method also sets ``record``, the record to store beside the step.

        Args:
            gm: the joint graph; it is changed.
            joint_inputs: example inputs; empty for a nested region, which is partitioned without a
                budget.
            convention: ``num_fwd_outputs`` and ``static_lifetime_input_indices``, as AOTAutograd
                gives them.
        """
        # From now on, Inductor computes the cache keys of both compiled graphs by `uuid`. These keys must not depend on
        # source lines, which are part of the digest.
        self.is_new, self.traces = True, self.traces and ""
        joint = joint_of(gm, self.arrived.options.lower, **convention)
        self._exact_branches |= self._rounds_as_eager(joint)
        with self._recording(joint):
            planned, modules = self.arrived.partition(joint, joint_inputs, self.budget.plan)
        self.planned = planned or self.planned
        return modules

    @contextlib.contextmanager
    def _recording(self, joint: JointGraph) -> Iterator[None]:
        """Record a joint graph as it is before the ``with`` block, and the warnings of planning in the block."""
        record = None if self.traces is None else plan_cache.record_of(joint)
        with record_warnings() as warned:
            yield
        if record is not None:
            self.record = replace(record, warnings=plan_cache.repeated(warned))

    def _rounds_as_eager(self, joint: JointGraph) -> bool:
        """Return whether Inductor must round every 16-bit result, because the graph branches on a 16-bit value."""
        if not self.arrived.options.exact_branches or not has_16_bits(joint.graph):
            return False
        # The joint graph alone decides on rounding, never the plan, so that forward is the same at every budget.
        index = index_graph(joint.graph)
        branches = branches_on_16_bits(index, classify(joint, index))
        if branches:
            _LOG.info(
                "%d values of '%s' branch on numbers of 16 bits, first %s: each 16-bit result is rounded as in eager "
                "PyTorch; options={'exact_branches': False} turns this off",
                len(branches),
                joint.name,
                located(index.nodes[branches[0]]),
            )
        return bool(branches)

    def compile_graph(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile the forward or the backward graph with Inductor, and record its generated code.

        Args:
            gm: the graph; a copy is compiled.
            example_inputs: example inputs of the graph.
            kwargs: further arguments of Inductor's ``compile_fx_inner``.

        Returns:
            The compiled graph, as ``compile_fx_inner`` returns it.
        """
        self.is_new, self.traces = True, self.traces and ""
        self.arrived.stage("compiling backward" if self._graphs else "compiling forward")
        graph = CompiledGraph.of(gm, example_inputs)
        # Inductor changes the graph that it compiles; the plan keeps the original.
        gm = copy_module(gm)
        if kwargs.get("is_inference"):
            gm = self._planned_alone(gm, example_inputs)
        if self.has_two_graphs and not self._graphs:
            self._masks = masks_to_bytes(gm.graph, graph.own)
        elif self.has_two_graphs:
            example_inputs = masks_from_bytes(gm.graph, example_inputs, self._masks)
        with rounded_as_in_eager(gm.graph) if self._exact_branches else contextlib.nullcontext():
            compiled = compile_graph(gm, example_inputs, **kwargs)
        graph.code = getattr(compiled, "source_code", "")
        graph.constants = getattr(compiled, "constants", None) or {}
        graph.key = torch_compat.cache_key(compiled)
        self._graphs.append(graph)
        return compiled

    def _planned_alone(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        """Plan a graph without a separate backward; return a graph with equal results that is within the budget."""
        joint = joint_of_whole(self.arrived, gm, name_of(gm)) if self.has_two_graphs else None
        if joint is None:
            return gm
        if self.arrived.runs_backward:
            self._exact_branches |= self._rounds_as_eager(joint)
        with self._recording(joint):
            self.planned, gm = plan_whole(self.arrived, joint, inputs, self.budget.plan)
        return gm

    def _as_compiled(self) -> Planned | None:
        """Return the planned graph with the memory that its compiled code takes, and write its plan to the cache."""
        planned, options = self.planned, self.arrived.options
        graphs = 1 if planned is not None and planned.arrived.is_alone else 2
        if (
            not self.has_two_graphs
            or len(self._graphs) != graphs
            or planned is None
            or options.check
        ):
            return planned
        plan, timeline = planned.plan, None
        symbolic = options.in_bytes and (plan.symbolic or plan.learns_sizes)
        for kind in (True, False) if symbolic else (False,):
            try:
                # The plan keeps its estimated memory if the code cannot be simulated.
                timeline = timeline or compiled_timeline(*self._graphs, symbolic=kind)
            except Exception:  # this generated code cannot be simulated, for example a C++ wrapper
                _LOG.info("the memory of '%s' as compiled is not known", plan.graph, exc_info=True)
        if timeline is not None:
            plan = plan.as_compiled(timeline, held_bytes(timeline))
        keys = [graph.key for graph in self._graphs if graph.key is not None]
        # Without a record, a later process that finds the step in a cache plans the step again. That is necessary if
        # sizes are data-dependent, or if the step exceeds its budget in the cases of `CompiledBudget.is_open`.
        record = None if len(keys) != graphs or plan.learns_sizes else self.record
        if record is not None and not self.budget.is_open(plan, planned.request):
            timed = "" if timeline is None else write_timeline(timeline)
            plan_cache.keep(keys, replace(record, plan=plan.to_json(), timeline=timed))
        return replace(planned, plan=plan)


def _on_cpu(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether all tensors of a graph from Dynamo are on a CPU."""
    values = (*inputs, *(n.meta.get("example_value") for n in gm.graph.nodes))
    leaves = torch_compat.pytree.tree_leaves(values)
    return all(x.device.type == "cpu" for x in leaves if isinstance(x, torch.Tensor))
