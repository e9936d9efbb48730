"""The three stages of compiling a graph: `Arrived` from Dynamo, `Planned`, and `Compiled`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import fx

from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning, LastWarning, warn
from remat.graph.capture.regions import Modules, is_region, split_region
from remat.graph.collection import paused_collection
from remat.graph.costs.auto import device_type_of, is_for_cpu
from remat.graph.joint import JointGraph, copy_module
from remat.graph.policies import module_names, no_match
from remat.graph.roles import has_tangents
from remat.graph.verify import Split, verify
from remat.integrations import compile_log
from remat.integrations.graph_memory import GraphMemory
from remat.integrations.partition_options import PartitionOptions
from remat.integrations.recompute_check import add_checks
from remat.integrations.replaced_methods import GeneratedCode
from remat.integrations.step_guards import Look, guard_sizes
from remat.integrations.step_tally import CountRun, StepTally, tally_of
from remat.integrations.step_together import Member
from remat.integrations.traced_graph import code_of, parameters_of
from remat.passes.decide.policies import check_matched
from remat.passes.instruments.reproducer import report
from remat.planning.pipelines import modules_of, prepare, split
from remat.planning.plan import Plan
from remat.planning.request import PlanRequest
from remat.units import Budget, format_bytes

_LOG = logging.getLogger(__name__)

#: A function that plans a joint graph in place. Its arguments are the graph, the options and, by name, ``agree``: the
#: pass by which ranks agree on a decision; None if this rank decides alone.
PlanGraph = Callable[..., Plan]
#: A compiled graph.
Run = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrived:
    """A graph that will be compiled, with what is known about its step.

    Attributes:
        options: the options of the partitioner or backend.
        earlier: identities of the graphs that were planned before this compilation; see
            `CompiledGraphs.planned`.
        stage: called with the name of each stage of the compilation, such as ``"planning"``.
        watched: whether the backend checks, in each run of the step, the run's sizes, and whether the user
            has written to the step's outputs.
        tally: the object that counts the bytes of all graphs of the step; None unless the budget is
            a peak in bytes.
        other_graphs_runs: number of runs of the step's other graphs, from `StepTally.runs`.
        other_graphs_bytes: bytes that the step's other graphs have alive. Planning subtracts these bytes from a
            budget that is a peak in bytes.
        ends_frame: whether the user's function ends with this graph; False at a graph break.
        is_part: whether the step is known to have other graphs.
        runs_backward: whether the user's function computes gradients itself, as under Dynamo's option
            ``trace_autograd_ops``.
        is_alone: whether the graph is planned without a backward graph: a whole step, or an inference; see
            `remat.integrations.alone`.
        over: text that says why the budget cannot be met, if an earlier compilation has found this
            and the step runs nevertheless; else empty.
    """

    options: PartitionOptions
    earlier: frozenset[str]
    stage: Callable[[str], None] = lambda _: None
    watched: bool = False
    tally: StepTally | None = None
    other_graphs_runs: int = 0
    other_graphs_bytes: int = 0
    ends_frame: bool = True
    is_part: bool = False
    runs_backward: bool = False
    is_alone: bool = False
    over: str = ""

    @classmethod
    def of(
        cls,
        options: PartitionOptions,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        stage: Callable[[str], None],
    ) -> Self:
        """Return the first stage of a compilation, for a graph from Dynamo that a backend will compile.

        Args:
            options: the options of the backend.
            gm: the graph.
            inputs: example inputs of the graph.
            stage: called with the name of each stage of the compilation.
        """
        reason = getattr(gm, "compile_subgraph_reason", None)
        ends_frame = not getattr(reason, "graph_break", False)
        options.graphs.has_breaks |= not ends_frame
        request, tally, runs, held = options.request, None, 0, 0
        counts = request.decides or options.graphs.replanned > 0
        if counts and request.hooks is None and request.budget.peak_bytes is not None:
            tally = tally_of(request.budget.peak_bytes)
            runs, held = tally.runs, tally.other_graphs_bytes(gm, inputs)
        return cls(
            options=options,
            earlier=frozenset(options.graphs.planned),
            stage=stage,
            watched=True,
            tally=tally,
            other_graphs_runs=runs,
            other_graphs_bytes=held,
            ends_frame=ends_frame,
            runs_backward=_runs_backward(gm),
            is_part=bool(held) or not ends_frame or torch_compat.resumes_after_break(),
        )

    def runs_again(self, kind: str) -> bool:
        """Return whether the code with a given identity was compiled before this compilation.

        Args:
            kind: identity of the code and its parameters; see `code_of`.
        """
        return kind != "" and kind in self.earlier

    def runs_anyway(self, kind: str) -> bool:
        """Return whether a graph runs even if its budget in bytes cannot be met.

        The result is True for an inference, and if other graphs of the step have memory alive. The result is also True
        for a recompilation, where an error would end a running training. The result is always False with the option
        ``strict``, with a budget that is a ratio, with a saved plan, and with the user's own pipeline.

        Args:
            kind: identity of the graph's code and parameters; see `code_of`.
        """
        options, request = self.options, self.options.request
        decides = request.decides or options.graphs.replanned > 0
        may_exceed = not options.strict and decides and request.budget.in_bytes
        is_inference = self.is_alone and not self.runs_backward
        return may_exceed and (is_inference or self.runs_again(kind) or self.other_graphs_bytes > 0)

    def of_step(self, request: PlanRequest) -> PlanRequest:
        """Return the options to plan this graph within the part of the peak that the step's other graphs leave."""
        if request.decides:
            request = replace(request, of_several=self.is_part)
        if self.other_graphs_bytes:
            left = max(1, (request.budget.peak_bytes or 0) - self.other_graphs_bytes)
            request = replace(request, budget=Budget(peak_bytes=left))
        return request

    def partition(
        self, joint: JointGraph, joint_inputs: Sequence[object], plan_graph: PlanGraph
    ) -> tuple[Planned | None, Modules]:
        """Plan a joint graph in place, and split it into a forward and a backward graph.

        Args:
            joint: the joint graph; it is changed.
            joint_inputs: example inputs; empty for a nested region, which is partitioned without a
                budget.
            plan_graph: the function that plans.

        Returns:
            The planned graph, and its forward and backward graphs. The planned graph is None for a
            nested region, and if nothing in the graph is differentiable.
        """
        if is_region(joint.graph_module, joint_inputs):
            return None, split_region(
                joint.graph_module,
                num_fwd_outputs=joint.num_fwd_outputs,
                static_lifetime_input_indices=joint.static_inputs,
            )
        request, over = self.options.request, self.over
        copied = joint.copy() if self.tally is not None else None
        self.stage("planning")
        try:
            if not joint.places and not has_tangents(joint):
                return None, _split_unplanned(joint)
            self._warn_of_uncounted(joint)
            request = self._request_for(joint)
            kind = code_of(parameters_of(joint))  # before planning changes the graph
            may_exceed = self.runs_anyway(kind)
            if not over:
                try:
                    trial = joint.copy() if may_exceed else joint
                    plan = self._plan(trial, request, plan_graph)
                except BudgetError as error:
                    if not may_exceed:
                        raise
                    over = str(error)
            if over:
                least = Budget(peak_share=0.0) if request.budget.on_peak else Budget(share=0.0)
                request = replace(request, budget=least)
                plan = self._plan(joint, request, plan_graph)
            planned = Planned(
                arrived=self, plan=plan, request=request, kind=kind, over=over, joint=copied
            ).recorded()
            return planned, planned.modules(joint)
        except Exception as error:
            report(error, joint, self.options.repro, lambda: _described(request))
            raise

    def _plan(self, joint: JointGraph, request: PlanRequest, plan_graph: PlanGraph) -> Plan:
        agree = self.options.agree
        if agree is not None and self.other_graphs_runs:
            # Equal graphs at different places of a step have different budgets left, so ranks agree per place.
            agree = replace(
                agree, options=f"{agree.options}, after {self.other_graphs_runs} graphs of the step"
            )
        with paused_collection():
            return plan_graph(joint, request, agree=agree)

    def _request_for(self, joint: JointGraph) -> PlanRequest:
        """Return the options to plan a joint graph, with its saved plan if there is one, and its part of the budget."""
        request, partitioned = self.options.request, self.options.graphs.partitioned
        if request.plan is not None:
            fingerprint = joint.fingerprint
            request = request.for_graph(joint, fingerprint, nth=partitioned[fingerprint])
            partitioned[fingerprint] += 1
        request = self.of_step(request)
        if request.policies and request.plan is None:
            self._match_policies(joint)
            request = replace(request, has_matched=True)
        return request

    def _match_policies(self, joint: JointGraph) -> None:
        """Check that each pattern of the policies matches a module of the step."""
        policies, graphs = self.options.request.policies, self.options.graphs
        nodes = list(joint.graph.nodes)
        missing = policies.unmatched(nodes)
        graphs.matched.update(p.pattern for p in policies.given if p not in missing)
        # In a step with graph breaks, the module may be in another graph.
        if not graphs.has_breaks:
            check_matched(policies, [joint.graph], joint.name)
        missing = [p for p in missing if p.pattern not in graphs.matched]
        if missing and self.ends_frame:
            graphs.matched.update(p.pattern for p in missing)  # warn once
            warn(
                f"{no_match(missing, module_names(nodes), joint.name)}. The step has graph breaks; no graph of it that "
                "was compiled so far has such a module",
                BudgetWarning,
            )

    def _warn_of_uncounted(self, joint: JointGraph) -> None:
        """Warn if peaks under a budget in bytes leave out the memory that CPU operators allocate internally."""
        request, lower = self.options.request, self.options.lower
        if not request.decides or lower != "eager" or request.budget.peak_bytes is None:
            return
        # Peaks include the memory that operators allocate inside only if the cost model is for CPUs.
        if device_type_of(joint) == "cpu" and not is_for_cpu(request.cost.for_graph(joint)):
            warn(
                f"budget {request.budget.label} bounds the peak without what operators take beside their results: this "
                f"step runs on a CPU, and cost model '{request.cost}' is about none. Leave cost out, or give "
                "cost='roofline:epyc', and it is counted",
                BudgetWarning,
            )


def _runs_backward(gm: fx.GraphModule) -> bool:
    """Return whether a graph from Dynamo computes gradients itself."""
    modules = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    targets = {node.target for m in modules for node in m.graph.nodes}
    return not targets.isdisjoint((torch.autograd.grad, torch_compat.functorch_grad))


def _split_unplanned(joint: JointGraph) -> Modules:
    """Return the forward and the backward graph of a joint graph in which nothing is differentiable."""
    state = split(prepare(joint, in_place=True))
    forward, backward = modules_of(state)
    verify(Split(joint=state.joint, forward=forward, backward=backward))
    return forward, backward


def _described(request: PlanRequest) -> tuple[str, dict[str, Any], str]:
    """Return the pipeline, the options and a note on how a graph was planned, for a reproducer of an error."""
    is_saved = request.plan is not None
    note = "It was split by a saved plan, whose decision is not in here." if is_saved else ""
    # Under a budget on the peak, planning compares many plans, which no single pipeline repeats.
    searched = request.budget.on_peak and not is_saved
    return "" if searched else str(request.as_pipeline()), request.to_options(), note


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """The stage of a compilation in which the graph has a plan.

    Attributes:
        arrived: the stage of the graph before planning.
        plan: the plan, whose modules live as long as this object. Once the step is compiled, it has
            the memory of the compiled code, if that is known.
        request: the options that the graph was planned under.
        kind: identity of the graph's code and parameters; see `code_of`.
        over: text that says why the budget cannot be met, if the step runs nevertheless; else
            empty.
        joint: the joint graph before the split, to plan it with other graphs; None if the step comes from a cache,
            or is not planned again.
    """

    arrived: Arrived
    plan: Plan
    request: PlanRequest
    kind: str
    over: str = ""
    joint: JointGraph | None = None

    def recorded(self) -> Self:
        """Log the plan, record the graph as planned, and return this stage; the plan notes if other graphs exist."""
        arrived, plan = self.arrived, self.plan
        if arrived.is_part and not plan.of_step:
            plan = replace(plan, _of_step=_other_graphs(arrived))
        if self.request.decides:
            self._count()
        if _LOG.isEnabledFor(logging.INFO):  # the peak takes time
            _LOG.info(
                "'%s' at budget %s: %s saved, peak %s (as planned; without remat is budget 1)",
                plan.graph,
                plan.requested.label,
                format_bytes(plan.planned_saved_bytes or plan.saved_bytes),
                plan.before_after.line,
            )
        return replace(self, plan=plan)

    @property
    def identity(self) -> str:
        """The planned graph's identity, by which `CompiledGraphs.planned` records the graph."""
        return self.kind or self.plan.fingerprint

    @property
    def saved_plan(self) -> Plan | None:
        """The saved plan that was applied to the graph; None if a new plan was made."""
        return self.request.plan if isinstance(self.request.plan, Plan) else None

    def _count(self) -> None:
        """Add the graph to the planned graphs, and warn if several graphs each get the whole budget in bytes."""
        options = self.arrived.options
        planned, budget = options.graphs.planned, options.request.budget
        counted = self.identity in planned or self.arrived.is_alone
        planned.add(self.identity)
        if not counted and len(planned) == 2 and budget.in_bytes and self.arrived.tally is None:
            warn(
                f"a second graph is compiled under the budget {budget}: each graph gets it by "
                "itself, so together they may keep more. For one budget over all graphs of a model, "
                "plan them together and reuse the plans: "
                "remat.plan(remat.capture(model, args, fullgraph=False), budget=…), then "
                'options={"plan": plans}',
                BudgetWarning,
            )

    def modules(self, joint: JointGraph) -> Modules:
        """Return the planned forward and backward graph to compile, with the checks of the option ``check``."""
        # AOTAutograd may take the backward module apart later, so AOTAutograd gets a copy of the plan's module.
        forward, backward = self.plan.forward, copy_module(self.plan.backward)
        if self.arrived.options.check is None:
            return forward, backward
        if joint.places:
            warn(
                f"check='recomputed' does not check '{self.plan.graph}', whose step is one graph: the check compares "
                "values of a forward graph with those of its backward graph. Compile the model alone to check it",
                BudgetWarning,
            )
            return forward, backward
        forward = copy_module(forward)  # the plan's own graphs stay without checks
        add_checks(forward, backward, joint.num_fwd_outputs)
        budget = self.request.budget
        if budget.in_bytes or budget.on_peak:
            warn(
                f"check='recomputed' holds no budget in bytes or on the peak: '{self.plan.graph}' also saves what backward "
                f"computes again, and is not planned again for {budget.label}. Its plan may differ from that "
                "without the check; a ratio of saved bytes gives the same plan with and without it",
                BudgetWarning,
            )
        return forward, backward

    def finish(self, inputs: Sequence[Any]) -> Look | None:
        """Check that the plan's bytes meet the budget, and add the plan to the list `remat.plans`.

        Returns:
            A callback that checks the sizes of each run; None if no check is needed, or if the runs
            are not watched.

        Raises:
            PlanError: a saved plan exceeds its budget in bytes at the traced sizes.
        """
        arrived, look = self.arrived, None
        # `StepTally` warns if other graphs run in the same step. Outputs that the user still holds do not count as other graphs.
        if not self.over or not arrived.other_graphs_runs:
            budget = arrived.options.request.budget if self.over else self.plan.requested
            last_warning = arrived.options.graphs.last_warnings[self.identity]
            if self.over:
                self._warn_of_excess(last_warning)
            look = guard_sizes(
                inputs,
                self.plan,
                budget,
                last_warning,
                saved=self.saved_plan,
                watched=arrived.watched,
            )
        # Compiling a step takes much longer than computing its plan's numbers, and these numbers outlive the step.
        compile_log.add(
            self.plan, self.plan.figures if arrived.watched else self.plan.known_figures
        )
        return look

    def _warn_of_excess(self, last_warning: LastWarning) -> None:
        """Warn that a step runs although its budget cannot be met."""
        arrived, on_peak = self.arrived, self.arrived.options.request.budget.on_peak
        taken = self.plan.peak_bytes if on_peak else self.plan.saved_bytes
        if taken <= last_warning.quiet:
            return
        last_warning.nbytes = taken
        again = "that has run before is compiled again"
        if arrived.other_graphs_bytes and not arrived.runs_again(self.kind):
            held = format_bytes(arrived.other_graphs_bytes)
            again = f"is compiled while outputs of other graphs hold {held}"
        elif not arrived.runs_again(self.kind):
            again = "has no backward"
        warn(
            f"a step {again}, and its budget cannot be held: {self.over}. The plan with the least "
            f"{'peak' if on_peak else 'saved bytes'} runs instead, which takes {format_bytes(taken)} ({taken} bytes). "
            f"{LastWarning.NEXT}; options={{'strict': True}} refuses it",
            BudgetWarning,
        )

    def check_host(self) -> None:
        """Check that the values offloaded by all graphs of the step fit in ``host_memory`` together.

        Raises:
            BudgetError: the offloaded values take more than ``host_memory``.
        """
        options = self.arrived.options
        most, held = options.request.host_memory, options.graphs.host_bytes
        held[self.identity] = self.plan.host_bytes
        if most is not None and sum(held.values()) > most:
            raise BudgetError(
                f"host_memory is {format_bytes(most)} ({most} bytes), and {len(held)} graphs of the step have "
                f"{format_bytes(sum(held.values()))} in the host's memory together; plan them together: remat.plan("
                f'remat.capture(model, args, fullgraph=False), …, host_memory={most}), then options={{"plan": plans}}'
            )

    def in_turn(self, compile_again: Callable[[], Run], run: Run) -> Run:
        """Return a function that runs the graph; each run in a step uses the plan that was made for this run.

        Args:
            compile_again: compiles the graph with its next plan.
            run: the graph, compiled with its first plan.
        """
        tally, code = self.arrived.tally, torch_compat.traced_code()
        key = self.plan.fingerprint, id(code)
        if tally is None or self.saved_plan is None or tally.together.kinds(key) == 1:
            return run
        others = (compile_again() for _ in range(1, tally.together.kinds(key)))
        return partial(tally.run_in_turn, key, (run, *others))

    def count_runs(
        self, gm: fx.GraphModule, inputs: Sequence[Any], backend: object
    ) -> CountRun | None:
        """Return the callback that adds each run of the graph to the step's tally, for `step_wrapper.wrap_step`.

        The callback is None if the budget is not a peak in bytes.
        """
        tally = self.arrived.tally
        if tally is None:
            return None
        memory, code = GraphMemory.of(self.plan, gm, inputs), torch_compat.traced_code()
        plan, options = self.plan, self.arrived.options
        if code is not None and (memory.sizes is None or memory.sizes.are_automatic):
            joint = self.joint if memory.sizes is None else None
            member = Member(joint, plan.fingerprint, code, plan.decision, options, backend)
            memory = replace(memory, member=member)
        tally.add(memory, inputs)
        return partial(tally.forward, memory)


def _other_graphs(arrived: Arrived) -> str:
    """Return a text for `Plan.explain` that says that the step has other graphs."""
    text = "one of several in the step; the figures are for this graph alone, and remat.plans() has a plan for each"
    if not arrived.other_graphs_bytes:
        return text
    held, given = format_bytes(arrived.other_graphs_bytes), arrived.options.request.budget.label
    return f"{text}; the others held {held} of the given budget, {given}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compiled:
    """A compiled graph, the last stage of a compilation.

    Attributes:
        planned: the stage of the planned graph, with the memory of the compiled code; None if the graph has no plan.
        run: the compiled graph.
        unloaded: the graph's generated code whose kernels are not compiled yet.
    """

    planned: Planned | None
    run: Callable[..., Any]
    unloaded: Sequence[GeneratedCode] = ()

    def load(self, patches: dict[str, Any]) -> None:
        """Compile the kernels of the graph's generated code, under the given Inductor settings."""
        with torch_compat.inductor_config.patch(patches):
            for code in self.unloaded:
                code.load()
