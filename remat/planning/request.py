"""Options of planning (budget, solver, cost model and others), parsed and checked in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from remat.arguments import BUDGET, COST, SOLVER, Unset, value_of
from remat.errors import ProblemError, about
from remat.graph.costs import CostModel
from remat.graph.costs.links import DEFAULT_LINK, Link
from remat.graph.joint import JointGraph
from remat.graph.policies import Policies, read_policies
from remat.passes.core.pipeline import Pipeline
from remat.passes.decide.budgeted import Budgeted
from remat.passes.decide.knapsack import Knapsack
from remat.passes.decide.min_cut import MinCut
from remat.passes.decide.solve_graph import SolveGraph
from remat.passes.joint.chunk_loss import ChunkLoss
from remat.passes.packing.pairs import Pack, SavedTensorHooks, Unpack
from remat.passes.split.partition import Partition
from remat.planning.pipelines import PREPARE, SPLIT, PassManager
from remat.planning.plan import Plan
from remat.planning.plans import PlanSet
from remat.planning.saved_plans import SavedPlan, plan_for, read_plan
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.solvers.run import check_time_limit
from remat.units import AnyBudget, Budget, parse_bytes

T = TypeVar("T")
#: Types that users may pass for each option. Defaults are instances of `Unset`, so that a default can be told from an
#: equal value that the user passed.
BudgetOption = AnyBudget | Unset[float]
SolverOption = str | Solver | Unset[str]
CostOption = str | CostModel | Unset[str]
HooksOption = str | tuple[Pack, Unpack] | SavedTensorHooks | None
OffloadOption = str | float | Link | None
BytesOption = str | int | None
PoliciesOption = Mapping[str, Any] | str | Iterable[str] | Policies | None
ChunkOption = int | str | ChunkLoss | None

#: Numbers of chunks that ``chunk="auto"`` compares.
CHUNKS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Options of planning; `of` parses and checks them.

    Attributes:
        budget: a budget on the peak of the step, or on the bytes that forward saves.
        solver: the solver that decides, as an instance.
        cost: the cost model.
        time_limit: seconds for each call of the solver; None: no limit.
        plan: saved plans to apply to the graphs that they were made for; None: the solver decides.
        plans_others: whether a graph for which ``plan`` holds no plan is planned under ``budget``, instead of refused.
        of_several: whether the graph to plan is known to be one of several graphs of its step.
        pipeline: the user's pipeline, which replaces the default passes. Its passes carry their own budget,
            solver, cost model and time limit.
        count_outputs: whether forward's outputs count as saved bytes.
        hooks: functions that pack saved tensors in forward and unpack them in backward; None: no hooks.
        reread_inputs: whether backward may read inputs and outputs of the step that eager autograd would not have
            saved. If True, the user must not overwrite these tensors before backward.
        offload: the link to the host, over which any saved value may be offloaded. None: only values that the
            user's code or a policy tags for offloading are offloaded.
        host_memory: bytes of offloaded values that may be in the host's memory at one time; None: no limit.
        policies: what to do with the values of the user's modules: save, recompute or offload, by pattern of the
            module's name.
        chunk: the pass that splits the loss into chunks of tokens. ``"auto"``: planning chooses the number of chunks,
            so that the peak is within the budget. None: leave the loss whole.
        has_matched: whether a caller has checked that every pattern of ``policies`` matches a module of the step.
    """

    budget: Budget
    solver: Solver
    cost: CostModel
    time_limit: float | None = None
    plan: Plan | PlanSet | None = None
    plans_others: bool = False
    of_several: bool = False
    pipeline: Pipeline | None = None
    count_outputs: bool = False
    hooks: SavedTensorHooks | None = None
    reread_inputs: bool = True
    offload: Link | None = None
    host_memory: int | None = None
    policies: Policies = Policies()
    chunk: ChunkLoss | Literal["auto"] | None = None
    has_matched: bool = False

    @property
    def link(self) -> Link:
        """The link over which values are offloaded: ``offload`` if given, else the default link."""
        return self.offload or DEFAULT_LINK

    @property
    def decides(self) -> bool:
        """Whether planning decides under ``budget``; False if there is a saved plan or the user's own pipeline."""
        return self.plan is None and self.pipeline is None

    @classmethod
    def of(
        cls,
        *,
        budget: BudgetOption = BUDGET,
        solver: SolverOption = SOLVER,
        cost: CostOption = COST,
        time_limit: float | None = None,
        plan: SavedPlan | None = None,
        pipeline: str | Pipeline | None = None,
        count_outputs: bool = False,
        hooks: HooksOption = None,
        reread_inputs: bool = True,
        isolation: str | None = None,
        offload: OffloadOption = None,
        host_memory: BytesOption = None,
        policies: PoliciesOption = None,
        chunk: ChunkOption = None,
    ) -> PlanRequest:
        """Parse options as users give them; the arguments are those of `remat.plan`, and ``isolation``.

        ``isolation`` says whether the solver runs in a process of its own: ``"process"``: always; ``"foreign"``: if the
        solver is not part of remat; None: never. See `Registry.solver`.

        Raises:
            RematError: an option is invalid, or two options conflict. The error's attribute ``option`` is the name of
                the invalid option, or of one of the two.
        """
        known = registry()
        known.learn_operators()  # fingerprints depend on the operators that plugins declare
        _read("time_limit", check_time_limit, time_limit)
        if type(reread_inputs) is not bool:
            raise ProblemError(
                f"reread_inputs is {reread_inputs!r}; expected True (backward may read the inputs "
                "of the step again) or False (it may not, so that they can be overwritten before it)",
                option="reread_inputs",
            )
        made = cls(
            budget=_read("budget", Budget.parse, value_of(budget)),
            solver=_read("solver", partial(known.solver, isolation=isolation), value_of(solver)),
            cost=_read("cost", known.cost_model, value_of(cost)),
            time_limit=time_limit,
            hooks=None if hooks is None else _read("hooks", SavedTensorHooks.of, hooks),
            offload=None if offload is None else _read("offload", Link.parse, offload),
            host_memory=_read("host_memory", _read_bytes, host_memory),
            reread_inputs=reread_inputs,
            policies=_read("policies", read_policies, policies),
            chunk=_read("chunk", _read_chunk, chunk),
            plan=None if plan is None else _read("plan", _read_plan, plan),
            # A budget beside saved plans is meant for the graphs without a plan.
            plans_others=plan is not None and not isinstance(budget, Unset),
            count_outputs=count_outputs,
        )
        if pipeline is None:
            made._check_offload()
            made._check_chunk()
            return made
        given = {
            "budget": not isinstance(budget, Unset),
            "solver": not isinstance(solver, Unset),
            "cost": not isinstance(cost, Unset),
            "time_limit": time_limit is not None,
            "isolation": isolation is not None,
            "plan": plan is not None,
            "policies": bool(made.policies),
            "chunk": made.chunk is not None,
        }
        made._refuse_beside_pipeline([name for name, is_given in given.items() if is_given])
        made = replace(made, pipeline=_read("pipeline", _read_pipeline, pipeline))
        made._check_offload()
        return made

    @classmethod
    def without_budget(cls, **options: Any) -> PlanRequest:
        """Parse options as `of` does, for a caller that plans under several budgets of its own.

        The budget of the request is only a placeholder. With ``offload`` or ``chunk="auto"``, which `of` refuses beside
        a budget on saved bytes, the placeholder is the peak ratio 1.
        """
        given = options.get("offload") is not None or options.get("chunk") == "auto"
        budget: dict[str, Any] = {"budget": Budget(peak_share=1.0)} if given else {}
        return cls.of(**options, **budget)

    @classmethod
    def from_text(cls, options: Mapping[str, str]) -> PlanRequest:
        """Parse the texts that `to_text` returned, such as in a worker process, and return the request."""
        given: dict[str, Any] = dict(options)
        if "time_limit" in given:
            given["time_limit"] = float(given["time_limit"])
        if "reread_inputs" in given:
            given["reread_inputs"] = given["reread_inputs"] == "True"
        return cls.of(**given)

    def to_text(self) -> dict[str, str]:
        """Return the options as a dict from name to text; empty if the request has a saved plan or a pipeline."""
        if self.pipeline is not None or self.plan is not None:
            return {}
        kind = type(self.solver)
        registered = registry().solvers.get(self.solver.name) is kind
        # An unregistered solver is named by its import path, from which `of` can load the class.
        options = {
            "budget": self.budget,
            "solver": self.solver.name if registered else f"{kind.__module__}:{kind.__qualname__}",
            "cost": self.cost,
            "time_limit": self.time_limit,
            "hooks": None if self.hooks is None else self.hooks.name,
            "reread_inputs": None if self.reread_inputs else False,
            "offload": self.offload,
            "host_memory": self.host_memory,
            "policies": self.policies or None,
            "chunk": self.chunks if isinstance(self.chunk, ChunkLoss) else self.chunk,
        }
        return {name: str(given) for name, given in options.items() if given is not None}

    def refuse_unused_link(self, budget: Budget) -> None:
        """Raise an error if ``offload`` is given beside a budget on saved bytes.

        Under such a budget, only values that are tagged for offloading are offloaded. So callers call this method if
        the graph has no tagged values, and ``offload`` would have no effect.

        Args:
            budget: the budget.

        Raises:
            ProblemError: the request has ``offload``, and ``budget`` is not a budget on the peak.
        """
        if self.offload is not None and not budget.on_peak:
            raise ProblemError(
                f"offload is given with budget {budget.label}, and nothing is tagged for offloading; "
                "expected a budget on the peak, which is what offloading lowers: remat.Peak('40GiB') or "
                "remat.Peak(0.5), as text peak:0.5",
                option="offload",
            )

    @property
    def chunks(self) -> int:
        """Number of chunks of the loss; 1 if the loss is not split, or if ``chunk`` is ``"auto"``."""
        return self.chunk.chunks if isinstance(self.chunk, ChunkLoss) else 1

    def each_chunk(self) -> list[PlanRequest]:
        """Return one request for each number of chunks to try.

        With ``chunk="auto"``, these are the numbers in `CHUNKS`, fewest first. Else the result is this request alone.
        """
        if self.chunk != "auto":
            return [self]
        return [replace(self, chunk=_read_chunk(n)) for n in CHUNKS]

    def refuse_auto_chunk(self, who: str) -> None:
        """Raise an error if the request has ``chunk="auto"``; for callers that cannot choose a number of chunks.

        Args:
            who: name of the caller, for the message, such as ``"compare"``.

        Raises:
            ProblemError: the request has ``chunk="auto"``.
        """
        if self.chunk == "auto":
            raise ProblemError(
                f"{who} does not choose a number of chunks; give one, such as chunk=8, or plan one graph within a "
                "peak",
                option="chunk",
            )

    def _check_chunk(self) -> None:
        """Raise a ProblemError for ``chunk="auto"`` without a budget on the peak, unless a saved plan is applied."""
        if self.chunk == "auto" and self.plan is None and not self.budget.on_peak:
            raise ProblemError(
                f"chunk='auto' is given with budget {self.budget.label}; expected a budget on the peak, by which "
                "the number of chunks is chosen: remat.Peak('40GiB') or remat.Peak(0.5), or a number: chunk=8",
                option="chunk",
            )

    def refuse_offload(self, who: str) -> None:
        """Raise an error if the request has ``offload``; for callers that do not support offloading.

        Args:
            who: the caller or the feature, for the message, such as ``"a step of several ranks"``.

        Raises:
            ProblemError: the request has ``offload``.
        """
        if self.offload is not None:
            raise ProblemError(
                f"{who} does not offload; leave offload out, or plan one graph within a peak",
                option="offload",
            )

    def _check_offload(self) -> None:
        """Raise a ProblemError if ``offload`` or ``host_memory`` conflicts with another option."""
        if self.host_memory is not None and (self.hooks is not None or self.pipeline is not None):
            raise ProblemError(
                "host_memory is given beside hooks or a pipeline, whose bytes in the host's memory are not planned; "
                "leave one of them out",
                option="host_memory",
            )
        if self.offload is None:
            return
        if self.hooks is not None:
            raise ProblemError(
                f"offload and hooks={self.hooks.name!r} are given; hooks pack every saved value, offload "
                "sends some to the host: leave one of them out",
                option="offload",
            )
        if self.plan is None and self.cost.unit != "ps":
            raise ProblemError(
                f"offload is given with cost model '{self.cost}', whose unit is {self.cost.unit}; "
                "expected one that gives times, such as roofline:h100: copies take time",
                option="offload",
            )
        if self.pipeline is not None:
            raise ProblemError(
                "offload does not go together with a pipeline, whose passes decide",
                option="offload",
            )

    def by(self, solver: str | Solver, *, isolation: str | None = None) -> PlanRequest:
        """Return the request with another solver.

        Args:
            solver: name of the solver, or an instance.
            isolation: as in `Registry.solver`.

        Raises:
            SolverError: no solver has the name, or the solver cannot run here.
        """
        read = partial(registry().solver, isolation=isolation)
        return replace(self, solver=_read("solver", read, solver))

    def on(self, joint: JointGraph) -> PlanRequest:
        """Return a copy of the request with the cost model that the requested one stands for on a graph.

        The default cost model, ``auto``, selects a model by the graph.
        """
        return replace(self, cost=self.cost.on(joint))

    def for_graph(self, joint: JointGraph, fingerprint: str, nth: int = 0) -> PlanRequest:
        """Return a copy of the request for one graph, with the saved plan that was made for it, or without a plan.

        Args:
            joint: the graph.
            fingerprint: digest of the graph.
            nth: number of graphs with the same fingerprint that were planned before. It selects one of several plans,
                see `plan_for`.

        Raises:
            PlanError: no saved plan was made for the graph, and ``plans_others`` is False.
        """
        if self.plan is None:
            return self
        plan = plan_for(
            joint, self.plan, fingerprint=fingerprint, nth=nth, others=self.plans_others
        )
        several = self.of_several or (isinstance(self.plan, PlanSet) and len(self.plan) > 1)
        return replace(self, plan=plan, of_several=several)

    def how_to_run(self, peak_bytes: int, what: str = "that plan") -> str:
        """Return advice, as text for an error message, on how to run a plan with a given peak.

        For a single graph, the advice is to give this peak as the budget. One of several graphs shares the budget
        with the others. The advice is then to try this peak, to compile the model as one graph, or to plan the graphs
        together.

        Args:
            peak_bytes: the peak of the plan, in bytes.
            what: words that name the plan in the text.
        """
        if not self.of_several:
            return f"to run {what}, give budget={peak_bytes}"
        return (
            f"the step has other graphs or operators beside it, and needs {peak_bytes} bytes or more: try "
            f"budget={peak_bytes} first. Or compile the model as one graph: run it with TORCH_LOGS=graph_breaks to see "
            "where it breaks. Or plan its graphs together: "
            'remat.plan(remat.capture(model, args, fullgraph=False), budget=…), then options={"plan": plans}'
        )

    def deciding(self) -> Budgeted:
        """Build the pass that decides: `SolveGraph` if the solver solves graph problems, else `Knapsack`."""
        kind = SolveGraph if "graph" in self.solver.solves else Knapsack
        return kind(
            solver=self.solver,
            budget=self.budget,
            cost=self.cost,
            time_limit=self.time_limit or 0.0,  # an option of a pass, where 0 is no limit
        )

    def as_pipeline(self) -> Pipeline:
        """Return the pipeline for this request: the user's own if given, else the default passes.

        Raises:
            ProblemError: the budget is on the peak. Planning then compares many plans, but a pipeline makes one.
        """
        if self.pipeline is not None:
            return self.pipeline
        if self.plan is not None:
            return PassManager((*PREPARE, *SPLIT))
        if self.budget.on_peak:
            raise ProblemError(
                f"budget is {self.budget.label}: a peak is searched for over many plans, which no single "
                "pipeline does; give a ratio or saved bytes (saved:8GiB), or call remat.plan without a pipeline"
            )
        return PassManager((*PREPARE, MinCut(), self.deciding(), *SPLIT))

    def _refuse_beside_pipeline(self, names: list[str]) -> None:
        """Raise a ProblemError if the user gave options that conflict with a pipeline.

        Args:
            names: options that the user gave, and that are options of the pipeline's own passes, such as
                ``"budget"``; empty if there are none.
        """
        if names:
            # The example in the message must be a valid pipeline itself.
            shown = self if not self.budget.on_peak and self.plan is None else PlanRequest.of()
            raise ProblemError(
                f"{', '.join(names)} given beside a pipeline, with which such options do not go together: "
                f"they are options of the pipeline's own passes, for example '{shown.as_pipeline()}'",
                option="pipeline",
            )
        if self.hooks is not None:
            raise ProblemError(
                "hooks do not go together with a pipeline: end the pipeline with the pass "
                "'saved-tensor-hooks(pair=float8)'",
                option="pipeline",
            )


def _read_bytes(given: object) -> int | None:
    """Return the bytes that ``host_memory`` states as a number or a text; None if it is not given."""
    nbytes = parse_bytes(given) if isinstance(given, str) else given
    if given is not None and (type(nbytes) is not int or nbytes < 0):
        raise ProblemError(
            f"host_memory is {given!r}; expected the bytes that may lie in the host's memory at one time, "
            "such as '64GiB'"
        )
    return None if given is None else int(nbytes)  # type: ignore[call-overload]


def _read(option: str, read: Callable[[Any], T], given: object) -> T:
    """Return ``read(given)``; an error that ``read`` raises gets the option's name as its attribute ``option``."""
    with about(option):
        return read(given)


def _read_plan(given: SavedPlan) -> Plan | PlanSet:
    """Read saved plans; raise an error if this installation does not know the cost model of one of them."""
    saved = read_plan(given)
    for plan in (saved,) if isinstance(saved, Plan) else saved:
        registry().cost_model(plan.cost)
    return saved


def _read_chunk(given: ChunkOption) -> ChunkLoss | Literal["auto"] | None:
    """Parse the option ``chunk``; return the pass that splits the loss, ``"auto"``, or None for a whole loss.

    Raises:
        ProblemError: the value is not a number of chunks of 1 or more, a `ChunkLoss`, ``"auto"`` or None.
    """
    if given is None or given == "auto" or isinstance(given, ChunkLoss):
        return given  # type: ignore[return-value]
    chunks = int(given) if isinstance(given, str) and given.isdigit() else given
    if type(chunks) is not int or chunks < 1:
        raise ProblemError(f"chunk is {given!r}; expected a number of chunks, such as 8, or 'auto'")
    return None if chunks == 1 else ChunkLoss(chunks=chunks)


def _read_pipeline(pipeline: str | Pipeline) -> Pipeline:
    """Return a pipeline that is given as text or as an object.

    Raises:
        ProblemError: the value is no pipeline, its text cannot be parsed, or no pass of it partitions the graph.
    """
    made = PassManager.parse(pipeline) if isinstance(pipeline, str) else pipeline
    if not isinstance(made, Pipeline):
        raise ProblemError(
            f"pipeline is a {type(pipeline).__name__}; expected text, for example "
            f"'{PlanRequest.of().as_pipeline()}', or a remat.PassManager"
        )
    if not any(isinstance(p, Partition) for p in made.flat()):
        raise ProblemError(
            f"pipeline '{made}' does not partition: put 'partition' behind what decides"
        )
    return made
