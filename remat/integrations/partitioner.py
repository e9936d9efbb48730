"""The partitioner: splits joint graphs where AOTAutograd or Inductor would call PyTorch's own."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PlanError, ProblemError
from remat.graph.joint import JointGraph, Role, role_of
from remat.graph.regions import is_region, split_region
from remat.graph.roles import has_tangents
from remat.graph.text import parse_joint
from remat.graph.verify import Split, verify
from remat.integrations.kept_steps import Kept, operators_of, text_of
from remat.integrations.saved_plans import plan_for, read_plan
from remat.passes.hooks.saved_tensor_hooks import PackSaved
from remat.passes.instruments.crash_reports import folder_for, report
from remat.passes.packing.pairs import Pack, SavedTensorHooks, Unpack, register
from remat.passes.ranks.agree_ranks import WAIT_S, AgreeRanks
from remat.passes.ranks.protocol import other_ranks
from remat.planning import frontier as sweep
from remat.planning import pipelines
from remat.planning.mismatch import could_be_for
from remat.planning.plan import Plan
from remat.plugins.identity import described, identity, is_known_elsewhere, surroundings
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.solvers.run import check_time_limit
from remat.units import Budget
from remat.version import __version__

if TYPE_CHECKING:
    from remat.graph.costs import CostModel
    from remat.passes.core.pipeline import Pipeline
    from remat.planning.plan_set import PlanSet

_PLANS: list[Plan] = []
_LOCK = threading.Lock()


#: Attributes of a partitioner that have no part in what it decides.
_DECIDES_NOTHING = frozenset(
    (
        "agree",
        "repro",
        "siblings",
        "traces",
        "keeps",
        "halves_only",
        "called",
        "kept",
        "_last_made",
        "_uses_saved",
    )
)


#: The budget where none is given; told from a given one by identity, since that has a part beside a plan.
DEFAULT_BUDGET = Budget.parse(0.5)


class BudgetWarning(UserWarning):
    """A budget that does not mean what one may think."""


def plans() -> tuple[Plan, ...]:
    """The plans that compiled models of this process run on, newest last."""
    with _LOCK:
        return tuple(_PLANS)


class Partitioner(torch_compat.CustomPartitionerFn):
    """Partitions joint graphs under a memory budget.

    It is a ``partition_fn`` of ``aot_autograd`` and Inductor's ``custom_partitioner_fn``. A joint
    graph whose forward mutates, draws or returns nothing differentiable is handled as PyTorch's own
    partitioner would: forward is what the user wrote.
    """

    def __init__(
        self,
        *,
        budget: float | int | str | Budget = DEFAULT_BUDGET,
        solver: str | Solver = "auto",
        cost: str | CostModel = "roofline",
        time_limit: float | None = None,
        plan: Plan | PlanSet | str | Path | None = None,
        pipeline: str | Pipeline | None = None,
        lower: str = "eager",
        rank_wait_s: float | None = WAIT_S,
        hooks: str | tuple[Pack, Unpack] | SavedTensorHooks | None = None,
        reread_inputs: bool = True,
        repro: str | Path | bool | None = None,
    ) -> None:
        torch_compat.check_version()
        registry().learn_operators()  # what they declare is part of fingerprints
        self.budget = Budget.parse(budget)
        self.solver = registry().solver(solver)
        self.cost = registry().cost_model(cost)
        check_time_limit(time_limit)
        self.time_limit = time_limit
        self.plan = None if plan is None else read_plan(plan)
        self.plans_others = plan is not None and budget is not DEFAULT_BUDGET
        self.pipeline = None if pipeline is None else pipelines.read_pipeline(pipeline)
        if self.pipeline is not None and (
            self.budget, solver, cost, time_limit, plan,
        ) != (DEFAULT_BUDGET, "auto", "roofline", None, None):  # fmt: skip
            raise ProblemError(
                "budget, solver, cost, time_limit and plan do not go together with a pipeline, whose "
                f"passes carry them, for example '{pipelines.default_pipeline()}'"
            )
        self.hooks = None if hooks is None else SavedTensorHooks.of(hooks)
        if self.hooks is not None and pipeline is not None:
            raise ProblemError(
                "hooks do not go together with a pipeline: end it with the pass "
                "'saved-tensor-hooks(pair=float8)'"
            )
        self.hooks_key = "".join(map(register, self._all_hooks()))
        pipelines.check_reread(reread_inputs)
        self.reread_inputs = reread_inputs
        self.lower = lower
        self.agree = None if rank_wait_s is None else self._agreement(rank_wait_s)
        self.repro = folder_for(repro)
        self.siblings: set[str] = set()  # the graphs planned under these options
        # What follows is about one compilation; see `remat.integrations.torch_compile`.
        self.traces = ""  # what AOTAutograd's key is to tell besides
        self.keeps = False  # whether to note what a later process needs
        self.halves_only = (
            False  # whether halves alone are looked up, which say by themselves what they are
        )
        self.called = False
        self.kept: Kept | None = None
        self._last_made: Plan | None = None
        self._uses_saved = self.plan is not None  # for the graph at hand

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        **convention: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Splits a joint graph; see `torch._inductor.custom_graph_pass.CustomPartitionerFn`.

        Args:
            gm: the joint graph; it is taken apart, as PyTorch's own partitioner does.
            joint_inputs: none for a nested region, which is split without a budget.
            convention: ``num_fwd_outputs`` and ``static_lifetime_input_indices``, by which
                AOTAutograd describes the graph; more is ignored.
        """
        self.called, self.traces = True, ""
        if is_region(gm, joint_inputs):
            return split_region(gm, **convention)
        joint = JointGraph(
            graph_module=gm,
            num_fwd_outputs=int(convention["num_fwd_outputs"]),
            static_inputs=tuple(convention.get("static_lifetime_input_indices") or ()),
            lower=self.lower,
            name=_name_of(gm),
        )
        _mark_static_inputs(joint)
        try:
            return self._split_and_note(joint) if self.keeps else self._split(joint)
        except Exception as error:
            report(error, joint, self.repro, self._described)
            raise

    def _split_and_note(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Splits, and notes what a process needs that finds the compiled step in a cache."""
        text, parameters, operators = text_of(joint), _parameters_of(joint), operators_of(joint)
        self._last_made = None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            halves = self._split(joint)
        for w in told:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)
        if text is not None:
            made = self._last_made
            self.kept = Kept(
                plan="" if made is None else made.to_json(),
                joint=text,
                parameters=parameters,
                operators=operators,
                warnings=tuple(
                    (w.category.__module__, w.category.__qualname__, str(w.message))
                    for w in told
                    if w.category.__module__.startswith("remat") and w.category is not BudgetWarning
                ),
            )
        return halves

    def restore(self, kept: Kept, gm: fx.GraphModule) -> None:
        """Does what planning would have done for a step that was found in a cache.

        Raises:
            PlanError: what was kept is no plan.
        """
        for module, name, text in kept.warnings:
            warnings.warn(text, _category(module, name), stacklevel=2)
        if not kept.plan:
            return
        plan = Plan.from_json(kept.plan)
        if self.plan is None and self.pipeline is None:
            self._count_graph(_code_of(kept.parameters) or plan.fingerprint)

        def again() -> Plan:
            return self._apply(parse_joint(kept.joint), plan)

        with _LOCK:
            _PLANS.append(replace(plan, graph=_name_of(gm), _again=again))

    def _apply(self, joint: JointGraph, plan: Plan, *, in_place: bool = True) -> Plan:
        return pipelines.apply_plan(
            joint, plan, in_place=in_place, hooks=self.hooks, reread_inputs=self.reread_inputs
        )

    def _split(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        if not has_tangents(joint):
            state = pipelines.split(pipelines.prepare(joint, in_place=True))
            assert state.forward is not None
            assert state.backward is not None
            verify(Split(joint=state.joint, forward=state.forward, backward=state.backward))
            return state.forward, state.backward
        saved = self._saved_for(joint)
        self._uses_saved = saved is not None
        if saved is not None:
            made = self._apply(joint, saved)
        elif self.pipeline is not None:
            pipeline = self.pipeline
            if self.agree is not None:
                pipeline = pipelines.with_agreement(pipeline, self.agree)
            made = pipelines.plan_by_pipeline(
                joint,
                pipeline,
                in_place=True,
                reread_inputs=self.reread_inputs,
                fingerprint=joint.fingerprint,
            )
        else:
            digest = joint.fingerprint
            self._count_graph(_kind_of(joint) or digest)
            made = sweep.plan_prepared(
                pipelines.prepare(
                    joint, in_place=True, hooks=self.hooks, reread_inputs=self.reread_inputs
                ),
                budget=self.budget,
                solver=self.solver,
                cost=self.cost,
                time_limit=self.time_limit,
                fingerprint=digest,
                agree=self.agree,
            )
        self._last_made = made
        with _LOCK:
            _PLANS.append(made)
        return made.forward, made.backward

    def _saved_for(self, joint: JointGraph) -> Plan | None:
        """The saved plan for a graph; None where it is to be planned.

        Raises:
            PlanError: there are saved plans, none is for it, and no budget says how to plan others; or
                they were made for another lowering or PyTorch, so that they are for no graph here.
        """
        if self.plan is None:
            return None
        saved = [self.plan] if isinstance(self.plan, Plan) else self.plan.plans
        could_be = could_be_for(joint, saved)
        if self.plans_others and could_be:
            digest = joint.fingerprint
            return next((p for p in saved if p.fingerprint == digest), None)
        try:
            return plan_for(joint, self.plan)
        except PlanError as error:
            if not could_be:
                raise
            raise PlanError(
                f"{error}; or give a budget beside the plans, under which graphs without a plan are "
                'planned when they are met: options={"plan": plans, "budget": 0.5}'
            ) from None

    def _described(self) -> tuple[str, dict[str, str], str]:
        """The pipeline, the arguments of `remat.plan`, and a note: what a reproducer needs."""
        if self.pipeline is not None:
            return str(self.pipeline), {}, ""
        if self._uses_saved:
            text = f"{pipelines.PREPARE},{pipelines.SPLIT}"
            return text, {}, "It was split by a saved plan, whose decision is not in here."
        known = registry().solvers.get(self.solver.name) is type(self.solver)
        kind = type(self.solver)
        given = {
            "budget": str(self.budget),
            "solver": self.solver.name if known else f"{kind.__module__}:{kind.__qualname__}",
            "cost": str(self.cost),
        }
        if self.time_limit is not None:
            given["time_limit"] = str(self.time_limit)
        if self.hooks is not None:
            given["hooks"] = self.hooks.name
        if not self.reread_inputs:
            given["reread_inputs"] = "False"
        if self.budget.peak_bytes is not None:
            return "", given, ""
        made = pipelines.default_pipeline(self.budget, self.solver, self.cost, self.time_limit)
        return str(made), given, ""

    def _agreement(self, wait_s: float) -> AgreeRanks:
        """The pass by which the ranks of a job agree on what is asked for here."""
        asked = (
            f"budget {self.budget}, solver {self.solver.name}, cost {self.cost}, time limit "
            f"{self.time_limit}"
        )
        if self.pipeline is not None:
            asked = f"pipeline {self.pipeline}"
        return AgreeRanks(
            asked=f"{asked}{'' if self.reread_inputs else ', inputs not read again'}, lowering {self.lower}, remat {__version__}",
            wait_s=wait_s,
            capacity_too=self.budget.peak_bytes is not None,
        )

    def _all_hooks(self) -> list[SavedTensorHooks]:
        found = [] if self.hooks is None else [self.hooks]
        passes = () if self.pipeline is None else self.pipeline.flat()
        return found + [p.hooks for p in passes if isinstance(p, PackSaved)]

    @property
    def cacheable(self) -> bool:
        """Whether another process can know that it would compile the same."""
        return all(h.cache_key is not None for h in self._all_hooks())

    def _count_graph(self, kind: str) -> None:
        """Says once that a budget in bytes is each graph's own; the same graph again is no second one."""
        known = kind in self.siblings
        self.siblings.add(kind)
        if not known and len(self.siblings) == 2 and self.budget.share is None:
            warnings.warn(
                f"a second graph is compiled under the budget {self.budget}: each graph gets it by "
                "itself, so together they may keep more. For one budget over all graphs of a model, "
                "plan them together and reuse the plans: "
                "remat.plan(remat.capture(model, args, fullgraph=False), budget=…), then "
                'options={"plan": plans}',
                BudgetWarning,
                stacklevel=2,
            )

    def uuid(self) -> str:
        """Identifies every option, our code and what is known of operators, for the keys of caches."""
        told = {"options": self._options(), "around": surroundings(), "traces": self.traces}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        return f"remat-{__version__}-{digest.hexdigest()}"

    def _options(self) -> dict[str, Any]:
        """All that this object holds but what decides nothing, so that no option can be forgotten."""
        given = {name: value for name, value in vars(self).items() if name not in _DECIDES_NOTHING}
        found = {name: described(value) for name, value in given.items()}
        found |= {"hooks": self.hooks_key}
        if self.pipeline is not None:
            found["pipeline"] = str(self.pipeline)
        if self.halves_only:
            for name in ("solver", "cost"):
                if not is_known_elsewhere(found[name]):
                    found[name] = identity(given[name])
        return found

    @property
    def keeps_steps(self) -> bool:
        """Whether a whole step may come from a cache, with its plan, without planning anything.

        Not where code decides that is not ours, nor where ranks are to agree with one another.
        """
        if not self.cacheable or self.pipeline is not None:
            return False
        if self.agree is not None and other_ranks() is not None:
            return False
        return is_known_elsewhere(self._options())


def partitioner(
    budget: float | int | str | Budget = DEFAULT_BUDGET,
    solver: str | Solver = "auto",
    cost: str | CostModel = "roofline",
    time_limit: float | None = None,
    *,
    plan: Plan | PlanSet | str | Path | None = None,
    pipeline: str | Pipeline | None = None,
    rank_wait_s: float | None = WAIT_S,
    hooks: str | tuple[Pack, Unpack] | SavedTensorHooks | None = None,
    reread_inputs: bool = True,
    repro: str | Path | bool | None = None,
) -> Partitioner:
    """A partitioner for ``aot_autograd(partition_fn=…)`` or Inductor's ``custom_partitioner_fn``.

    Args:
        budget: as in `remat.plan`. Given beside ``plan``, graphs that it has no plan for are planned
            under it.
        solver: as in `remat.plan`.
        cost: as in `remat.plan`.
        time_limit: as in `remat.plan`.
        plan: a saved plan to reuse, or the plans of several graphs: a `remat.Plan` or `remat.PlanSet`,
            its JSON text, or a path to it. A graph that it was not made for is refused, unless a budget
            is given too.
        pipeline: as in `remat.plan`.
        rank_wait_s: with several ranks, how long the others wait for rank 0, whose decision they
            share where the graph is the same; None: every rank decides by itself.
        hooks: as in `remat.plan`.
        reread_inputs: as in `remat.plan`.
        repro: the folder that a reproducer is written to where planning fails and should not; False
            for none, None for what the variable ``REMAT_REPRO_DIR`` names, else for one among the
            temporary files.

    Raises:
        RematError: an option that cannot be meant, at once and not at the first compilation.
    """
    return Partitioner(
        budget=budget,
        solver=solver,
        cost=cost,
        time_limit=time_limit,
        plan=plan,
        pipeline=pipeline,
        rank_wait_s=rank_wait_s,
        hooks=hooks,
        reread_inputs=reread_inputs,
        repro=repro,
    )


def _category(module: str, name: str) -> type[Warning]:
    """A class of warnings by name; that of all where this remat has no such class."""
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return UserWarning
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning


def _kind_of(joint: JointGraph) -> str:
    """What stays the same where Dynamo compiles one piece of code again, for other shapes or modes.

    That is the code that it numbers, and the parameters that the code computes with: of two layers
    of a class, which share the code, each has its own. Empty where it was not Dynamo that called.
    """
    return _code_of(_parameters_of(joint))


def _code_of(parameters: str) -> str:
    """The code that Dynamo compiles now, with its parameters."""
    from remat.torch_compat import CompileContext

    where = CompileContext.current_compile_id()
    return "" if where is None or where.frame_id is None else f"{where.frame_id}: {parameters}"


def _parameters_of(joint: JointGraph) -> str:
    """Shapes and dtypes of a graph's parameters and buffers."""
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    static = [inputs[i].meta.get("val") for i in joint.static_inputs if i < len(inputs)]
    return ", ".join(f"{tuple(v.shape)} {v.dtype}" for v in static if isinstance(v, torch.Tensor))


def _mark_static_inputs(joint: JointGraph) -> None:
    """Tells Inductor which inputs that backward reads stay where they are from step to step.

    From PyTorch 2.15 on it asks, and takes all others that it is not told about to stay too.
    """
    primals = [n for n in joint.graph.find_nodes(op="placeholder") if role_of(n) is Role.PRIMAL]
    for place, node in enumerate(primals):
        node.meta["is_static_input"] = place in joint.static_inputs


def _name_of(gm: fx.GraphModule) -> str:
    """The class of the user's module where Dynamo recorded one for the whole graph, and its number."""
    from remat.torch_compat import CompileContext

    where = CompileContext.current_compile_id()
    stacks = (node.meta.get("nn_module_stack") for node in gm.graph.nodes)
    roots = {next(iter(stack.items())) for stack in stacks if stack}
    label = "graph"
    if len(roots) == 1:
        kind = roots.pop()[1][1]
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        label = name.rpartition(".")[2]
    return label if where is None else f"{label} {where}"
