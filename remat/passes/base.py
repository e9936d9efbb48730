"""What a pass is, and the state that passes hand on to one another.

A pass is a frozen dataclass: its fields are its options, so printing, parsing and help come free.
It is given a `State` and returns a `PassResult`; it never keeps anything of a run on itself.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import fx

from remat.errors import PlanError
from remat.graph.costs import CostModel
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph
from remat.graph.lowering import Decision, Lowered
from remat.graph.roles import Roles
from remat.graph.storages import Storages
from remat.passes.analysis import Analysis, Known

if TYPE_CHECKING:
    from remat.passes.min_cut import MinCut
    from remat.passes.packing import SavedTensorHooks

T = TypeVar("T")


class Stage(enum.IntEnum):
    """Where in a pipeline a pass belongs; stages may not go back."""

    ANY = 0
    JOINT = 1
    DECIDE = 2
    PARTITION = 3
    SPLIT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a decision came about.

    Attributes:
        capacity: bytes that the decision may save; None where there is no limit.
        full_bytes: bytes that the runtime-optimal cut saves.
        least_bytes: the least that any decision saves.
        solver: the solver that was asked, or ``min-cut`` where that cut is all there is or costs less.
        items: nodes of the graph problem that a solver decided; 0 without one.
        deterministic: False if a clock ended the search.
        elapsed_s: seconds that the solver took.
        recompute_cost: what the decision costs, where that was asked.
        recompute_bound: what no decision within the capacity can cost less than, as far as the
            solver has proven.
        region_budget: the share that the code set for its region, where that held.
        least_because: why nothing less can be saved, where a share of less was raised to that.
    """

    capacity: int | None = None
    full_bytes: int | None = None
    least_bytes: int | None = None
    solver: str = "min-cut"
    items: int = 0
    deterministic: bool = True
    elapsed_s: float = 0.0
    recompute_cost: int | None = None
    recompute_bound: int = 0
    region_budget: float | None = None
    least_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """A joint graph on its way to a plan.

    What is derived from it is asked for by `get` and computed where it is not known yet. Who
    changes a graph does so inside `edit`, which drops what no longer holds; a state over another
    graph knows nothing to begin with.

    Attributes:
        joint: the joint graph.
        cut: the options of the cut that the pipeline uses.
        decision: what is kept, once a pass has decided.
        choice: how the decision came about.
        forward: forward module, after partitioning.
        backward: backward module, after partitioning.
        count_outputs: whether forward's outputs count as saved bytes.
        hooks: what saved tensors are to pass through once the graph is split.
        refillable: names of the inputs that eager autograd lets the user refill before backward.
        reread_inputs: whether backward may read those nevertheless.
        operators: digest of the operators of the graph as it was captured; empty where not known.
        heeds_regions: whether a budget that the code sets for its region holds.
    """

    joint: JointGraph
    cut: MinCut | None = None
    decision: Decision | None = None
    choice: Choice | None = None
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    count_outputs: bool = False
    hooks: SavedTensorHooks | None = None
    refillable: frozenset[str] = frozenset()
    reread_inputs: bool = True
    operators: str = ""
    heeds_regions: bool = True
    _of_joint: Known = field(default=Known(()), repr=False)
    _of_halves: Known = field(default=Known(()), repr=False)

    def __post_init__(self) -> None:
        for name, owner in (
            ("_of_joint", (self.joint, self.count_outputs, self.reread_inputs)),
            ("_of_halves", (self.joint, self.forward, self.backward)),
        ):
            if getattr(self, name).owner != owner:
                object.__setattr__(self, name, Known(owner))

    def get(self, analysis: Analysis[T]) -> T:
        """The result of an analysis, never a stale one.

        Raises:
            ProblemError: it was asked for inside `edit`.
        """
        known = self._of_halves if analysis.of_halves else self._of_joint
        return known.get(analysis, self)

    @contextmanager
    def edit(self, *, preserves: Sequence[type[Analysis[Any]]] = ()) -> Iterator[Edit]:
        """Changes the joint graph in place or, after partitioning, the two halves.

        What is known about the graphs is dropped at the end, unless nothing was changed after all
        (``edit.modified = False``) or the pass preserves it.

        Args:
            preserves: analyses that the change does not touch. One that was computed from an
                analysis that is dropped goes with it.
        """
        known = self._of_joint if self.forward is None else self._of_halves
        known.begin_edit()
        edit = Edit(state=self)
        try:
            yield edit
        finally:
            known.end_edit(modified=edit.modified, preserves=preserves)

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the analyses that are known now."""
        return (*self._of_joint.names(), *self._of_halves.names())

    @property
    def knowledge(self) -> tuple[Known, Known]:
        """What is known about the joint graph, and about the two halves; for instruments."""
        return self._of_joint, self._of_halves

    @property
    def index(self) -> GraphIndex:
        """Positions of the nodes of the joint graph."""
        from remat.passes.analyses import Positions

        return self.get(Positions())

    @property
    def roles(self) -> Roles:
        """Which half each node belongs to."""
        from remat.passes.analyses import Classification

        return self.get(Classification())

    @property
    def storages(self) -> Storages:
        """Which values share memory."""
        from remat.passes.analyses import Memory

        return self.get(Memory())

    def lowered(self, cost: CostModel | None = None) -> Lowered:
        """The graph problem under a cost model; every node costs 1 where it does not matter."""
        from remat.passes.analyses import GraphProblemOf

        return self.get(GraphProblemOf(cost))


@dataclass(slots=True, eq=False)
class Edit:
    """A change of a state's graphs that is under way; see `State.edit`.

    Attributes:
        state: the state whose graphs change.
        modified: whether anything changed; set it to False where nothing did.
    """

    state: State
    modified: bool = True

    def result(self, detail: str = "", **statistics: int) -> PassResult:
        """What the pass returns once the edit has ended.

        A changed joint graph has no decision any more: that was about the graph as it was.
        """
        state = self.state
        if self.modified and state.forward is None:
            state = replace(state, decision=None, choice=None)
        return PassResult(state=state, modified=self.modified, detail=detail, statistics=statistics)


def halves_of(state: State, who: str) -> tuple[fx.GraphModule, fx.GraphModule]:
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
    """What a pass, or a whole pipeline, returns.

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


class Pass(ABC):
    """Base of passes: subclass it as a frozen dataclass and implement `run`.

    Attributes:
        name: kebab-case name in pipelines.
        stage: where in a pipeline it may stand.
        not_after: names of passes that it must not follow, each with the reason.
        optional: whether a pipeline is right without it; bisection never leaves out one that is not.
        keeps_numbers: whether the step computes the same, bit for bit, before and after it.
        summary: one line for ``remat passes``.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.ANY
    not_after: ClassVar[Mapping[str, str]] = {}
    optional: ClassVar[bool] = True
    keeps_numbers: ClassVar[bool] = True
    summary: ClassVar[str] = ""

    @abstractmethod
    def run(self, state: State) -> PassResult:
        """Runs the pass. It may change the graphs of ``state`` in place, inside ``state.edit()``."""

    def __str__(self) -> str:
        from remat.passes.pipeline_text import write_call

        return write_call(self)
