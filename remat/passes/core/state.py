"""State of a pipeline: a joint graph with its cached analyses.

An analysis is a frozen dataclass whose fields are its parameters, so that an instance is its own
key: ``state.get(Classification())``, ``state.get(GraphProblemOf(cost=Flops()))``. What it returns is
typed by the key. Nobody stores a result by hand: results live with the graphs that they are about
(`AnalysisCache`), are dropped when those are edited, and cannot be asked for while an edit is under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import fx

from remat.errors import PlanError, ProblemError
from remat.graph.costs import CostModel, node_costs
from remat.graph.index import GraphIndex, index_graph
from remat.graph.joint import JointGraph
from remat.graph.lowering import Decision, Lowered, lower
from remat.graph.ownership import Storages, find_storages
from remat.graph.roles import Roles, classify
from remat.passes.core.choice import BanRules, DecisionInfo
from remat.passes.packing.pairs import SavedTensorHooks

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: Called right before (True) and right after (False) an analysis is computed; see `watching`.
_WATCHERS: ContextVar[tuple[Callable[[Analysis[Any], bool], None], ...]] = ContextVar(
    "_WATCHERS", default=()
)


class Analysis(ABC, Generic[T_co]):
    """Base of analyses: subclass it as a frozen dataclass and implement `compute`.

    Attributes:
        name: kebab-case name, in pipelines and tables.
        summary: one line for ``remat passes``.
        after_partition: whether it is about forward and backward after partitioning rather than about the
            joint graph.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    after_partition: ClassVar[bool] = False

    @abstractmethod
    def compute(self, state: State) -> T_co:
        """Computes the analysis; it may ask the state for others, and changes nothing."""


@dataclass(slots=True, eq=False)
class AnalysisCache:
    """Cached analyses of one joint graph, or of its forward and backward graphs.

    Attributes:
        owner: the graphs and options that the results are about.
        edits: how often the graphs were changed inside of an edit.
        is_edited: whether an edit is under way.
    """

    owner: tuple[Any, ...]
    edits: int = 0
    is_edited: bool = False
    _results: dict[Analysis[Any], Any] = field(default_factory=dict)
    #: The analyses that each result was computed from.
    _asked: dict[Analysis[Any], set[Analysis[Any]]] = field(default_factory=dict)
    _computing: list[set[Analysis[Any]]] = field(default_factory=list)

    def get(self, key: Analysis[T], state: State) -> T:
        """The result of an analysis, computed on the first request.

        Raises:
            ProblemError: the graph is being edited, so that any answer would soon be stale.
        """
        if self.is_edited:
            raise ProblemError(
                f"analysis '{key.name}' was asked for inside `with state.edit()`, where the graph is "
                "changing; ask before the edit begins, or after it has ended"
            )
        if self._computing:
            self._computing[-1].add(key)
        if key not in self._results:
            watchers = _WATCHERS.get()
            for watch in watchers:
                watch(key, True)
            self._computing.append(set())
            try:
                value = key.compute(state)
            finally:
                asked = self._computing.pop()
                for watch in watchers:
                    watch(key, False)
            self._results[key], self._asked[key] = value, asked
        return cast(T, self._results[key])

    def keep_only(self, preserves: Sequence[type[Analysis[Any]]]) -> None:
        """Drop analyses that an edit does not preserve, with all analyses computed from them."""
        kept = {k: v for k, v in self._results.items() if isinstance(k, tuple(preserves))}
        while lost := [k for k in kept if not self._asked[k] <= kept.keys()]:
            for key in lost:
                del kept[key]
        self._results = kept

    def results(self) -> tuple[tuple[Analysis[Any], Any], ...]:
        """Cached analyses with their results, in the order of computation."""
        return tuple(self._results.items())


@contextmanager
def watching(watch: Callable[[Analysis[Any], bool], None]) -> Iterator[None]:
    """Calls ``watch`` right before (True) and after (False) each analysis that is computed."""
    token = _WATCHERS.set((*_WATCHERS.get(), watch))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """A joint graph on its way to a plan.

    `get` returns the result of an analysis, and computes it where it is not known yet. Graphs are
    changed inside `edit`, which drops the results that no longer hold. A state over another graph
    begins without results.

    Attributes:
        joint: the joint graph.
        cut_rules: heuristics of the cut that the pipeline uses.
        decision: what is kept, once a pass has decided.
        choice: how the decision came about.
        forward: forward module, after partitioning.
        backward: backward module, after partitioning.
        count_outputs: whether forward's outputs count as saved bytes.
        hooks: what saved tensors are to pass through once the graph is split.
        user_mutable: names of the inputs that eager autograd lets the user write to before backward.
        reread_inputs: whether backward may read those nevertheless.
        operators: digest of the operators of the graph as it was captured; empty where not known.
    """

    joint: JointGraph
    cut_rules: BanRules = BanRules()
    decision: Decision | None = None
    choice: DecisionInfo | None = None
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    count_outputs: bool = False
    hooks: SavedTensorHooks | None = None
    user_mutable: frozenset[str] = frozenset()
    reread_inputs: bool = True
    operators: str = ""
    _joint_cache: AnalysisCache = field(default=AnalysisCache(()), repr=False)
    _partitioned_cache: AnalysisCache = field(default=AnalysisCache(()), repr=False)

    def __post_init__(self) -> None:
        for name, owner in (
            ("_joint_cache", (self.joint, self.count_outputs, self.reread_inputs)),
            ("_partitioned_cache", (self.joint, self.forward, self.backward)),
        ):
            if getattr(self, name).owner != owner:
                object.__setattr__(self, name, AnalysisCache(owner))

    def get(self, analysis: Analysis[T]) -> T:
        """The result of an analysis, never a stale one.

        Raises:
            ProblemError: it was asked for inside `edit`.
        """
        known = self._partitioned_cache if analysis.after_partition else self._joint_cache
        return known.get(analysis, self)

    @contextmanager
    def edit(self, *, preserves: Sequence[type[Analysis[Any]]] = ()) -> Iterator[Edit]:
        """Edit the joint graph in place or, after partitioning, forward and backward.

        Cached analyses are dropped at the end, unless the pass preserves them or changes nothing. It reports
        no change by counts of 0: ``return edit.result(removed=n)`` inside of the edit.

        Args:
            preserves: analyses that the change does not touch. One that was computed from an
                analysis that is dropped goes with it.
        """
        known = self._joint_cache if self.forward is None else self._partitioned_cache
        if known.is_edited:
            raise ProblemError("this graph is being edited already: `state.edit()` does not nest")
        known.is_edited = True
        edit = Edit(state=self)
        try:
            yield edit
        finally:
            known.is_edited = False
            if edit.modified is not False:
                known.edits += 1
                known.keep_only(preserves)

    @property
    def modules(self) -> dict[str, fx.GraphModule]:
        """The graphs that passes edit: the joint graph or, after partitioning, forward and backward."""
        if self.forward is None or self.backward is None:
            return {"joint graph": self.joint.graph_module}
        return {"forward": self.forward, "backward": self.backward}

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the cached analyses."""
        return tuple(key.name for known in self.analysis_caches for key, _ in known.results())

    @property
    def analysis_caches(self) -> tuple[AnalysisCache, AnalysisCache]:
        """Cached analyses of the joint graph, and of forward and backward."""
        return self._joint_cache, self._partitioned_cache

    @property
    def index(self) -> GraphIndex:
        """Positions of the nodes of the joint graph."""
        return self.get(Positions())

    @property
    def roles(self) -> Roles:
        """Whether each node belongs to forward or to backward."""
        return self.get(Classification())

    @property
    def storages(self) -> Storages:
        """Which values share memory."""
        return self.get(Memory())

    def lowered(self, cost: CostModel | None = None) -> Lowered:
        """The graph problem under a cost model; without one, every node costs 1."""
        return self.get(GraphProblemOf(None if cost is None else cost.on(self.joint)))


@dataclass(slots=True, eq=False)
class Edit:
    """An edit of a state's graphs in progress; see `State.edit`.

    Attributes:
        state: the state whose graphs change.
        modified: whether anything changed; None: `result` tells by its counts.
    """

    state: State
    modified: bool | None = None

    def result(self, detail: str = "", **statistics: int) -> PassResult:
        """What the pass returns.

        A changed joint graph has no decision any more: that was about the graph as it was.

        Args:
            detail: one line on what was done.
            **statistics: counts of what was done. If all are 0, nothing was changed; without any,
                something was.
        """
        state = self.state
        if self.modified is None:
            self.modified = any(statistics.values()) or not statistics
        if self.modified and state.forward is None:
            state = replace(state, decision=None, choice=None)
        return PassResult(state=state, modified=self.modified, detail=detail, statistics=statistics)


def partitioned_graphs(state: State, who: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two modules of a partitioned state.

    Raises:
        PlanError: it is not partitioned yet.
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
        state: the state after it.
        modified: whether anything changed.
        detail: one line on what was done, for logs and tables.
        statistics: counts of what was done, by kebab-case name; summed up over a run.
    """

    state: State
    modified: bool
    detail: str = ""
    statistics: Mapping[str, int] = field(default_factory=dict)

    @property
    def joint(self) -> JointGraph:
        """The joint graph, as `State.joint`."""
        return self.state.joint

    @property
    def graph_module(self) -> fx.GraphModule:
        """The joint graph after the passes."""
        return self.state.joint.graph_module

    @property
    def forward(self) -> fx.GraphModule | None:
        return self.state.forward

    @property
    def backward(self) -> fx.GraphModule | None:
        return self.state.backward


@dataclass(frozen=True)
class Positions(Analysis[GraphIndex]):
    """The joint graph as integers: positions, inputs, users."""

    name: ClassVar[str] = "positions"
    summary: ClassVar[str] = "nodes, inputs and users as integers"

    def compute(self, state: State) -> GraphIndex:
        return index_graph(state.joint.graph)


@dataclass(frozen=True)
class Classification(Analysis[Roles]):
    """Whether each node belongs to forward or to backward."""

    name: ClassVar[str] = "classification"
    summary: ClassVar[str] = "forward, backward and unclaimed nodes"

    def compute(self, state: State) -> Roles:
        return classify(state.joint, state.index)


@dataclass(frozen=True)
class Memory(Analysis[Storages]):
    """Which values share memory, and how many bytes each memory takes."""

    name: ClassVar[str] = "storages"
    summary: ClassVar[str] = "who shares memory, bytes, what is alive anyway"

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
    """Cost of running each node under a cost model, in its unit.

    Only what could run twice is priced: what depends on a tangent costs 0.
    """

    name: ClassVar[str] = "costs"
    summary: ClassVar[str] = "cost of running each node that could run twice"

    cost: CostModel

    def compute(self, state: State) -> tuple[int, ...]:
        once = state.roles.tangent_closure
        positions = [i for i, only_backward in enumerate(once) if not only_backward]
        return tuple(node_costs(state.index, state.storages, self.cost, positions))


@dataclass(frozen=True)
class GraphProblemOf(Analysis[Lowered]):
    """The graph problem; without a cost model, every node costs 1."""

    name: ClassVar[str] = "graph-problem"
    summary: ClassVar[str] = "the decision as a problem in integers"

    cost: CostModel | None = None

    def compute(self, state: State) -> Lowered:
        if self.cost is None:
            unit = [1] * len(state.index)
            return lower(state.index, state.roles, state.storages, unit, "op")
        return state.lowered().priced(state.get(Costs(self.cost)), self.cost.unit)
