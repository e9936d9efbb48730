"""Doors into PyTorch: a Dynamo backend, a partitioner, and a solver for PyTorch's own partitioner."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomKnapsackSolver, CustomPartitionerFn

import remat
from remat import api, pipelines, sweep
from remat.errors import PlanError, ProblemError
from remat.graph import ops
from remat.graph.budget import Budget
from remat.graph.capture import LOWERINGS
from remat.graph.costs import count_flops
from remat.graph.joint import JointGraph, copy_module
from remat.graph.regions import calls_regions, is_region, split_region
from remat.graph.roles import has_tangents
from remat.graph.verify import Split, verify
from remat.passes.agree_ranks import WAIT_S, AgreeRanks
from remat.passes.eager_hooks import register
from remat.passes.instruments.unexpected import folder_for, report
from remat.passes.packing import Pack, SavedTensorHooks, Unpack
from remat.passes.saved_tensor_hooks import PackSaved
from remat.planning import Plan
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.solvers.run import check_time_limit
from remat.together import PlanSet

if TYPE_CHECKING:
    from remat.graph.costs import CostModel
    from remat.passes.manager import PassManager

_PLANS: list[Plan] = []
_LOCK = threading.Lock()
_SIBLINGS: dict[int, tuple[Mapping[str, Any], set[str]]] = {}

#: Options of the backend that are ours; every other one is Inductor's.
OPTIONS = (
    "budget",
    "solver",
    "cost",
    "time_limit",
    "plan",
    "pipeline",
    "lower",
    "rank_wait_s",
    "hooks",
    "repro",
)


#: Inductor's vectorised ends of loops on a CPU. In PyTorch 2.13 they compute wrong gradients of a Mamba
#: whose scan is recomputed; without them the ends run one by one, and all is right.
_MASKED_TAILS = "cpp.enable_loop_tail_vec"


class BudgetWarning(UserWarning):
    """A budget that does not mean what one may think."""


def plans() -> tuple[Plan, ...]:
    """The plans that compiled models of this process run on, newest last."""
    with _LOCK:
        return tuple(_PLANS)


class Partitioner(CustomPartitionerFn):
    """Partitions joint graphs under a memory budget.

    It is a ``partition_fn`` of ``aot_autograd`` and Inductor's ``custom_partitioner_fn``. A joint
    graph whose forward mutates, draws or returns nothing differentiable is handled as PyTorch's own
    partitioner would: forward is what the user wrote.
    """

    def __init__(
        self,
        *,
        budget: float | int | str | Budget = 0.5,
        solver: str | Solver = "auto",
        cost: str | CostModel = "roofline",
        time_limit: float | None = None,
        plan: Plan | PlanSet | str | Path | None = None,
        pipeline: str | PassManager | None = None,
        lower: str = "eager",
        rank_wait_s: float | None = WAIT_S,
        hooks: str | tuple[Pack, Unpack] | SavedTensorHooks | None = None,
        repro: str | Path | bool | None = None,
    ) -> None:
        self.budget = Budget.parse(budget)
        self.solver = registry().solver(solver)
        self.cost = api.cost_model(cost)
        check_time_limit(time_limit)
        self.time_limit = time_limit
        self.plan = None if plan is None else read_plan(plan)
        self.pipeline = None if pipeline is None else pipelines.read_pipeline(pipeline)
        if self.pipeline is not None and (budget, solver, cost, time_limit, plan) != (
            0.5, "auto", "roofline", None, None,
        ):  # fmt: skip
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
        self.lower = lower
        self.agree = None if rank_wait_s is None else self._agreement(rank_wait_s)
        self.repro = folder_for(repro)
        self.siblings: set[str] = set()  # digests of the graphs planned under these options

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
        if is_region(gm, joint_inputs):
            return split_region(gm, **convention)
        joint = JointGraph(
            graph_module=gm,
            num_fwd_outputs=int(convention["num_fwd_outputs"]),
            static_inputs=tuple(convention.get("static_lifetime_input_indices") or ()),
            lower=self.lower,
            name=_name_of(gm),
        )
        try:
            return self._split(joint)
        except Exception as error:
            report(error, joint, self.repro, self._described)
            raise

    def _split(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        if not has_tangents(joint):
            state = pipelines.split(pipelines.prepare(joint, in_place=True))
            assert state.forward is not None
            assert state.backward is not None
            verify(Split(joint=state.joint, forward=state.forward, backward=state.backward))
            return state.forward, state.backward
        if self.plan is not None:
            plan = _plan_for(joint, self.plan)
            made = pipelines.apply_plan(joint, plan, in_place=True, hooks=self.hooks)
        elif self.pipeline is not None:
            pipeline = self.pipeline
            if self.agree is not None:
                pipeline = pipelines.with_agreement(pipeline, self.agree)
            made = pipelines.plan_by_pipeline(
                joint, pipeline, in_place=True, fingerprint=joint.fingerprint
            )
        else:
            digest = joint.fingerprint
            self._count_graph(digest)
            made = sweep.plan_prepared(
                pipelines.prepare(joint, in_place=True, hooks=self.hooks),
                budget=self.budget,
                solver=self.solver,
                cost=self.cost,
                time_limit=self.time_limit,
                fingerprint=digest,
                agree=self.agree,
            )
        with _LOCK:
            _PLANS.append(made)
        return made.forward, made.backward

    def _described(self) -> tuple[str, dict[str, str], str]:
        """The pipeline, the arguments of `remat.plan`, and a note: what a reproducer needs."""
        if self.pipeline is not None:
            return str(self.pipeline), {}, ""
        if self.plan is not None:
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
            asked=f"{asked}, lowering {self.lower}, remat {remat.__version__}",
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

    def _count_graph(self, digest: str) -> None:
        """Says once that a budget in bytes is each graph's own; the same graph again is no second one."""
        known = digest in self.siblings
        self.siblings.add(digest)
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
        """Identifies every option, every plugin's version and ours, for the keys of caches."""
        options = {
            "remat": remat.__version__,
            "budget": str(self.budget),
            "solver": _identity(self.solver),
            "cost": f"{_identity(self.cost)} {self.cost.key()}",
            "time_limit": self.time_limit,
            "plan": None if self.plan is None else self.plan.to_json(),
            "pipeline": None if self.pipeline is None else str(self.pipeline),
            "lower": self.lower,
            "hooks": self.hooks_key,
        }
        digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
        return f"remat-{remat.__version__}-{digest.hexdigest()}"


def partitioner(
    budget: float | int | str | Budget = 0.5,
    solver: str | Solver = "auto",
    cost: str | CostModel = "roofline",
    time_limit: float | None = None,
    *,
    plan: Plan | str | Path | None = None,
    pipeline: str | PassManager | None = None,
    rank_wait_s: float | None = WAIT_S,
    hooks: str | tuple[Pack, Unpack] | SavedTensorHooks | None = None,
    repro: str | Path | bool | None = None,
) -> Partitioner:
    """A partitioner for ``aot_autograd(partition_fn=…)`` or Inductor's ``custom_partitioner_fn``.

    Args:
        budget: as in `remat.plan`.
        solver: as in `remat.plan`.
        cost: as in `remat.plan`.
        time_limit: as in `remat.plan`.
        plan: a saved plan to reuse: a `remat.Plan`, its JSON text, or a path to it. A graph that it
            was not made for is refused.
        pipeline: as in `remat.plan`.
        rank_wait_s: with several ranks, how long the others wait for rank 0, whose decision they
            share where the graph is the same; None: every rank decides by itself.
        hooks: as in `remat.plan`.
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
        repro=repro,
    )


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend behind ``torch.compile(model, backend="remat", options=…)``.

    Options: ``budget``, ``solver``, ``cost``, ``time_limit``, ``plan``, ``pipeline``,
    ``rank_wait_s``, ``hooks``, ``repro`` as in `partitioner`;
    ``lower``: ``"inductor"`` (default) or ``"eager"`` (run the planned graphs as they are). Every
    other option, and ``mode``, goes to Inductor.

    Raises:
        RematError: an option that cannot be meant.
    """
    given = dict(options or {})
    ours = {k: given.pop(k) for k in OPTIONS if k in given}
    lower = ours.get("lower", "inductor")
    if lower not in LOWERINGS:
        raise ProblemError(
            f"option 'lower' is {lower!r}; expected one of {', '.join(map(repr, LOWERINGS))}"
        )
    partition = Partitioner(**{**ours, "lower": lower})
    if options is not None:
        partition.siblings = _siblings(options)
    if lower == "eager":
        if given or mode is not None:
            names = ", ".join(repr(k) for k in given) or f"mode={mode!r}"
            raise ProblemError(
                f"lower='eager' does not use Inductor, but {names} is for it; known options of remat: "
                f"{', '.join(OPTIONS)}"
            )
        return _compile_eager(gm, example_inputs, partition)
    return _compile_inductor(gm, example_inputs, partition, given, mode)


def _siblings(options: Mapping[str, Any]) -> set[str]:
    """The graphs compiled under these options: Dynamo hands the same object each time."""
    with _LOCK:
        kept = _SIBLINGS.setdefault(id(options), (options, set()))
        while len(_SIBLINGS) > 64:
            del _SIBLINGS[next(iter(_SIBLINGS))]
    return kept[1]


def _plan_for(joint: JointGraph, plan: Plan | PlanSet) -> Plan:
    """The plan of a set that was made for a graph.

    Raises:
        PlanError: none was.
    """
    if isinstance(plan, Plan):
        return plan
    digest = joint.fingerprint
    for p in plan:
        if p.fingerprint == digest:
            return p
    raise PlanError(
        f"none of the {len(plan)} plans is for graph '{joint.name}' ({digest[:12]}…): model, shapes, "
        "lowering, or PyTorch have changed; plan again"
    )


def _compile_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], partition: Partitioner
) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    compiled = aot_autograd(
        fw_compiler=lambda module, _: _boxed(module),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compiled(gm, example_inputs)


def _boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Runs one half as it is and takes its arguments over, so that each is freed after its last use.

    Called with arguments of their own, the caller would keep what was saved to the end of backward.
    """
    from torch.fx.graph import _BoxedCodeGen

    graph = copy_module(module).graph
    graph.set_codegen(_BoxedCodeGen())
    half = fx.GraphModule(module, graph)

    def run(arguments: list[Any]) -> Any:
        return half.forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _compile_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Partitioner,
    options: dict[str, Any],
    mode: str | None,
) -> Callable[..., Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor import list_mode_options, list_options
    from torch._inductor.compile_fx import compile_fx

    known = list_options()
    for name in options:
        if name.replace("-", "_") not in known:
            raise ProblemError(
                f"option '{name}' is known to neither remat ({', '.join(OPTIONS)}) nor Inductor "
                "(torch._inductor.list_options() lists its options)"
            )
    patches: dict[str, Any] = {_MASKED_TAILS: False} if _MASKED_TAILS in known else {}
    patches.update(list_mode_options(mode) if mode else {})
    patches.update({k.replace("-", "_"): v for k, v in options.items()})
    patches["custom_partitioner_fn"] = partition
    if not partition.cacheable:
        patches["fx_graph_cache"] = patches["fx_graph_remote_cache"] = False
    # A step found in AOTAutograd's cache would never come by here, and `plans()` would not know
    # what it runs on. Inductor's own cache of compiled kernels stays in use.
    functorch = {"enable_autograd_cache": False}
    if calls_regions(gm):
        # Inductor takes the places of the inputs that backward may overwrite for places among the
        # inputs of a region's backward too, and overwrites what is still to be read.
        functorch["donated_buffer"] = False
    with functorch_config.patch(functorch):
        compiled: Any = compile_fx(
            gm, example_inputs, inner_compile=_compile_in_order, config_patches=patches
        )
    return compiled  # type: ignore[no-any-return]


def _compile_in_order(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compiles one half of a step with Inductor, keeping the order of random draws.

    Inductor rewrites what it compiles; it gets a copy, since the plan shows the half as it is.

    To lower the peak, Inductor's scheduler moves operators past one another, those that draw from
    the generator too; which ones depends on what else is in the graph. The numbers of a step would
    then depend on the plan. Where more than one operator draws, the order is kept.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner

    gm = copy_module(gm)
    draws = sum(n.op == "call_function" and ops.draws_in_order(n) for n in gm.graph.nodes)
    if draws < 2:
        return compile_fx_inner(gm, example_inputs, **kwargs)
    with inductor_config.patch(reorder_for_peak_memory=False):
        return compile_fx_inner(gm, example_inputs, **kwargs)


def read_plan(plan: Plan | PlanSet | str | Path) -> Plan | PlanSet:
    """A plan, or the plans of several graphs, given as such, as JSON text, or as a path.

    Raises:
        PlanError: it can be read as none of them.
    """
    if isinstance(plan, (Plan, PlanSet)):
        return plan
    if not isinstance(plan, (str, Path)):
        raise PlanError(
            f"plan is a {type(plan).__name__}; expected a remat.Plan or PlanSet, its JSON text, or a "
            "path to it"
        )
    text = str(plan)
    if not text.lstrip().startswith("{"):
        try:
            text = Path(plan).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"plan '{plan}' cannot be read: {error}") from None
    return PlanSet.from_json(text) if '"remat_plans"' in text[:200] else Plan.from_json(text)


class TorchSolver(CustomKnapsackSolver):
    """One of our solvers in the place of PyTorch's ``activation_memory_budget_solver``."""

    def __init__(self, solver: Solver) -> None:
        from remat.solvers.float_bridge import knapsack_fn

        self.solver = solver
        self._solve = knapsack_fn(solver)

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Picks among PyTorch's candidates; runtimes come from PyTorch's own estimator."""
        runtimes = [_runtime(n) for n in all_recomputable_banned_nodes]
        _, saved, recomputed = self._solve(memory, runtimes, max_memory)
        return saved, recomputed

    def uuid(self) -> str:
        return f"remat-{remat.__version__}-solver-{_identity(self.solver)}"


def _runtime(node: fx.Node) -> float:
    """A candidate's runtime by the estimator that PyTorch is configured for.

    PyTorch counts FLOPs by running the operator on uninitialised arguments, which an operator that
    takes indices does not survive; the formulas are asked without running anything.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import estimate_runtime

    if config.activation_memory_budget_runtime_estimator == "flops":
        return float(max(1, count_flops(node)))
    return float(estimate_runtime(node))


def torch_solver(name: str | Solver) -> TorchSolver:
    """A registered solver for ``torch._functorch.config.activation_memory_budget_solver``.

    Raises:
        SolverError: the solver is unknown or cannot run here.
    """
    return TorchSolver(registry().solver(name))


def _identity(thing: object) -> str:
    """Where a solver or cost model comes from, with the version of the distribution it is in."""
    kind = type(thing)
    package = kind.__module__.partition(".")[0]
    return f"{kind.__module__}:{kind.__qualname__} {_versions_of(package)}"


@functools.cache
def _versions_of(package: str) -> str:
    """The distributions that a top-level package comes from; finding them reads all that are installed."""
    from importlib.metadata import packages_distributions, version

    return " ".join(
        f"{d}=={version(d)}" for d in sorted(set(packages_distributions().get(package, [])))
    )


def _name_of(gm: fx.GraphModule) -> str:
    """The class of the user's module where Dynamo recorded one for the whole graph, and its number."""
    from torch._guards import CompileContext

    where = CompileContext.current_compile_id()
    stacks = (node.meta.get("nn_module_stack") for node in gm.graph.nodes)
    roots = {next(iter(stack.items())) for stack in stacks if stack}
    label = "graph"
    if len(roots) == 1:
        kind = roots.pop()[1][1]
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        label = name.rpartition(".")[2]
    return label if where is None else f"{label} {where}"
