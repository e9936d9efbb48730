"""Record of one graph's plan: its decision, its figures and, unless read from a file, its graph modules.

Figures are the bytes and costs of a plan. The public fields of `PlanRecord` are the format of saved plans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import fx

from remat.errors import PlanError, ProblemError
from remat.files import Form, Record, check_figures
from remat.graph.costs.links import LINKS, Link
from remat.graph.memory.fused_liveness import FusedWalk
from remat.graph.memory.liveness import MemoryCurve, Timeline, own_outputs, timeline
from remat.graph.memory.storages import sizes_at
from remat.graph.problems.lowering import Decision, Offload
from remat.report.before_after import BeforeAfter
from remat.solvers.graph.problem import GraphProblem
from remat.units import Budget

#: Fields that hold numbers: bytes and counts, which are below 2**63 as in `GraphProblem`, then costs and seconds.
#: `check_figures` refuses a negative, huge or undefined number, as an edited file may have.
_BYTES = (
    "capacity", "full_bytes", "least_bytes", "saved_bytes", "peak_bytes", "items", "planned_saved_bytes",
    "planned_peak_bytes", "without_peak_bytes", "without_estimated_bytes", "peak_limit",
)  # fmt: skip
_COSTS = (
    "recompute_cost", "recompute_bound", "step_cost", "without_cost", "exposed_time", "solve_s",
)  # fmt: skip
#: Fields that a plan may compute when one of them is read first: see `PlanRecord._later`.
LATER = (
    "peak_bytes", "step_cost", "without_peak_bytes", "without_cost", "without_estimated_bytes", "_costs",
    "_without",
)  # fmt: skip
#: Fields that a plan lacks if it was read from a file or a cache. A plan from a cache builds its fields when needed.
_OF_MODULES = ("_modules", "_problem", "_costs")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class PlanRecord(Record):
    """Record of the plan of one graph of a training step: saved and recomputed values, bytes, costs and graph modules.

    "The step without remat" is the step under the default solver's plan for budget 1.

    Attributes:
        saved: names of the joint graph's nodes whose values forward hands to backward, inputs and outputs
            included.
        snapshots: inputs of which forward saves a copy, because forward mutates the input, or because the
            user may write to it before backward.
        recomputed: names of the nodes that run again after their first run, usually in backward. A node that runs
            three times is listed twice.
        saved_bytes: bytes of the distinct storages that forward hands to backward, beyond inputs and outputs.
        peak_bytes: most bytes alive at once over forward, then backward; inputs and parameters included.
        recompute_cost: summed cost of the runs that ``recomputed`` lists, in ``unit``.
        recompute_bound: proven lower bound, in ``unit``, on recompute cost plus exposed transfer time. Under a budget
            on saved bytes, no plan that saves at most ``capacity`` bytes costs less. Under a budget on the peak, no
            schedule within the peak costs less, if operators that only backward runs (such as those that depend on a
            tangent) run once.
        unit: unit of all costs.
        capacity: the most bytes that the budget allows to be saved. A budget on the peak does not limit these bytes;
            the attribute is then some number that is at least the planned saved bytes.
        full_bytes: bytes that the runtime-optimal partition saves. Budget 0.5 allows half of these bytes.
        least_bytes: the least bytes that any plan can save; 0 if unknown.
        budget: the requested budget.
        solver: the solver that decided. ``min-cut``, the name of a pass, if no solver ran, or if the pass's
            minimum cut costs less than the solver's decision.
        cost: the cost model.
        items: number of nodes among which the solver chose those to save; 0 if no solver ran.
        deterministic: False if a time limit ended the search, so that another run may give another plan.
        solve_s: seconds that the solver took. Under a budget on the peak: seconds of the search for the decision, which
            calls the solver.
        graph: name of the joint graph.
        fingerprint: digest of the joint graph that the plan is for.
        fallbacks: one text for each operator call that the cost model could not price by its own method. The text names
            the operator, and says how the call was priced instead.
        reread_inputs: whether backward may read inputs that eager autograd would not have saved. Parameters and buffers
            may be read in any case.
        reread: names of the inputs that backward does read although eager autograd would not have saved them.
            Autograd raises an error if the user writes to such an input before backward.
        reread_outputs: positions, among the values that the step returns, of the outputs whose memory backward reads.
            Autograd raises an error if the user writes to such an output before backward.
        copied_outputs: positions of the outputs that the step returns as copies, because backward reads them and no
            error would detect a write to them. Empty unless `remat.partitioner` is used without remat's backend.
        symbolic: whether sizes of the step are symbols. If so, the step may run at other sizes than the sizes for which
            the figures were computed.
        lower: the lowering that the joint graph was traced for: ``"inductor"`` or ``"eager"``.
        torch: the version of PyTorch that traced the joint graph.
        operators: digest of the joint graph's operators in their order.
        planned_saved_bytes: saved bytes before compilation. Set once Inductor has compiled the step, because
            ``saved_bytes`` and ``peak_bytes`` are then those of the compiled code; else 0.
        planned_peak_bytes: simulated peak before compilation. Set once Inductor has compiled the step, else 0.
        forward_order: nodes that forward runs, in this order; empty if the passes order the nodes. Only a budget on the
            peak can set an order. A node that is listed several times runs that often. In the module, the last
            run has the node's name, unless the node is an input of the module too; other runs are called
            ``NAME_again``. Views are not listed: they are computed where they are read.
        backward_order: nodes that backward runs, in the form of ``forward_order``.
        region_budget: the ratio of saved bytes that the user's code sets for this graph by
            ``region_activation_memory_budget``, as text; empty if the code sets none. This ratio replaces a requested
            ratio. A requested number of bytes applies in addition to this ratio.
        least_because: why no plan saves less than ``least_bytes``. Empty unless a ratio stands for fewer bytes than
            ``least_bytes``, so that ``capacity`` was raised to ``least_bytes``.
        step_cost: cost of running every operator of the step once, forward and backward, in ``unit``. The step
            under this plan costs ``recompute_cost`` plus ``exposed_time`` more. 0 if the cost model cannot price
            backward.
        without_peak_bytes: simulated peak of the step without remat, to be compared with the planned peak. 0 if a
            user's pipeline made the plan.
        without_cost: cost of the step without remat, in ``unit``, with what this step recomputes; meaningless if
            ``step_cost`` is 0.
        without_estimated_bytes: estimated peak of the step without remat once Inductor has compiled it; to be
            compared with the peak of a compiled step. 0 if unknown.
        offloads: the saved values that are offloaded. Each entry names the node after which the device's memory is
            freed, and the node before which the value is fetched.
        exposed_time: exposed transfer time, in ``unit``: the time for which operators wait for copies to and
            from the host.
        link: the link to the host, if values may be offloaded; else empty.
        peak_limit: the peak in bytes that a ratio of the peak, such as ``remat.Peak(0.5)``, stands for. 0 under
            any other budget.
        policies: the requested policies by module, as JSON. A policy says what to do with the values of a module:
            save, recompute or offload. Empty if none were requested.
        chunk: the pass that split the loss into chunks, such as ``chunk-loss(chunks=8)``; empty if the loss is
            whole.
        search: under a budget on the peak, the candidates that were found, and why one was chosen, as text.
        remat: the version of remat that computed the figures; empty in older files.
    """

    form: ClassVar[Form] = Form("plan", "remat_plan", 2)

    graph: str
    fingerprint: str
    lower: str
    torch: str
    operators: str
    budget: str
    solver: str
    cost: str
    unit: str
    capacity: int
    full_bytes: int
    least_bytes: int
    saved_bytes: int
    peak_bytes: int
    recompute_cost: int
    recompute_bound: int
    items: int
    deterministic: bool
    solve_s: float
    saved: tuple[str, ...]
    snapshots: tuple[str, ...]
    recomputed: tuple[str, ...]
    fallbacks: tuple[str, ...] = ()
    reread_inputs: bool = True
    reread: tuple[str, ...] = ()
    reread_outputs: tuple[int, ...] = ()
    copied_outputs: tuple[int, ...] = ()
    symbolic: bool = False
    region_budget: str = ""
    least_because: str = ""
    forward_order: tuple[str, ...] = ()
    backward_order: tuple[str, ...] = ()
    planned_saved_bytes: int = 0
    planned_peak_bytes: int = 0
    step_cost: int = 0
    without_peak_bytes: int = 0
    without_cost: int = 0
    without_estimated_bytes: int = 0
    offloads: tuple[Offload, ...] = ()
    exposed_time: int = 0
    link: str = ""
    peak_limit: int = 0
    policies: str = ""
    chunk: str = ""
    search: str = ""
    remat: str = ""
    # Fields with an underscore are not written to files.
    _requested: Budget | None = None
    _modules: tuple[fx.GraphModule, fx.GraphModule] | None = None
    _problem: GraphProblem | None = None
    _costs: Mapping[str, int] | None = None
    _again: Callable[[], PlanRecord] | None = None
    _timeline: Timeline | None = None
    _without: MemoryCurve | None = None
    _learns: bool = False
    _of_step: str = ""
    _sizes: Mapping[str, int] = field(default_factory=dict)
    #: Function that computes the fields that `LATER` lists; None once these fields are known.
    _later: Callable[[], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        for name in () if self._later is None else LATER:
            object.__delattr__(self, name)  # so that Python calls `__getattr__` for the field
        # Only a plan from a file can have false figures, or an invalid text. Such a plan has no `_requested`.
        if self._requested is not None:
            return
        check_figures(self, _BYTES, bits=63)
        check_figures(self, _COSTS)
        for budget in (self.budget, self.region_budget):
            if budget:
                Budget.parse(budget)
        if self.link:
            self._check_link()

    if not TYPE_CHECKING:  # type checkers would take any attribute for one of a plan

        def __getattr__(self, name: str) -> Any:
            """Compute the fields that `LATER` lists when one of these fields is read for the first time."""
            if name not in LATER or self._later is None:
                raise AttributeError(f"a plan has no attribute '{name}'", name=name, obj=self)
            with sizes_at(self._sizes):
                computed = {**self._later(), "_later": None}
            for field_name, value in computed.items():
                object.__setattr__(self, field_name, value)  # plans are frozen
            return computed[name]

    def _check_link(self) -> None:
        """Raise a ProblemError if the rate of the plan's link to the host cannot be parsed."""
        with contextlib.suppress(ProblemError):
            if self.link.strip().lower() != "measured":  # parsing this text would time a device
                Link.parse(self.link)
                return
        raise ProblemError(
            f"link is {self.link!r}, expected a rate such as '25 GB/s', one of {', '.join(LINKS)}, or "
            "'' without a link: plan again"
        )

    def as_compiled(self, timeline: Timeline, saved_bytes: int) -> Self:
        """Return a copy of the plan with the peak, saved bytes and timeline of the compiled step.

        The copy has the figures from before compilation in ``planned_peak_bytes`` and ``planned_saved_bytes``.
        """
        return replace(
            self,
            saved_bytes=saved_bytes,
            peak_bytes=timeline.peak_bytes,
            planned_saved_bytes=self.saved_bytes,
            planned_peak_bytes=self.peak_bytes,
            _timeline=timeline,
        )

    @property
    def planned_for(self) -> Mapping[str, int]:
        """Size of each symbol for which bytes and costs were computed; empty if computed for the traced sizes."""
        return self._sizes

    @property
    def of_step(self) -> str:
        """Sentence on the step's other graphs; empty if no other graphs are known, and for a plan from a file."""
        return self._of_step

    @property
    def learns_sizes(self) -> bool:
        """Whether some sizes of the step depend on data, so only a run shows them; False for a plan from a file."""
        return self._learns

    @property
    def estimated_peak_bytes(self) -> int:
        """Estimated peak in bytes of the step once Inductor has compiled it.

        Raises:
            PlanError: the plan has no modules, because it was read from a file or its compiled step was deleted.
        """
        forward, backward = self._pair()
        with sizes_at(self._sizes):
            return max(FusedWalk(forward, backward, own_outputs(forward)).alive())

    @property
    def timeline(self) -> Timeline:
        """Lifetimes of storages over the step: of compiled code if the step was compiled, else of single operators."""
        return self.simulated if self._timeline is None else self._timeline

    @property
    def is_compiled(self) -> bool:
        """Whether the plan's `timeline` was simulated from compiled code; False for a plan from a file."""
        return self._timeline is not None

    @property
    def curve_without(self) -> MemoryCurve | None:
        """Simulated memory over the step without remat; None if unknown, or if `timeline` is of compiled code."""
        return None if self.is_compiled else self._without

    @property
    def simulated(self) -> Timeline:
        """Lifetimes of storages over the step under this plan, simulated operator by operator, without fusion."""
        with sizes_at(self._sizes):
            return timeline(self.forward, self.backward, own_outputs(self.forward))

    @property
    def forward(self) -> fx.GraphModule:
        """The forward graph module of the plan, which returns the user's outputs, then the saved values."""
        return self._pair()[0]

    @property
    def backward(self) -> fx.GraphModule:
        """The backward module: it takes saved values and tangents, and returns a gradient or None for each input."""
        return self._pair()[1]

    @property
    def problem(self) -> GraphProblem:
        """The graph problem of the joint graph: which nodes to save, so that backward recomputes the others.

        Raises:
            PlanError: the plan was read from a file.
        """
        self._pair()
        assert self._problem is not None, "a plan with modules has its problem"
        return self._problem

    @property
    def node_costs(self) -> Mapping[str, int]:
        """The cost of one run of each node of the joint graph, as a dict from the node's name; empty if unknown."""
        return self._costs or {}

    @property
    def added_cost(self) -> int:
        """Cost of the plan beyond one run of each operator: recompute cost plus exposed transfer time."""
        return self.recompute_cost + self.exposed_time

    @property
    def gap(self) -> int:
        """Most cost that a better plan could avoid: the plan's added cost minus the proven bound on added cost."""
        return self.added_cost - self.recompute_bound

    @property
    def requested(self) -> Budget:
        """The budget that the user requested for the plan; for a plan from a file, parsed from the text in the file."""
        return self._requested or Budget.parse(self.budget)

    @property
    def figures(self) -> Self:
        """A copy of the plan with bytes and costs but without graph modules, as if it had been read from a file."""
        none: dict[str, Any] = dict.fromkeys((*_OF_MODULES, "_again", "_timeline", "_without"))
        return replace(self, **none)

    @property
    def known_figures(self) -> Self:
        """A copy of the plan without graph modules, like `figures`, but with 0 for numbers not computed yet."""
        unread: dict[str, Any] = dict.fromkeys(() if self._later is None else LATER, 0)
        return replace(self, _later=None, **unread).figures

    @property
    def decision(self) -> Decision:
        """The decision that the plan applies: saved values, node orders and offloads."""
        return Decision(
            saved=self.saved,
            snapshots=self.snapshots,
            forward_order=self.forward_order,
            backward_order=self.backward_order,
            offloads=self.offloads,
        )

    @property
    def values(self) -> tuple[object, ...]:
        """The values that the plan saves, recomputes and offloads, as one tuple, by which plans are compared."""
        return self.saved, self.recomputed, self.offloads

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the offloaded values, which are in the host's memory between forward and backward."""
        return tuple(value.name for value in self.offloads)

    @property
    def host_bytes(self) -> int:
        """Bytes of the offloaded values in the host's memory, where sizes of page-locked buffers are powers of two."""
        return sum(value.host_bytes for value in self.offloads)

    @property
    def before_after(self) -> BeforeAfter:
        """Comparison of the step under this plan with the step without remat; both peaks are simulated ones."""
        return BeforeAfter(
            peak_bytes=self.planned_peak_bytes or self.peak_bytes,
            without_peak_bytes=self.without_peak_bytes,
            step_cost=self.step_cost,
            recompute_cost=self.recompute_cost,
            exposed_time=self.exposed_time,
            without_cost=self.without_cost,
            unit=self.unit,
        )

    def _pair(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the plan's forward and backward module, built at the first call if the plan comes from a cache."""
        if self._modules is None and self._again is not None:
            rebuilt = self._again()
            for name in _OF_MODULES:
                object.__setattr__(self, name, getattr(rebuilt, name))  # plans are frozen
        if self._modules is None:
            raise PlanError(
                "this plan has no modules: it was read from a file, or its compiled step is deleted; build them from the "
                "graph with remat.plan(joint, plan=plan)"
            )
        return self._modules
