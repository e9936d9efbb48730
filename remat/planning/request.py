"""The parsed options of planning, and the table of conflicts between options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

from remat.errors import ProblemError, about
from remat.graph.costs import CostModel
from remat.graph.costs.links import DEFAULT_LINK, Link
from remat.graph.joint import JointGraph
from remat.graph.policies import Policies
from remat.options import PlanOptions, PlanOptionsDict
from remat.passes.core.pipeline import Pipeline
from remat.passes.decide.budgeted import Budgeted, Knapsack, SolveGraph
from remat.passes.decide.min_cut import MinCut
from remat.passes.joint.chunk_loss import ChunkLoss
from remat.passes.packing.pairs import SavedTensorHooks
from remat.planning.pipelines import PREPARE, SPLIT, PassManager
from remat.planning.plan import Plan
from remat.planning.plan_file import plan_for, read_known_plan
from remat.planning.plan_set import PlanSet
from remat.planning.readers import READERS
from remat.planning.search.effort import DEFAULT
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.units import Budget, Peak

#: Situation in which options may conflict: when they are parsed, or when a caller finds that something is unsupported.
Situation = Literal[
    "options of passes",
    "parsed",
    "several graphs",
    "nothing tagged",
    "no offloading",
    "no choice of chunks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Parsed options of planning; `PlanOptions` documents those attributes that this docstring leaves out.

    Attributes:
        plan: saved plans to apply to the graphs that they were made for; None: the solver decides.
        plans_others: whether a graph for which ``plan`` holds no plan is planned under ``budget``, instead of refused.
        of_several: whether the graph to plan is known to be one of several graphs of its step.
        pipeline: the user's pipeline, which replaces the default passes. The pipeline's passes carry their own budget,
            solver, cost model and time limit.
        count_outputs: whether forward's outputs count as saved bytes.
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
        """The link over which values are offloaded: the option ``offload`` if it is given, or else the default link."""
        return self.offload or DEFAULT_LINK

    @property
    def decides(self) -> bool:
        """Whether planning chooses what to save under ``budget``; False with a saved plan or a user's pipeline."""
        return self.plan is None and self.pipeline is None

    @classmethod
    def of(cls, **options: Unpack[PlanOptionsDict]) -> PlanRequest:
        """Parse and check the options of planning that a user gives; `PlanOptions` documents these options.

        Raises:
            RematError: an option is invalid, or two options conflict. The error's attribute ``option`` is the name of
                the invalid option, or of one of the two that conflict.
        """
        plan_options = PlanOptions(**options)
        named = plan_options.given
        registry().learn_operators()  # fingerprints depend on the operators that plugins declare
        readers: dict[str, Callable[[Any], object]] = {
            **READERS,
            "solver": partial(registry().solver, isolation=plan_options.isolation),
            "plan": read_known_plan,
        }
        read: dict[str, Any] = {}
        for name, reader in readers.items():
            value = getattr(plan_options, name)
            if value is not None or name in named:
                with about(name):
                    read[name] = reader(value)
        # A budget beside saved plans is meant for the graphs without a plan.
        others = plan_options.plan is not None and "budget" in named
        request = cls(**read, count_outputs=plan_options.count_outputs, plans_others=others)
        # An option such as policies={} is given, but asks for nothing.
        of_passes = [n for n in named if n in _OF_PASSES and getattr(request, n, True)]
        if of_passes:
            request.check("options of passes", ", ".join(of_passes))
        request.check("parsed")
        return request

    @classmethod
    def without_budget(cls, **options: Unpack[PlanOptionsDict]) -> PlanRequest:
        """Parse options of planning, without a budget, for a caller that plans under several budgets itself.

        The budget of the resulting request is only a placeholder. With ``offload`` or ``chunk="auto"``, which need a
        budget on the peak, the placeholder is the peak ratio 1.
        """
        if options.get("offload") is not None or options.get("chunk") == "auto":
            options["budget"] = Peak(1.0)
        return cls.of(**options)

    def to_options(self) -> dict[str, Any]:
        """Return the options as a dict from name to JSON value, which `PlanRequest.of` parses.

        The dict is empty if the request has a saved plan or a pipeline.
        """
        if not self.decides:
            return {}
        kind = type(self.solver)
        registered = registry().solvers.get(self.solver.name) is kind
        options = {
            "budget": str(self.budget),
            # An unregistered solver is named by its import path, from which `of` can load the class.
            "solver": self.solver.name if registered else f"{kind.__module__}:{kind.__qualname__}",
            "cost": str(self.cost),
            "time_limit": self.time_limit,
            "hooks": None if self.hooks is None else self.hooks.name,
            "reread_inputs": None if self.reread_inputs else False,
            "offload": None if self.offload is None else str(self.offload),
            "host_memory": self.host_memory,
            "policies": str(self.policies) or None,
            "chunk": self.chunks if isinstance(self.chunk, ChunkLoss) else self.chunk,
        }
        return {name: given for name, given in options.items() if given is not None}

    @property
    def example(self) -> Pipeline:
        """A valid pipeline of default passes, as text, with those options of this request that a pipeline can have."""
        alone = self.budget.on_peak or self.plan is not None
        return (PlanRequest.of() if alone else replace(self, pipeline=None)).as_pipeline()

    def check(self, situation: Situation, subject: str = "") -> None:
        """Raise an error if the table `CONFLICTS` refuses the request's options in a situation.

        Args:
            situation: name of the situation, as in `CONFLICTS`.
            subject: subject of the message: the caller, such as ``"compare"``, or the names of given options. Empty if
                the messages for the situation need none.

        Raises:
            ProblemError: two options conflict. The error's attribute ``option`` is the name of one of these two.
        """
        for conflict in CONFLICTS:
            if conflict.situation == situation and conflict.holds(self):
                message = conflict.message.format(request=self, subject=subject)
                raise ProblemError(message, option=conflict.option)

    @property
    def chunks(self) -> int:
        """Number of chunks of the loss; 1 if the loss is not split, or if ``chunk`` is ``"auto"``."""
        return self.chunk.chunks if isinstance(self.chunk, ChunkLoss) else 1

    def each_chunk(self) -> list[PlanRequest]:
        """Return a copy of the request for each number of chunks into which to try to split the loss.

        With ``chunk="auto"``, `Effort.chunks` lists the numbers, fewest first. With any other value, return this
        request.
        """
        if self.chunk != "auto":
            return [self]
        return [replace(self, chunk=ChunkLoss(chunks=n) if n > 1 else None) for n in DEFAULT.chunks]

    def by(self, solver: str | Solver, *, isolation: str | None = None) -> PlanRequest:
        """Return a copy of the request with another solver, given by name or as an instance.

        Raises:
            SolverError: no solver has the name, or the solver cannot run on this machine.
        """
        with about("solver"):
            return replace(self, solver=registry().solver(solver, isolation=isolation))

    def with_graph_cost(self, joint: JointGraph) -> PlanRequest:
        """Return a copy of the request in which a cost model such as ``auto`` is resolved for a given graph."""
        return replace(self, cost=self.cost.for_graph(joint))

    def for_graph(self, joint: JointGraph, fingerprint: str, nth: int = 0) -> PlanRequest:
        """Return a copy of the request for one graph, with the graph's saved plan if the request has saved plans.

        Args:
            joint: the graph.
            fingerprint: digest of the graph.
            nth: number of graphs with the same fingerprint that were planned before. This number selects one of several
                plans, see `plan_for`.

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

    def how_to_run(self, peak_bytes: int, subject: str = "that plan") -> str:
        """Return advice for an error message: how the user can run a plan with a given peak.

        Args:
            peak_bytes: the peak of the plan, in bytes.
            subject: words that name the plan in the text.
        """
        if not self.of_several:
            return f"to run {subject}, give budget={peak_bytes}"
        return (
            f"the step has other graphs or operators beside it, and needs {peak_bytes} bytes or more: try "
            f"budget={peak_bytes} first. Or compile the model as one graph: run it with TORCH_LOGS=graph_breaks to see "
            "where it breaks. Or plan its graphs together: "
            'remat.plan(remat.capture(model, args, fullgraph=False), budget=…), then options={"plan": plans}'
        )

    def deciding(self) -> Budgeted:
        """Build the pass that decides what to save: `SolveGraph` for a solver of graph problems, or else `Knapsack`."""
        # A solver of knapsacks chooses among the expensive values; minimum cuts complete its choice.
        kind = SolveGraph if "graph" in self.solver.solves else Knapsack
        return kind(
            solver=self.solver,
            budget=self.budget,
            cost=self.cost,
            time_limit=self.time_limit or 0.0,  # an option of a pass, where 0 is no limit
        )

    def as_pipeline(self) -> Pipeline:
        """Return the pipeline for this request: the user's pipeline if one is given, or the pipeline of default passes.

        Raises:
            ProblemError: the budget is on the peak. Such a budget needs many plans to compare, but a pipeline makes
                one.
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


class Conflict(NamedTuple):
    """A row of the table `CONFLICTS`: an option that is refused in a situation.

    Attributes:
        option: name of the option to change.
        situation: the situation in which the conflict matters.
        holds: function that returns whether a request has the conflict.
        message: message of the error, a template with the fields ``request``, the request, and ``subject``.
    """

    option: str
    situation: Situation
    holds: Callable[[PlanRequest], object]
    message: str


#: All conflicts between options. The first row that holds gives the error.
CONFLICTS = (
    Conflict(
        "pipeline",
        "options of passes",
        lambda request: request.pipeline,
        "{subject} given beside a pipeline, with which such options do not go together: they are options of the "
        "pipeline's own passes, for example '{request.example}'",
    ),
    Conflict(
        "pipeline",
        "parsed",
        lambda request: request.pipeline and request.hooks,
        "hooks do not go together with a pipeline: end the pipeline with the pass 'saved-tensor-hooks(pair=float8)'",
    ),
    Conflict(
        "host_memory",
        "parsed",
        lambda request: request.host_memory is not None and (request.hooks or request.pipeline),
        "host_memory is given beside hooks or a pipeline, whose bytes in the host's memory are not planned; leave one "
        "of them out",
    ),
    Conflict(
        "offload",
        "parsed",
        lambda request: request.offload and request.hooks,
        "offload and hooks={request.hooks.name!r} are given; hooks pack every saved value, offload sends some to the "
        "host: leave one of them out",
    ),
    Conflict(
        "offload",
        "parsed",
        lambda request: request.offload and request.plan is None and request.cost.unit != "ps",
        "offload is given with cost model '{request.cost}', whose unit is {request.cost.unit}; expected one that gives "
        "times, such as roofline:h100: copies take time",
    ),
    Conflict(
        "offload",
        "parsed",
        lambda request: request.offload and request.pipeline,
        "offload does not go together with a pipeline, whose passes decide",
    ),
    Conflict(
        "chunk",
        "parsed",
        lambda request: (
            request.chunk == "auto" and request.plan is None and not request.budget.on_peak
        ),
        "chunk='auto' is given with budget {request.budget.label}; expected a budget on the peak, by which the number of "
        "chunks is chosen: remat.Peak('40GiB') or remat.Peak(0.5), or a number: chunk=8",
    ),
    Conflict(
        "plan",
        "several graphs",
        lambda request: request.plan,
        "plan= applies one saved plan to one graph, got several graphs",
    ),
    Conflict(
        "pipeline",
        "several graphs",
        lambda request: request.pipeline,
        "pipeline= runs on one graph, got several graphs",
    ),
    Conflict(
        "chunk",
        "several graphs",
        lambda request: request.chunk,
        "chunk= splits the loss of a step in one graph, got several graphs",
    ),
    # Under a budget on saved bytes, only tagged values are offloaded, so without any the option has no effect.
    Conflict(
        "offload",
        "nothing tagged",
        lambda request: request.offload and not request.budget.on_peak,
        "offload is given with budget {request.budget.label}, and nothing is tagged for offloading; expected a budget on "
        "the peak, which is what offloading lowers: remat.Peak('40GiB') or remat.Peak(0.5), as text peak:0.5",
    ),
    Conflict(
        "offload",
        "no offloading",
        lambda request: request.offload,
        "{subject} does not offload; leave offload out, or plan one graph within a peak",
    ),
    Conflict(
        "chunk",
        "no choice of chunks",
        lambda request: request.chunk == "auto",
        "{subject} does not choose a number of chunks; give one, such as chunk=8, or plan one graph within a peak",
    ),
)
#: Options that are options of a pipeline's own passes, or that replace what its passes decide.
_OF_PASSES = ["budget", "solver", "cost", "time_limit", "isolation", "plan", "policies", "chunk"]
