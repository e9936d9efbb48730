"""The partitioner that AOTAutograd or Inductor calls in place of PyTorch's own."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import fx

from remat import torch_compat
from remat.arguments import BUDGET, COST, SOLVER, passes_on
from remat.errors import BudgetError, BudgetWarning, ProblemError, Said, warn
from remat.graph.collection import paused_collection
from remat.graph.costs.auto import device_type_of, is_for_cpu
from remat.graph.joint import JointGraph, copy_module, primals_of
from remat.graph.policies import module_names, no_match
from remat.graph.regions import is_region, split_region
from remat.graph.roles import has_tangents
from remat.graph.storages import planned_sizes
from remat.graph.user_mutations import copy_outputs, unversioned_outputs
from remat.graph.verify import Split, verify
from remat.integrations import plan_log
from remat.integrations.compile_progress import CompileProgress
from remat.integrations.recompute_check import add_checks
from remat.integrations.step_guards import Look, at_declared_sizes, guard_sizes
from remat.integrations.step_tally import GraphMemory, StepTally, tally_of
from remat.options import (
    CompileOptions,
    CostOption,
    PlanOptions,
    PlanOptionsDict,
    SolverOption,
)
from remat.passes.core.base import Pass
from remat.passes.decide.policies import check_matched
from remat.passes.hooks.saved_tensor_hooks import PackSaved
from remat.passes.instruments.reproducer import folder_for, report
from remat.passes.packing.pairs import SavedTensorHooks, register
from remat.passes.ranks.agree_ranks import WAIT_S, AgreeRanks
from remat.passes.ranks.protocol import other_ranks
from remat.planning.context import GraphContext
from remat.planning.pipelines import prepare, split, with_copies
from remat.planning.plan import Plan
from remat.planning.planner import Planner, plan_graph
from remat.planning.plans import PlanSet
from remat.planning.request import PlanRequest
from remat.planning.search.proposals import search_of
from remat.plugins.identity import described, is_known_elsewhere, surroundings
from remat.units import AnyBudget, Budget, format_bytes
from remat.version import __version__

_LOG = logging.getLogger(__name__)

#: Pattern of Dynamo's path of a submodule, such as ``L['self'].blocks``; the group is the local variable's name.
_OF_LOCAL = re.compile(r"L\['(\w+)'\]\.")
#: Attributes of a partitioner that do not affect its plans, or that enter its cache key in another way.
_DECIDES_NOTHING = frozenset(("request", "agree", "repro", "graphs", "made"))

#: A function that plans a joint graph in place.
PlanGraph = Callable[[JointGraph, PlanRequest, AgreeRanks | None], Plan]


@dataclass(slots=True)
class CompiledGraphs:
    """Record of the graphs that one `Partitioner` has partitioned.

    Attributes:
        planned: identities of the graphs that were planned under the budget. An identity is the
            result of `code_of` or, if Dynamo is not compiling, the graph's fingerprint (a digest of
            its structure).
        met: dict from a fingerprint to the number of graphs with this fingerprint that were
            partitioned so far. Equal layers share a fingerprint, and each layer takes the next
            saved plan of this fingerprint.
        matched: patterns of the option ``policies`` that matched a module in any of the graphs.
        has_breaks: whether the step has graph breaks. A pattern that matches no module in one graph
            may then match a module in another graph.
        host_bytes: dict from the identity of each graph to the bytes that the graph offloads.
        unplanned: identities of the functions without a plan that a warning has named.
        said: dict from the identity of each graph to the bytes that warnings about the graph named.
    """

    planned: set[str] = field(default_factory=set)
    met: Counter[str] = field(default_factory=Counter)
    matched: set[str] = field(default_factory=set)
    has_breaks: bool = False
    host_bytes: dict[str, int] = field(default_factory=dict)
    unplanned: set[str] = field(default_factory=set)
    said: defaultdict[str, Said] = field(default_factory=lambda: defaultdict(Said))


class Partitioner(torch_compat.CustomPartitionerFn):
    """Partition joint graphs into forward and backward under a memory budget.

    An instance is a ``partition_fn`` for ``aot_autograd`` and a ``custom_partitioner_fn`` for
    Inductor. If nothing in a joint graph is differentiable, the forward graph is the user's graph,
    as with PyTorch's own partitioner.

    Attributes:
        request: the parsed options of planning.
        lower: the lowering of the graphs, ``"inductor"`` or ``"eager"``.
        agree: the pass by which the ranks of a job agree on a decision; None if every rank decides
            alone.
        repro: the folder for reproducers of planning errors; None for no reproducers.
        strict: whether a budget in bytes that cannot be met raises an error at every compilation.
        exact_branches: whether Inductor rounds each 16-bit result of a graph that branches on one.
        check: ``"recomputed"`` if backward compares what it recomputes with forward's values; else
            None.
        graphs: record of the graphs that this partitioner has partitioned.
        made: the plan of the last call of this object. The plan's modules live as long as this
            object. None for a compilation by the backend, where `StepPartition` holds the plan.
    """

    @passes_on(PlanOptionsDict.__annotations__, PlanOptions)
    def __init__(
        self,
        *,
        lower: str = "eager",
        rank_wait_s: float | None = WAIT_S,
        repro: str | Path | bool | None = None,
        strict: bool = False,
        exact_branches: bool = True,
        check: str | None = None,
        **options: Unpack[PlanOptionsDict],
    ) -> None:
        """Parse and check the options.

        Args:
            lower: the lowering of the graphs, ``"inductor"`` or ``"eager"``.
            rank_wait_s: seconds that the other ranks of a job wait for the decision of rank 0. None:
                every rank decides alone.
            repro: the folder for a reproducer of an unexpected planning error. None: the folder that
                the environment variable ``REMAT_REPRO_DIR`` names, else a temporary folder. False: no
                reproducer.
            strict: whether a recompilation raises an error if a budget in bytes cannot be met, as the
                first compilation does. By default a recompilation warns instead, and the step runs
                under the plan with the least peak. Under a `remat.Saved` budget, the step then runs
                under the plan with the fewest saved bytes.
            exact_branches: whether Inductor rounds every 16-bit result as eager PyTorch does, in graphs
                that branch on such results, as a router of experts does. From PyTorch 2.15 on,
                Inductor then rounds numbers in the code too. If False, the numbers of forward, and
                hence its branches, may depend on the budget. Backward takes forward's branches in
                any case.
            check: ``"recomputed"``, for debugging: forward also saves each value that backward computes
                again, and backward compares the two bit for bit. A branch value that differs raises a
                `remat.errors.RecomputeError`; other differences are logged. The budget is not met.
            options: options of `remat.options.PlanOptions`.
        """
        torch_compat.check_version()
        self.request = PlanRequest.of(**options)
        self.hooks_key = "".join(map(register, self._all_hooks()))
        self.lower = lower
        self.agree = None if rank_wait_s is None else self._agreement(rank_wait_s)
        self.repro = folder_for(repro)
        if type(strict) is not bool:
            raise ProblemError(
                f"strict is {strict!r}; expected False (a later recompilation whose budget cannot be held runs at the "
                "least peak, with a warning) or True (it is refused)"
            )
        self.strict = strict
        if type(exact_branches) is not bool:
            raise ProblemError(
                f"exact_branches is {exact_branches!r}; expected True (Inductor rounds every 16-bit result of a graph "
                "that branches on one) or False (it rounds as by default)"
            )
        self.exact_branches = exact_branches
        if check not in (None, "recomputed"):
            raise ProblemError(f"check is {check!r}; expected None or 'recomputed'")
        self.check = check
        self.graphs = CompiledGraphs()
        self.made: Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except ``graphs`` and ``made``, for copying and pickling.

        AOTAutograd copies this object for its cache keys, which must not depend on earlier steps.
        """
        return {k: v for k, v in vars(self).items() if k not in ("graphs", "made")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, graphs=CompiledGraphs(), made=None)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **convention: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph into forward and backward graph.

        AOTAutograd calls this method, with the signature of
        `torch._inductor.custom_graph_pass.CustomPartitionerFn`.

        Args:
            gm: the joint graph; it is changed, as by PyTorch's own partitioner.
            joint_inputs: example inputs; empty for a nested region, which is partitioned without a
                budget.
            convention: ``num_fwd_outputs`` and ``static_lifetime_input_indices``, as AOTAutograd
                gives them. Other arguments are ignored.

        Returns:
            The forward graph and the backward graph.
        """
        step = StepPartition(self, _plan_standalone, watched=False)
        try:
            return step(gm, joint_inputs, **convention)
        finally:
            self.made = step.made

    @property
    def in_bytes(self) -> bool:
        """Whether the requested budget, or the budget of a saved plan, is in bytes.

        With dynamic shapes, such a budget must be met at every size.
        """
        plan = self.request.plan
        plans = plan.plans if isinstance(plan, PlanSet) else (plan,)
        budgets = [self.request.budget, *(p.asked for p in plans if isinstance(p, Plan))]
        return any(b.in_bytes for b in budgets)

    @property
    def with_others(self) -> bool:
        """Whether other ranks of the job may run the same plan."""
        return self.agree is not None and other_ranks() is not None

    def largest(self, number: int) -> int:
        """Return the largest of the numbers that the ranks of a job pass to this method.

        Every rank that runs the newest plan must call this method. Without other ranks, ``number``
        is returned.
        """
        ranks = None if self.agree is None else other_ranks()
        if ranks is None or self.agree is None:
            return number
        return ranks.largest(number, self.agree.wait_s)

    def _agreement(self, wait_s: float) -> AgreeRanks:
        """Return the pass by which ranks with the same options agree on a decision.

        Args:
            wait_s: seconds that the other ranks wait for rank 0.
        """
        request = self.request
        if request.pipeline is None:
            # Ranks share no plan that offloads values, and the rate of a measured link differs between them.
            request = replace(request, plan=None, offload=None)
            options = request.to_options() | {"solver": request.solver.name}
        else:
            options = {
                "pipeline": str(request.pipeline),
                "reread_inputs": str(request.reread_inputs),
            }
        options |= {"lowering": self.lower, "remat": __version__}
        return AgreeRanks(
            asked=", ".join(f"{name} {text}" for name, text in options.items()),
            wait_s=wait_s,
            capacity_too=request.budget.on_peak,
        )

    def _all_hooks(self) -> list[SavedTensorHooks]:
        """Return the saved-tensor hooks of the options and of the pipeline."""
        request = self.request
        passes = () if request.pipeline is None else request.pipeline.flat()
        packed = [p.hooks for p in passes if isinstance(p, PackSaved)]
        return packed if request.hooks is None else [request.hooks, *packed]

    @property
    def cacheable(self) -> bool:
        """Whether the cache key identifies a compilation across processes.

        A saved-tensor hook without a ``cache_key`` prevents this.
        """
        return all(h.cache_key is not None for h in self._all_hooks())

    def uuid(self) -> str:
        """Return a cache key that depends on all options, remat's code, and declared operators."""
        return self.key()

    def key(self, *, graphs_only: bool = False, **more: Any) -> str:
        """Return the cache key of a compilation under these options.

        Args:
            graphs_only: whether the key is only for caches of compiled forward and backward graphs.
                Such graphs already contain the decision, so the key leaves out the options and
                ``more``.
            more: further values that affect the decision, by name.
        """
        decisive: dict[str, Any] = {
            "hooks": self.hooks_key,
            "around": surroundings(),
            "sizes": sorted(planned_sizes().items()),
        }
        if not graphs_only:
            decisive |= {"options": self.described(), **more}
            plan = self.request.plan
            if isinstance(plan, PlanSet) and plan.has_equal_graphs:
                # Each of several equal graphs takes the next plan, so the number of earlier graphs decides which plan.
                decisive["met"] = self.graphs.met.total()
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode())
        return f"remat-{__version__}-{digest.hexdigest()}"

    def described(self) -> dict[str, Any]:
        """Return all attributes that affect the decision, by name, as JSON values.

        Attributes that do not affect the decision are excluded by name, so that a new option is
        included by default.
        """
        given = {f.name: getattr(self.request, f.name) for f in fields(self.request)}
        given |= {name: value for name, value in vars(self).items() if name not in _DECIDES_NOTHING}
        found = {name: described(value) for name, value in given.items()}
        if self.request.pipeline is not None:
            found["pipeline"] = str(self.request.pipeline)
        found["hooks"] = self.hooks_key
        return found

    @property
    def keeps_steps(self) -> bool:
        """Whether a whole compiled step may come from a cache with its plan, without planning.

        False if a pipeline, a hook without a cache key, or code from outside remat takes part in
        the decision. False also if ranks must agree on the decision.
        """
        if not self.cacheable or self.request.pipeline is not None or self.check is not None:
            return False
        return not self.with_others and is_known_elsewhere(self.described())


class StepPartition:
    """Partition the graphs of one compilation.

    Args:
        options: the partitioner, which holds the options of planning.
        plan_graph: function that plans a joint graph in place.
        watched: whether the backend checks each run of the step: its sizes, and whether the user
            has written to its outputs.

    Attributes:
        asked: the options for the current graph.
        made: the plan of the current graph. Its modules live as long as this object.
        over: text that says why the budget cannot be met, if the step runs nevertheless; else
            empty.
        tally: the object that counts the bytes of all graphs of the step; None unless the budget is
            a peak in bytes.
        beside: pair about the step's other graphs: their number of runs from `StepTally.runs`, and
            the bytes that these graphs have alive.
        is_part: whether the step is known to have other graphs.
        progress: shows the stages of the compilation; None to show nothing.
        ends_frame: whether the user's function ends with the current graph; False at a graph break.
    """

    def __init__(self, options: Partitioner, plan_graph: PlanGraph, *, watched: bool) -> None:
        self.options, self.graphs, self.watched = options, options.graphs, watched
        self.asked = options.request
        self.made: Plan | None = None
        self.over = ""
        self.tally: StepTally | None = None
        self.beside = (0, 0)
        self.is_part = False
        self.progress: CompileProgress | None = None
        self.ends_frame = True
        self._plan_graph = plan_graph
        # Code and parameters of the current graph; None before `meet`.
        self._kind: str | None = None
        self._trains = False  # whether code like that of the current graph was planned before

    def stage(self, text: str) -> None:
        """Show that a stage of the compilation begins.

        Args:
            text: the stage, such as ``"planning"``.
        """
        if self.progress is not None:
            self.progress.stage(text)

    def join(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Record how many bytes the step's other graphs have alive, before a graph is compiled.

        Planning subtracts these bytes from a budget that is a peak in bytes.

        Args:
            gm: the graph that will be compiled, from Dynamo.
            inputs: example inputs of this graph.
        """
        reason = getattr(gm, "compile_subgraph_reason", None)
        self.ends_frame = not getattr(reason, "graph_break", False)
        self.graphs.has_breaks |= not self.ends_frame
        request = self.options.request
        if request.decides and request.hooks is None and request.budget.peak_bytes is not None:
            self.tally = tally_of(request.budget.peak_bytes)
            self.beside = (self.tally.runs, self.tally.beside(gm, inputs))
        self.is_part = (
            bool(self.beside[1]) or not self.ends_frame or torch_compat.resumes_after_break()
        )

    def count_runs(
        self, gm: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[[Sequence[Any], Sequence[Any], Any], None] | None:
        """Return the callback that counts runs of the compiled graph, for `step_wrapper.wrap_step`.

        The result is None if the budget is not a peak in bytes, or no plan was made.

        Args:
            gm: the graph from Dynamo.
            inputs: example inputs of the graph.
        """
        if self.tally is None or self.made is None:
            return None
        memory = GraphMemory.of(self.made, gm, inputs)
        self.tally.add(memory, inputs)
        return partial(self.tally.forward, memory)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **convention: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph into forward and backward graph; see `Partitioner.__call__`."""
        if is_region(gm, joint_inputs):
            return split_region(gm, **convention)
        return self.split(joint_of(gm, self.options.lower, **convention))

    def split(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a graph in place, and return its forward and backward graphs.

        If nothing in the graph is differentiable, there is no plan.
        """
        primals = [node.meta.get("val") for node in primals_of(joint)]
        self.stage("planning")
        try:
            with at_declared_sizes(primals, in_bytes=self.options.in_bytes):
                return self._split(joint, primals)
        except Exception as error:
            report(error, joint, self.options.repro, self._described)
            raise

    def _split(
        self, joint: JointGraph, primals: Sequence[Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if not has_tangents(joint):
            state = split(prepare(joint, in_place=True))
            assert state.forward is not None
            assert state.backward is not None
            verify(Split(joint=state.joint, forward=state.forward, backward=state.backward))
            return state.forward, state.backward
        asked = self.options.request
        self._warn_of_uncounted(joint)
        if asked.plan is not None:
            fingerprint = joint.fingerprint
            met = self.graphs.met[fingerprint]
            asked = asked.for_graph(joint, fingerprint, nth=met)
            self.graphs.met[fingerprint] += 1
        if asked.decides:
            asked = replace(asked, of_several=self.is_part)
        if asked.policies and asked.plan is None:
            self._match_policies(joint)
            asked = replace(asked, has_matched=True)
        self.meet(code_of(parameters_of(joint)))  # before planning changes the graph
        if self.beside[1]:  # the other graphs of the step take a part of the budget
            left = max(1, (asked.budget.peak_bytes or 0) - self.beside[1])
            asked = replace(asked, budget=Budget(peak_bytes=left))
        self.asked = asked
        made = self._plan_anyway(joint) if self.runs_anyway else self._plan(joint, asked)
        if asked.decides:
            self.count_graph(made)
        self.record(made)
        # If watched, the backend calls `finish` after compilation, when the compiled bytes are known.
        if not self.watched:
            self.finish(primals)
        # AOTAutograd may take the backward module apart later, so it gets a copy of the plan's module.
        forward, backward = made.forward, copy_module(made.backward)
        if self.options.check is not None:
            forward = copy_module(forward)  # the plan's own graphs stay without checks
            add_checks(forward, backward, joint.num_fwd_outputs)
            if asked.budget.in_bytes or asked.budget.on_peak:
                warn(
                    f"check='recomputed' holds no budget in bytes or on the peak: '{made.graph}' also saves what backward "
                    f"computes again, and is not planned again for {asked.budget.label}. Its plan may differ from that "
                    "without the check; a ratio of saved bytes gives the same plan with and without it",
                    BudgetWarning,
                )
        return forward, backward

    def _match_policies(self, joint: JointGraph) -> None:
        """Check that each pattern of the policies matches a module of the step.

        In a step with graph breaks, a pattern that matches no module causes a warning instead of an
        error.

        Raises:
            PlanError: a pattern matches no module, and the step has a single graph.
        """
        policies, known = self.options.request.policies, self.graphs.matched
        nodes = list(joint.graph.nodes)
        missing = policies.unmatched(nodes)
        known.update(p.pattern for p in policies.given if p not in missing)
        if not self.graphs.has_breaks:
            check_matched(policies, [joint.graph], joint.name)
        missing = [p for p in missing if p.pattern not in known]
        if missing and self.ends_frame:
            known.update(p.pattern for p in missing)  # warn once
            warn(
                f"{no_match(missing, module_names(nodes), joint.name)}. The step has graph breaks; no graph of it that "
                "was compiled so far has such a module",
                BudgetWarning,
            )

    def take(self, made: Plan, kind: str) -> None:
        """Use a plan from a cache for the current graph, and count this graph as planned.

        Args:
            made: the plan.
            kind: identity of the graph's code and parameters; see `code_of`.
        """
        self.meet(kind)
        if self.options.request.decides:
            self.count_graph(made)
        self.graphs.met[made.fingerprint] += 1
        self.record(made)

    def record(self, made: Plan) -> None:
        """Set the plan of the current graph, and log the plan."""
        if self.is_part and not made.of_step:
            made = replace(made, _of_step=self._of_step())
        self.made = made
        if _LOG.isEnabledFor(logging.INFO):  # the peak takes time
            _LOG.info(
                "'%s' at budget %s: %s saved, peak %s (as planned; without remat is budget 1)",
                made.graph,
                made.asked.label,
                format_bytes(made.planned_saved_bytes or made.saved_bytes),
                made.before_after.line,
            )

    def finish(self, inputs: Sequence[Any]) -> Look | None:
        """Check the bytes of the current graph's plan, and add the plan to `remat.plans`.

        Args:
            inputs: inputs that the graph was traced with.

        Returns:
            A callback that checks the sizes of each run; None if no check is needed, if the runs
            are not watched, or if there is no plan.

        Raises:
            PlanError: a saved plan exceeds its budget in bytes at the traced sizes.
        """
        made, look = self.made, None
        if made is None:
            return None
        # `StepTally` warns if other graphs run in the same step. Outputs that the user still holds are no such graphs.
        if not self.over or not self.beside[0]:
            budget = self.options.request.budget if self.over else made.asked
            said = self.graphs.said[self._kind or made.fingerprint]
            if self.over:
                self._warn_of_excess(made, said)
            look = guard_sizes(inputs, made, budget, said, saved=self.applied, watched=self.watched)
        # Compiling a step takes much longer than its figures, and they outlive the step.
        plan_log.add(made, made.figures if self.watched else made.known_figures)
        return look

    def _of_step(self) -> str:
        """Return a text for `Plan.explain` that says that the step has other graphs."""
        text = "one of several in the step; the figures are for this graph alone, and remat.plans() has a plan for each"
        if not self.beside[1]:
            return text
        given = self.options.request.budget.label
        return (
            f"{text}; the others held {format_bytes(self.beside[1])} of the given budget, {given}"
        )

    def check_host(self) -> None:
        """Check that the values offloaded by all graphs of the step fit in ``host_memory`` together.

        Raises:
            BudgetError: these values take more than ``host_memory``.
        """
        made, most = self.made, self.options.request.host_memory
        if made is None or most is None:
            return
        held = self.graphs.host_bytes
        held[self._kind or made.fingerprint] = made.host_bytes
        if sum(held.values()) > most:
            raise BudgetError(
                f"host_memory is {format_bytes(most)} ({most} bytes), and {len(held)} graphs of the step have "
                f"{format_bytes(sum(held.values()))} in the host's memory together; plan them together: remat.plan("
                f'remat.capture(model, args, fullgraph=False), …, host_memory={most}), then options={{"plan": plans}}'
            )

    def _warn_of_uncounted(self, joint: JointGraph) -> None:
        """Warn if a budget on the peak in bytes does not cover workspaces of operators on a CPU.

        A workspace is memory that an operator allocates internally. Peaks do not include workspaces
        if the cost model is not for CPUs. There is no warning if Inductor compiles the graph.
        """
        asked = self.options.request
        if not asked.decides or self.options.lower != "eager" or asked.budget.peak_bytes is None:
            return
        if device_type_of(joint) == "cpu" and not is_for_cpu(asked.cost.on(joint)):
            warn(
                f"budget {asked.budget.label} bounds the peak without what operators take beside their results: this "
                f"step runs on a CPU, and cost model '{asked.cost}' is about none. Leave cost out, or give "
                "cost='roofline:epyc', and it is counted",
                BudgetWarning,
            )

    @property
    def applied(self) -> Plan | None:
        """The saved plan that the current graph is split by; None if the graph is planned."""
        return self.asked.plan if isinstance(self.asked.plan, Plan) else None

    def meet(self, kind: str) -> None:
        """Record whether the code of the current graph was compiled before.

        Only the first call for this compilation has an effect. In a replan, the code would always
        count as compiled before.

        Args:
            kind: identity of the graph's code and parameters; see `code_of`.
        """
        if self._kind is None:
            self._kind, self._trains = kind, kind != "" and kind in self.graphs.planned

    @property
    def runs_anyway(self) -> bool:
        """Whether the current graph runs even if its budget in bytes cannot be met.

        True for a recompilation, where an error would end a training that has begun. Also True if
        other graphs of the step have memory alive. Always False with the option ``strict``, if the
        budget is a ratio, and with a saved plan or the user's own pipeline.
        """
        asked = self.options.request
        if self.options.strict or not asked.decides:
            return False
        return asked.budget.in_bytes and (self._trains or bool(self.beside[1]))

    def _warn_of_excess(self, made: Plan, said: Said) -> None:
        """Warn that a step runs although its budget cannot be met.

        Args:
            made: the plan that runs.
            said: the bytes that warnings about this step have named; it is updated.
        """
        on_peak = self.options.request.budget.on_peak
        taken = made.peak_bytes if on_peak else made.saved_bytes
        if taken <= said.quiet:
            return
        said.nbytes = taken
        again = "that has run before is compiled again"
        if not self._trains:
            again = f"is compiled while outputs of other graphs hold {format_bytes(self.beside[1])}"
        warn(
            f"a step {again}, and its budget cannot be held: {self.over}. The plan with the least "
            f"{'peak' if on_peak else 'saved bytes'} runs instead, which takes {format_bytes(taken)} ({taken} bytes). "
            f"{Said.NEXT}; options={{'strict': True}} refuses it",
            BudgetWarning,
        )

    def _plan_anyway(self, joint: JointGraph) -> Plan:
        """Plan a graph within the budget or, if no plan is within the budget, for the fewest bytes.

        The fewest bytes are those of the peak if the budget limits the peak, else the saved bytes.
        """
        if not self.over:
            try:
                return self._plan(joint.copy(), self.asked)
            except BudgetError as error:
                self.over = str(error)
        on_peak = self.options.request.budget.on_peak
        least = Budget(peak_share=0.0) if on_peak else Budget(share=0.0)
        self.asked = replace(self.asked, budget=least)
        return self._plan(joint, self.asked)

    def _plan(self, joint: JointGraph, asked: PlanRequest) -> Plan:
        agree = self.options.agree
        if agree is not None and self.beside[0]:
            # Equal graphs at different places of a step have different budgets left, so ranks agree per place.
            agree = replace(
                agree, asked=f"{agree.asked}, after {self.beside[0]} graphs of the step"
            )
        with paused_collection():
            return self._plan_graph(joint, asked, agree)

    def _described(self) -> tuple[str, dict[str, Any], str]:
        """Return the pipeline and the options of the current planning, for a reproducer.

        Returns:
            A triple: the pipeline as text, the arguments of `remat.plan` by name, and a note. The pipeline is empty if no single pipeline repeats the decision. The note may be
            empty.
        """
        asked, note = self.asked, ""
        if asked.plan is not None:
            note = "It was split by a saved plan, whose decision is not in here."
        # Under a budget on the peak, planning compares many plans, which no single pipeline repeats.
        searched = asked.budget.on_peak and asked.plan is None
        return "" if searched else str(asked.as_pipeline()), asked.to_options(), note

    def count_graph(self, made: Plan) -> None:
        """Record a graph as planned. Warn if several graphs each get the whole budget in bytes.

        The warning is given once, at the second distinct graph.

        Args:
            made: the plan of the graph.
        """
        planned, kind = self.graphs.planned, self._kind or made.fingerprint
        known = kind in planned
        planned.add(kind)
        budget = self.options.request.budget
        each_its_own = budget.in_bytes and self.tally is None
        if not known and len(planned) == 2 and each_its_own:
            warn(
                f"a second graph is compiled under the budget {budget}: each graph gets it by "
                "itself, so together they may keep more. For one budget over all graphs of a model, "
                "plan them together and reuse the plans: "
                "remat.plan(remat.capture(model, args, fullgraph=False), budget=…), then "
                'options={"plan": plans}',
                BudgetWarning,
            )


class PartitionerOptions(CompileOptions, total=False):
    """Options that `remat.partitioner` takes by keyword."""

    rank_wait_s: float | None
    repro: str | Path | bool | None
    strict: bool


@passes_on(PartitionerOptions.__annotations__, Partitioner.__init__)
def partitioner(
    budget: AnyBudget = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    **options: Unpack[PartitionerOptions],
) -> Partitioner:
    """Build a partitioner for AOTAutograd or Inductor.

    The partitioner is passed as ``aot_autograd(partition_fn=…)``, or to Inductor as its option
    ``custom_partitioner_fn``.

    Args:
        budget: as in `remat.backend`.
        solver: as in `remat.backend`.
        cost: as in `remat.backend`.
        time_limit: as in `remat.backend`.
        options: as in `remat.backend`, but not those of Inductor, nor ``lower``, ``exact_branches``
            and ``check``.

    Raises:
        RematError: an option is invalid. This function raises the error, not the first
            compilation.
    """
    return Partitioner(budget=budget, solver=solver, cost=cost, time_limit=time_limit, **options)


def code_of(parameters: str) -> str:
    """Return a text that identifies the code that Dynamo compiles now, and the code's parameters.

    A recompilation of the code, such as for other shapes, has the same text. The text consists of
    Dynamo's number of the code and of ``parameters``. Two layers of one class share their code, but
    may differ in the shapes of their parameters. The text is empty if Dynamo is not compiling.

    Args:
        parameters: the result of `parameters_of`.
    """
    where = torch_compat.CompileContext.current_compile_id()
    return "" if where is None or where.frame_id is None else f"{where.frame_id}: {parameters}"


def parameters_of(joint: JointGraph) -> str:
    """Return shapes and dtypes of a graph's parameters and buffers as text."""
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    static = [inputs[i].meta.get("val") for i in joint.static_inputs if i < len(inputs)]
    return ", ".join(f"{tuple(v.shape)} {v.dtype}" for v in static if isinstance(v, torch.Tensor))


def joint_of(gm: fx.GraphModule, lower: str, **convention: Any) -> JointGraph:
    """Convert the joint graph that AOTAutograd gives a partitioner to a `JointGraph`.

    Args:
        gm: the joint graph.
        lower: lowering of the graph, ``"inductor"`` or ``"eager"``.
        convention: ``num_fwd_outputs`` and ``static_lifetime_input_indices``, as AOTAutograd gives
            them to a partitioner.
    """
    joint = JointGraph(
        graph_module=gm,
        num_fwd_outputs=int(convention["num_fwd_outputs"]),
        static_inputs=tuple(convention.get("static_lifetime_input_indices") or ()),
        lower=lower,
        name=name_of(gm),
    )
    # From PyTorch 2.15 on, Inductor reads this mark. It treats backward inputs without a mark as static, that is, as
    # having the same address in every step.
    for place, node in enumerate(primals_of(joint)):
        node.meta["is_static_input"] = place in joint.static_inputs
    return joint


def name_of(gm: fx.GraphModule) -> str:
    """Return a name for a graph: the class of the user's module, and Dynamo's number of the graph.

    The word ``graph`` replaces the class if no single module contains all modules of the graph.
    The number is left out if Dynamo is not compiling.
    """
    where = torch_compat.CompileContext.current_compile_id()
    stacks = (node.meta.get("nn_module_stack") for node in gm.graph.nodes)
    roots = {next(iter(stack.items())) for stack in stacks if stack}
    label = "graph"
    # Dynamo lists the modules that the traced function calls, but not the module whose ``forward`` it traces.
    owners = {m[1] if (m := _OF_LOCAL.match(path)) else "" for _, (path, _) in roots}
    is_traced = where is not None and len(owners) == 1
    owner = torch_compat.traced_frame()[1].get(owners.pop()) if is_traced else None
    if isinstance(owner, torch.nn.Module):
        label = type(owner).__name__
    elif len(roots) == 1:
        kind = roots.pop()[1][1]
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        label = name.rpartition(".")[2]
    return label if where is None else f"{label} {where}"


def _plan_standalone(joint: JointGraph, request: PlanRequest, agree: Pass | None) -> Plan:
    """Plan in place for a user's own AOTAutograd call, without the backend's checks at run time.

    Backward may read an output of the step. If the user's code writes to that output before
    backward, gradients would be wrong. Autograd does not detect writes to some outputs, such as
    views. If backward reads such an output under the first decision, the step returns a copy of the
    output to the user instead. The graph is then planned again, because a value whose copy is
    returned counts as saved bytes, while an output that backward reads does not. A saved plan is
    applied unchanged.

    Args:
        joint: the joint graph; it is changed.
        request: the options of planning.
        agree: the pass by which ranks agree on a decision; None if this rank decides alone.
    """
    places = unversioned_outputs(joint) if request.plan is None else ()
    if not places:
        return plan_graph(joint, request, in_place=True, agree=agree)
    if request.pipeline is not None:
        return _by_pipeline(joint, request, agree, places)
    planner = Planner.of(joint, request, in_place=True, on_demand=True)
    decided = planner.decide(request.budget)
    reread = planner.reread_outputs(decided)
    copied = tuple(k for k in places if k in reread)
    if copied:
        context = planner.context
        state = with_copies(context.state, copied)
        again = GraphContext(state, context.request, fingerprint=context.fingerprint)
        planner = Planner(search_of(again))
        decided = planner.decide(request.budget)
    return planner.plan(decided, agree, copied)


def _by_pipeline(
    joint: JointGraph, request: PlanRequest, agree: Pass | None, places: tuple[int, ...]
) -> Plan:
    """Plan with a pipeline, and make the step return copies of outputs that backward reads.

    Only a trial run of the whole pipeline shows which outputs backward reads.

    Args:
        joint: the joint graph; it is changed.
        request: the options of planning.
        agree: the pass by which ranks agree on a decision; None if this rank decides alone.
        places: positions of the outputs to which autograd may not detect writes.
    """
    trial = plan_graph(joint, request)
    copied = tuple(k for k in places if k in trial.reread_outputs)
    if not copied and agree is None:
        return trial
    fingerprint = joint.fingerprint
    copy_outputs(joint, copied)
    made = plan_graph(joint, request, in_place=True, agree=agree)
    return replace(made, fingerprint=fingerprint, copied_outputs=copied)
