"""What a pass is, and the state that passes hand on to one another.

A pass is a frozen dataclass: its fields are its options, so printing, parsing and help come free.
It is given a `State` and returns a `PassResult`; it never keeps anything of a run on itself.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import fx

from remat.graph.costs import CostModel, node_costs
from remat.graph.index import GraphIndex, index_graph
from remat.graph.joint import JointGraph
from remat.graph.lowering import Decision, Lowered, lower
from remat.graph.roles import Roles, classify
from remat.graph.storages import Storages, find_storages

if TYPE_CHECKING:
    from remat.passes.min_cut import MinCut

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
        solver: the solver that was asked, or the cut that sufficed.
        items: items of the knapsack, or nodes of the graph problem; 0 where a cut sufficed.
        deterministic: False if a clock ended the search.
        elapsed_s: seconds that the solver took.
        recompute_cost: what the decision costs, where that was asked.
        recompute_bound: what no decision within the capacity can cost less than, as far as the
            solver has proven.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """A joint graph on its way to a plan.

    Analyses (`index`, `roles`, `storages`, `lowered`) are computed on demand and kept until a pass
    changes the joint graph: whoever changes it hands on `changed()`, which has forgotten them.

    Attributes:
        joint: the joint graph.
        cut: the options of the cut that the pipeline uses.
        decision: what is kept, once a pass has decided.
        choice: how the decision came about.
        forward: forward module, after partitioning.
        backward: backward module, after partitioning.
        count_outputs: whether forward's outputs count as saved bytes.
    """

    joint: JointGraph
    cut: MinCut | None = None
    decision: Decision | None = None
    choice: Choice | None = None
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    count_outputs: bool = False
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def changed(self, **changes: Any) -> State:
        """A state over a changed joint graph: nothing that was derived from the old one is kept."""
        return replace(self, _known={}, decision=None, choice=None, **changes)

    def known(self, key: Any, compute: Callable[[], T]) -> T:
        """The analysis ``key``, computed where it is not known yet."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]  # type: ignore[no-any-return]

    @property
    def index(self) -> GraphIndex:
        return self.known("index", lambda: index_graph(self.joint.graph))

    @property
    def roles(self) -> Roles:
        return self.known("roles", lambda: classify(self.joint, self.index))

    @property
    def storages(self) -> Storages:
        return self.known(
            "storages",
            lambda: find_storages(
                self.joint, self.index, self.roles, count_outputs=self.count_outputs
            ),
        )

    def lowered(self, cost: CostModel | None = None) -> Lowered:
        """The graph problem under a cost model; every node costs 1 where it does not matter."""
        lowered = self.known(
            "lowered",
            lambda: lower(self.index, self.roles, self.storages, [1] * len(self.index), "op"),
        )
        if cost is None:
            return lowered
        return self.known(
            ("lowered", cost),
            lambda: lowered.priced(node_costs(self.index, self.storages, cost), cost.unit),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassResult:
    """What a pass, or a whole pipeline, returns.

    Attributes:
        state: the state after it.
        modified: whether anything changed.
        detail: one line on what was done, for logs and tables.
    """

    state: State
    modified: bool
    detail: str = ""

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
        summary: one line for ``remat passes``.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.ANY
    summary: ClassVar[str] = ""

    @abstractmethod
    def run(self, state: State) -> PassResult:
        """Runs the pass. It owns the graphs of ``state`` and may change them in place."""

    def __str__(self) -> str:
        options = [
            f"{f.name.replace('_', '-')}={_print_option(getattr(self, f.name))}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({','.join(options)})" if options else self.name


def _print_option(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    name = getattr(value, "name", None)
    return str(value) if isinstance(value, CostModel) or name is None else str(name)
