"""State of a pipeline: a joint graph with its cached analyses.

An analysis is a frozen dataclass whose fields are its parameters, so an instance serves as the cache key:
``state.get(Classification())``, ``state.get(GraphProblemOf(cost=Flops()))``. The class of an analysis determines the
type of its result.

`AnalysisCache` stores the results of the analyses of one joint graph. An edit of the joint graph drops
the cached results, except those that the edit preserves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import fx

from remat.errors import PlanError, ProblemError
from remat.graph.costs import CostModel, node_costs
from remat.graph.index import GraphIndex, index_graph
from remat.graph.joint import JointGraph
from remat.graph.memory.ownership import Storages, find_storages
from remat.graph.problems.lowering import Decision, Lowered, lower
from remat.graph.roles import Roles, classify, distances
from remat.passes.core.provenance import BanRules, Provenance, SavedLimits
from remat.passes.packing.pairs import SavedTensorHooks

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: Function that `around_analyses` has set. A context variable, so that the function sees only its own
#: thread's analyses.
_AROUND: ContextVar[Callable[[Analysis[Any]], AbstractContextManager[object]]] = ContextVar(
    "_AROUND", default=nullcontext
)


class Analysis(ABC, Generic[T_co]):
    """Base class of analyses of joint graphs. A subclass is a frozen dataclass that implements `compute`.

    The command ``remat passes`` shows the first line of the docstring of a subclass.

    Attributes:
        name: kebab-case name in pipelines and tables.
    """

    name: ClassVar[str]

    @abstractmethod
    def compute(self, state: State) -> T_co:
        """Compute this analysis of the joint graph in ``state``, and return the result.

        An implementation of `compute` may request other analyses from ``state``, and must not change
        ``state``.
        """


@dataclass(slots=True, eq=False)
class AnalysisCache:
    """Cached results of the analyses of one joint graph.

    Attributes:
        owner: the graph and the options on which the cached results depend.
        edits: number of finished edits of the joint graph, without edits that are known to have changed
            nothing.
        is_edited: whether an edit of the joint graph is in progress.
        results: the cached results, in the order in which they were computed.
    """

    owner: tuple[Any, ...]
    edits: int = 0
    is_edited: bool = False
    results: dict[Analysis[Any], Any] = field(default_factory=dict)

    def get(self, key: Analysis[T], state: State) -> T:
        """Return the result of the analysis ``key`` of a state's joint graph, computed on the first request.

        Raises:
            ProblemError: the joint graph is being edited, so the result would soon be stale.
        """
        if self.is_edited:
            raise ProblemError(
                f"analysis '{key.name}' was asked for inside `with state.edit()`, where the graph is "
                "changing; ask before the edit begins, or after it has ended"
            )
        if key not in self.results:
            with _AROUND.get()(key):
                self.results[key] = key.compute(state)
        return cast(T, self.results[key])

    def keep_only(self, preserves: Sequence[type[Analysis[Any]]]) -> None:
        """After an edit of the joint graph, drop the cached results of all analyses except ``preserves``."""
        self.results = {k: v for k, v in self.results.items() if isinstance(k, tuple(preserves))}


@contextmanager
def around_analyses(
    around: Callable[[Analysis[Any]], AbstractContextManager[object]],
) -> Iterator[None]:
    """Within the ``with`` block, compute each analysis inside the context manager that ``around`` returns for it."""
    token = _AROUND.set(around)
    try:
        yield
    finally:
        _AROUND.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """A joint graph, its cached analyses, and the decision and graphs that passes have produced so far.

    Passes change a state's graphs inside `State.edit`, which drops outdated results of analyses. A new
    state with another joint graph starts without cached results.

    Attributes:
        joint: the joint graph.
        cut_rules: which heuristics keep the pipeline's minimum cut from recomputing certain nodes.
        decision: which values are saved, and optionally in which order nodes run; None until a pass
            has decided.
        limits: limits on the saved bytes under which the decision was made; None until a pass has
            decided.
        provenance: which solver or search found the decision; None until a pass has decided.
        forward: the forward module; None before partitioning.
        backward: the backward module; None before partitioning.
        count_outputs: whether forward's outputs count as saved bytes.
        hooks: saved-tensor hooks to apply after partitioning; None without hooks.
        user_mutable: names of inputs that user code may write to between forward and backward, as
            eager autograd permits.
        reread_inputs: whether backward may read the ``user_mutable`` inputs again, without a copy
            that forward saves.
        operators: digest of the operators that the graph had before any pass ran; empty if unknown.
        policies: the option ``policies`` of `remat.plan` as text; empty if none were given.
        chunk: text of the pass that split the loss into chunks; empty if the loss is not split.
        plain: the state that would result without policies and without chunks of the loss; None if
            this state has neither.
        cache: results of the analyses of the joint graph.
    """

    joint: JointGraph
    cut_rules: BanRules = BanRules()
    decision: Decision | None = None
    limits: SavedLimits | None = None
    provenance: Provenance | None = None
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    count_outputs: bool = False
    hooks: SavedTensorHooks | None = None
    user_mutable: frozenset[str] = frozenset()
    reread_inputs: bool = True
    operators: str = ""
    policies: str = ""
    chunk: str = ""
    plain: State | None = None
    cache: AnalysisCache = field(default=AnalysisCache(()), repr=False)

    def __post_init__(self) -> None:
        # `dataclasses.replace` copies the cache even to a state with another graph or other options.
        owner = (self.joint, self.count_outputs, self.reread_inputs)
        if self.cache.owner != owner:
            object.__setattr__(self, "cache", AnalysisCache(owner))

    def get(self, analysis: Analysis[T]) -> T:
        """Return the result of an analysis of the joint graph, computed on the first request.

        Raises:
            ProblemError: the joint graph is being edited.
        """
        return self.cache.get(analysis, self)

    @contextmanager
    def edit(self, *, preserves: Sequence[type[Analysis[Any]]] = ()) -> Iterator[Edit]:
        """Let a pass edit, in place, the joint graph or, after partitioning, the forward and backward graphs.

        The end of an edit of the joint graph drops the cached results of all analyses except
        ``preserves``. No cached result is dropped if the ``with`` block calls ``edit.result`` with
        counts of changes that are all 0, such as ``edit.result(removed=0)``.

        Args:
            preserves: analyses whose results stay valid after the edit.

        Raises:
            ProblemError: another edit of the same joint graph is in progress.
        """
        edit, cached = Edit(state=self), self.cache
        if self.forward is not None:  # analyses are of the joint graph, so none gets stale
            yield edit
            return
        if cached.is_edited:
            raise ProblemError("this graph is being edited already: `state.edit()` does not nest")
        cached.is_edited = True
        try:
            yield edit
        finally:
            cached.is_edited = False
            # `modified` is None if the block ended without `Edit.result`: a change is assumed.
            if edit.modified is not False:
                cached.edits += 1
                cached.keep_only(preserves)

    @property
    def modules(self) -> dict[str, fx.GraphModule]:
        """The graphs that passes edit, by name: the joint graph or, if partitioned, forward and backward."""
        if self.forward is None or self.backward is None:
            return {"joint graph": self.joint.graph_module}
        return {"forward": self.forward, "backward": self.backward}

    @property
    def index(self) -> GraphIndex:
        """Position, inputs and users of each node of the joint graph, as integers."""
        return self.get(Positions())

    @property
    def roles(self) -> Roles:
        """Which nodes of the joint graph are required by forward, and which by backward."""
        return self.get(Classification())

    @property
    def storages(self) -> Storages:
        """Which values of the joint graph share a storage, and the bytes of each storage."""
        return self.get(Memory())

    def lowered(self, cost: CostModel | None = None) -> Lowered:
        """Return the joint graph's graph problem: which nodes may be saved or recomputed, with integer costs.

        Args:
            cost: the cost model; None: every node costs 1.
        """
        return self.get(GraphProblemOf(None if cost is None else cost.for_graph(self.joint)))


@dataclass(slots=True, eq=False)
class Edit:
    """An unfinished edit of the graphs of a state; see `State.edit`.

    Attributes:
        state: the state whose graphs change.
        modified: whether a graph was changed; None until `result` is called or a pass sets a bool.
    """

    state: State
    modified: bool | None = None

    def result(self, detail: str = "", **statistics: int) -> PassResult:
        """Return the result of the pass that made the edit, and record whether a graph changed.

        If the joint graph changed, the result's state has no decision, because the old decision was
        made for the old graph.

        Args:
            detail: one line that describes the change.
            **statistics: counts of changes by name. The graphs count as unchanged if there are
                counts and all are 0. Without counts, the graphs count as changed.
        """
        state = self.state
        if self.modified is None:
            self.modified = any(statistics.values()) or not statistics
        if self.modified and state.forward is None:
            state = replace(state, decision=None, limits=None, provenance=None)
        return PassResult(state=state, modified=self.modified, detail=detail, statistics=statistics)


def partitioned_graphs(state: State, who: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward module of a partitioned state.

    Args:
        state: the state.
        who: name of the pass or analysis that needs the modules, for the message.

    Raises:
        PlanError: the state is not partitioned yet.
    """
    if state.forward is None or state.backward is None:
        raise PlanError(
            f"'{who}' is about forward and backward, but graph '{state.joint.name}' is not "
            "partitioned yet; put the pass 'partition' before"
        )
    return state.forward, state.backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassResult:
    """Result of a pass or of a pipeline.

    Attributes:
        state: the state after the pass or pipeline.
        modified: whether the pass or pipeline reported a change of a graph or of the state.
        detail: one line that describes the change, for logs and tables.
        statistics: counts of changes, by name; a pipeline sums the counts of its passes.
    """

    state: State
    modified: bool
    detail: str = ""
    statistics: Mapping[str, int] = field(default_factory=dict)

    @property
    def joint(self) -> JointGraph:
        """The joint graph of `state`."""
        return self.state.joint

    @property
    def graph_module(self) -> fx.GraphModule:
        """The FX module of the joint graph of `state`."""
        return self.state.joint.graph_module

    @property
    def forward(self) -> fx.GraphModule | None:
        return self.state.forward

    @property
    def backward(self) -> fx.GraphModule | None:
        return self.state.backward


@dataclass(frozen=True)
class Positions(Analysis[GraphIndex]):
    """Position, inputs and users of each node of the joint graph, as integers."""

    name: ClassVar[str] = "positions"

    def compute(self, state: State) -> GraphIndex:
        return index_graph(state.joint.graph)


@dataclass(frozen=True)
class Classification(Analysis[Roles]):
    """Which nodes of the joint graph are required by forward, and which by backward."""

    name: ClassVar[str] = "classification"

    def compute(self, state: State) -> Roles:
        return classify(state.joint, state.index)


@dataclass(frozen=True)
class Distances(Analysis[tuple[int, ...]]):
    """Distance of each node of the joint graph from backward.

    The distance from backward is the least number of edges, along the data flow, to a node that forward
    does not require. The result has one distance per node of the joint graph, in graph order. The
    distance from backward is 0 for nodes that forward does not require, and
    `remat.graph.roles.UNREACHABLE` for nodes without a path to such a node.
    """

    name: ClassVar[str] = "distances"

    def compute(self, state: State) -> tuple[int, ...]:
        return distances(state.index, state.roles)


@dataclass(frozen=True)
class Memory(Analysis[Storages]):
    """Which values of the joint graph share a storage, and the bytes of each storage."""

    name: ClassVar[str] = "storages"

    def compute(self, state: State) -> Storages:
        return find_storages(
            state.joint,
            state.index,
            state.roles,
            count_outputs=state.count_outputs,
            user_mutated=() if state.reread_inputs else sorted(state.user_mutable),
        )


@dataclass(frozen=True)
class Costs(Analysis[tuple[int, ...]]):
    """Cost of running each node of the joint graph, in graph order, in the unit of the cost model ``cost``.

    A node that depends on a tangent, or may only run in backward, costs 0, because no plan runs
    such a node twice.
    """

    name: ClassVar[str] = "costs"

    cost: CostModel

    def compute(self, state: State) -> tuple[int, ...]:
        once = state.roles.tangent_closure
        positions = [i for i, only_backward in enumerate(once) if not only_backward]
        return tuple(node_costs(state.index, state.storages, self.cost, positions))


@dataclass(frozen=True)
class GraphProblemOf(Analysis[Lowered]):
    """The joint graph's graph problem: which nodes may be saved or recomputed, with the costs of a cost model.

    Attributes:
        cost: the cost model; None: every node costs 1.
    """

    name: ClassVar[str] = "graph-problem"

    cost: CostModel | None = None

    def compute(self, state: State) -> Lowered:
        if self.cost is None:
            # A cost model changes only the costs of nodes, so all cost models share this problem.
            unit = [1] * len(state.index)
            return lower(state.index, state.roles, state.storages, unit, "op")
        return state.lowered().priced(state.get(Costs(self.cost)), self.cost.unit)
