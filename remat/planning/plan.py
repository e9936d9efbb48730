"""Plans: the decision for one joint graph, with its modules and figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from remat.errors import PlanError, ProblemError, RematError
from remat.files import Form, Record
from remat.graph.fused_liveness import predict_peak
from remat.graph.liveness import MemoryCurve, Timeline, own_outputs, timeline
from remat.graph.lowering import Decision, Offload
from remat.graph.source import source_line
from remat.graph.storages import sizes_at
from remat.graph.user_mutations import describe_input
from remat.planning.plan_text import offload_lines, rows_of
from remat.report.before_after import BeforeAfter
from remat.report.explanation import explain
from remat.report.explorer import explore
from remat.report.exports import export
from remat.report.step_view import StepView, view_step
from remat.solvers.graph_problem import GraphProblem
from remat.units import Budget, format_bytes, format_cost

if TYPE_CHECKING:
    from remat.planning.frontier import Frontier

#: Figures of a plan that are no less than 0, and less than what a float can hold.
_FIGURES = (
    "capacity", "full_bytes", "least_bytes", "saved_bytes", "peak_bytes", "recompute_cost", "recompute_bound",
    "planned_saved_bytes", "planned_peak_bytes", "step_cost", "without_peak_bytes", "without_recompute_cost",
    "without_expected_bytes", "exposed_time", "peak_limit",
)  # fmt: skip
_TOO_LARGE = 2**100
#: What a plan has beside its figures as long as its modules are there.
_OF_MODULES = ("_modules", "_problem", "_costs")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class Plan(Record):
    """One training step's saved, recomputed and offloaded values, with its modules and figures.

    Attributes:
        saved: names of the joint graph's nodes whose values forward hands to backward, inputs and
            outputs included.
        snapshots: inputs of which forward keeps a copy, because it mutates them, or because they may
            be refilled before backward.
        recomputed: names of the nodes that run again, in backward as a rule; one for each further run.
        saved_bytes: bytes of the distinct storages that forward hands to backward, beyond inputs
            and outputs.
        peak_bytes: most bytes alive at once over forward, then backward; inputs and parameters
            included.
        recompute_cost: summed cost of ``recomputed``, in ``unit``.
        recompute_bound: a proven lower bound on the cost of every plan that saves no more than
            ``capacity`` bytes, in ``unit``. Under a budget on the peak: of every schedule within it, in
            which backward's own operators run once; where values may be offloaded, exposed transfer time is
            part of the cost.
        unit: unit of both costs.
        capacity: the bytes that may be saved; under a budget on the peak, bytes that do not bind.
        full_bytes: bytes that the runtime-optimal partition saves: what a ratio is of.
        least_bytes: the least bytes that any plan saves.
        budget: the budget as it was asked for.
        solver: what decided: a solver, or ``min-cut``, the cut by rules, where no solver was asked or
            that costs less.
        cost: the cost model.
        items: nodes that the solver decided, 0 where none was asked.
        deterministic: False only if a clock, not counted work, ended the search.
        solve_s: seconds that the solver took.
        graph: name of the joint graph.
        fingerprint: digest of the joint graph that the plan is for.
        fallbacks: calls that the cost model could not price its own way, each with the reason.
        reread_inputs: whether backward may read inputs again that are no parameters or buffers.
        reread: names of the inputs that it does read again although eager autograd would not have
            saved them: who refills one between forward and backward is refused by autograd.
        reread_outputs: places, among the values that the step returns, of those whose memory backward reads:
            who writes to one before backward is refused.
        copied_outputs: places of those that are returned as copies, as nobody would have noticed a write to them:
            of a step that `remat.partitioner` has split by itself.
        symbolic: whether sizes of the step are symbols, so that it may run at other sizes than its figures are for.
        lower: the lowering that the joint graph was traced for; empty in files written before it
            was recorded.
        torch: the version of PyTorch that traced it; likewise.
        operators: digest of the operators of that graph, in their order; likewise.
        planned_saved_bytes: where ``saved_bytes`` and ``peak_bytes`` are those of the step as Inductor
            compiled it: what was planned instead; else 0.
        planned_peak_bytes: likewise, the simulated peak.
        forward_order: nodes that forward runs, in this order, where the plan says so: under a budget on
            the peak. A node that stands there several times runs as often. In the module its last run has
            its name, unless it is an input of the module too; all other runs are called ``NAME_again``.
            Views are made where they are read. Empty: as the passes arrange it.
        backward_order: likewise for backward.
        region_budget: the ratio that the code set by ``region_activation_memory_budget``, which held
            instead of a ratio and beside bytes; empty if it set none.
        least_because: why no plan saves less than ``least_bytes``, where a ratio of less was raised
            to that; else empty.
        step_cost: cost of running every operator of the step once, forward and backward, in ``unit``;
            the step under this plan costs that and ``recompute_cost``. 0 where it is not known: in
            files written before it was recorded, and where the cost model cannot price backward.
        without_peak_bytes: simulated peak of the step without remat, which is that of the same solver's
            plan at budget 1; to be compared with the peak that was planned. 0 where it is not known:
            in such files, and for pipelines.
        without_recompute_cost: what that plan recomputes, in ``unit``.
        without_expected_bytes: the peak that the step without remat is expected to have once Inductor has
            compiled it, to be compared with ``peak_bytes`` of a step as it was compiled; 0 where it is not known.
        offloads: the saved values that are offloaded, and when each is away.
        exposed_time: exposed transfer time, in ``unit``: runs wait so long for copies to and from the host.
        link: the link to the host, where values may be offloaded.
        peak_limit: the peak in bytes that a ratio of it came to, ``remat.Peak(0.5)``; 0 under any other budget,
            and in files written before it was recorded.
        remat: the version of remat that computed the figures from the graph alone; empty in files written before it
            was recorded, and where hooks, outputs that count as saved, or a pipeline had a part in them.
    """

    form: ClassVar[Form] = Form(
        "plan",
        "remat_plan",
        1,
        dropped=(
            (
                "ways",
                "is of an earlier version, which packed or offloaded values so; plan again with remat.plan",
            ),
        ),
        ignored=("tuned",),
    )

    graph: str
    fingerprint: str
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
    lower: str = ""
    torch: str = ""
    region_budget: str = ""
    least_because: str = ""
    operators: str = ""
    forward_order: tuple[str, ...] = ()
    backward_order: tuple[str, ...] = ()
    planned_saved_bytes: int = 0
    planned_peak_bytes: int = 0
    step_cost: int = 0
    without_peak_bytes: int = 0
    without_recompute_cost: int = 0
    without_expected_bytes: int = 0
    offloads: tuple[Offload, ...] = ()
    exposed_time: int = 0
    link: str = ""
    peak_limit: int = 0
    remat: str = ""
    _asked: Budget | None = None
    _modules: tuple[fx.GraphModule, fx.GraphModule] | None = None
    _problem: GraphProblem | None = None
    _costs: Mapping[str, int] | None = None
    _again: Callable[[], Plan] | None = None
    _timeline: Timeline | None = None
    _without: MemoryCurve | None = None
    _learns: bool = False
    _sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _FIGURES:
            value = getattr(self, name)
            if not 0 <= value < _TOO_LARGE:
                raise ProblemError(f"{name} is {value}, expected 0 or more, and less than 2**100")
        for budget in (self.budget, self.region_budget) if self._asked is None else ():
            if budget:
                Budget.parse(budget)

    def as_compiled(self, timeline: Timeline, saved_bytes: int) -> Plan:
        """Copy of the plan with the figures of the compiled step."""
        return replace(
            self,
            saved_bytes=saved_bytes,
            peak_bytes=timeline.peak.nbytes,
            planned_saved_bytes=self.saved_bytes,
            planned_peak_bytes=self.peak_bytes,
            _timeline=timeline,
        )

    @property
    def planned_for(self) -> Mapping[str, int]:
        """Numbers of symbols, by name, that its figures are for instead of the sizes that the step was traced with."""
        return self._sizes

    @property
    def learns_sizes(self) -> bool:
        """Whether some sizes are data-dependent; False for a plan from a file."""
        return self._learns

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak that the step is expected to have once Inductor has compiled it.

        Raises:
            PlanError: the plan was read from a file.
        """
        forward, backward = self._pair()
        with sizes_at(self._sizes):
            return predict_peak(forward, backward, own_outputs(forward)).nbytes

    @property
    def timeline(self) -> Timeline:
        """Lifetimes of storages: of the compiled step if known, else simulated."""
        return self.simulated if self._timeline is None else self._timeline

    @property
    def simulated(self) -> Timeline:
        """Simulated lifetimes of storages."""
        with sizes_at(self._sizes):
            return timeline(self.forward, self.backward, own_outputs(self.forward))

    @property
    def forward(self) -> fx.GraphModule:
        """Forward: its own outputs, then what it saves."""
        return self._pair()[0]

    @property
    def backward(self) -> fx.GraphModule:
        """Backward: what was saved and the tangents in, one gradient or None per input out."""
        return self._pair()[1]

    @property
    def gap(self) -> int:
        """Upper bound on the distance from the optimal cost, in ``unit``."""
        return self.recompute_cost + self.exposed_time - self.recompute_bound

    @property
    def asked(self) -> Budget:
        """The budget; a plan from a file has its text only."""
        return self._asked or Budget.parse(self.budget)

    @property
    def figures(self) -> Plan:
        """The plan without its modules, as if it had been read from a file."""
        none: dict[str, Any] = dict.fromkeys((*_OF_MODULES, "_again", "_timeline", "_without"))
        return replace(self, **none)

    @property
    def decision(self) -> Decision:
        return Decision(
            saved=self.saved,
            snapshots=self.snapshots,
            forward_order=self.forward_order,
            backward_order=self.backward_order,
            offloads=self.offloads,
        )

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the saved values that are offloaded: in the host's memory between forward and backward."""
        return tuple(value.name for value in self.offloads)

    @property
    def host_bytes(self) -> int:
        """Bytes of the offloaded values."""
        return sum(value.nbytes for value in self.offloads)

    def __repr__(self) -> str:
        compiled = ""
        if self.planned_peak_bytes:
            compiled = f"{format_bytes(self.peak_bytes)} as compiled; simulated, "
        return (
            f"<plan for {self.graph}: {format_bytes(self.saved_bytes)} saved, "
            f"{format_cost(self.recompute_cost, self.unit)} recomputed, by {self.solver}; "
            f"peak {compiled}{self.before_after.line}>"
        )

    def _pair(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._complete()
        if self._modules is None:
            raise PlanError(
                "this plan has no modules: it was read from a file, or its compiled step is deleted; build them from the "
                "graph with remat.plan(joint, plan=plan)"
            )
        return self._modules

    def _complete(self) -> None:
        """Build the modules of a plan from a cache, on first access."""
        if self._modules is None and self._again is not None:
            made = self._again()
            for name in _OF_MODULES:
                object.__setattr__(self, name, getattr(made, name))

    def explain(self) -> str:
        """The plan as text: its figures, each kept activation, and what is recomputed and why.

        A kept activation is shown with its bytes, its source line, and what recomputing it alone
        would cost. What repeats from layer to layer is one row.
        """
        with contextlib.suppress(RematError):  # its figures are there even without its modules
            self._complete()
        lines = [
            f"plan for {self.graph}, budget {self.asked.label}, cost model {self.cost}",
            *(f"  {name:<13} {text}" for name, text in self.rows),
        ]
        if self.fallbacks:
            lines += ["  not priced by the cost model itself:"]
            lines += [f"    {text}" for text in self.fallbacks]
        if self.reread:
            lines += [
                "  reads inputs again in backward that eager autograd would not have saved: who refills",
                "  one between forward and backward gets an error; reread_inputs=False leaves them alone",
            ]
            lines += [f"    {self._describe_input(name)}" for name in self.reread]
        if self.reread_outputs:
            places = ", ".join(map(str, self.reread_outputs))
            lines += [
                f"  reads outputs in backward (at {places}): who writes to one before gets an error"
            ]
        if self.copied_outputs:
            places = ", ".join(map(str, self.copied_outputs))
            lines += [f"  returns copies of outputs (at {places}), whose numbers backward reads"]
        show_cost = partial(format_cost, unit=self.unit)
        nodes = () if self._modules is None or not self.offloads else self._modules[0].graph.nodes
        lines += offload_lines(self, {n.name: source_line(n) for n in nodes})
        if self._modules is not None and self._problem is not None:
            lines += explain(
                self.forward, self.backward, self._problem, self.recomputed, show_cost, self.link
            )
        return "\n".join(lines)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Its figures as rows of name and text."""
        return rows_of(self)

    @property
    def before_after(self) -> BeforeAfter:
        """The step without remat and under this plan, both as planned."""
        return BeforeAfter(
            peak_bytes=self.planned_peak_bytes or self.peak_bytes,
            without_peak_bytes=self.without_peak_bytes,
            step_cost=self.step_cost,
            recompute_cost=self.recompute_cost,
            exposed_time=self.exposed_time,
            without_recompute_cost=self.without_recompute_cost,
            unit=self.unit,
        )

    def _describe_input(self, name: str) -> str:
        return name if self._modules is None else describe_input(self._modules[0].graph, name)

    def plot(self, path: str | Path, *, x: str = "time") -> None:
        """Draws memory over the step, beside that without remat, and what fills its peak.

        As ``.svg`` or ``.png``. A budget on the peak is a line; one on saved bytes is not, since it bounds
        less than what is drawn. The step without remat is drawn in grey: as a curve where the plan was
        just made, else as a line at its peak, as beside a compiled step.

        Args:
            path: where to.
            x: ``"time"``: an operator is as wide as its cost, where costs are known; of a compiled step they are
                not. ``"operators"``: all are equally wide.

        Raises:
            PlanError: the plan was read from a file, or the picture cannot be written.
            ProblemError: the path has another suffix, or ``x`` is neither of these.
        """
        from remat.report.memory_plot import draw_step

        if x not in ("time", "operators"):
            raise ProblemError(f"x is {x!r}; expected 'time' or 'operators'")
        asked, view = self.asked, self.view
        expected = self.without_expected_bytes if view.as_compiled else 0
        shown = f"{format_bytes(asked.peak_bytes)} of peak" if asked.peak_bytes else self.budget
        draw_step(
            view.timeline,
            path,
            title=f"{self.graph}, budget {shown}",
            peak_budget=asked.peak_bytes,
            without=view.without,
            without_peak_bytes=expected or self.without_peak_bytes,
            clock=view.clock if x == "time" else None,
        )

    @property
    def view(self) -> StepView:
        """The step as pages and exports show it; a plan that was read from a file has none."""
        self._pair()
        compiled = self._timeline is not None
        without = (
            None if compiled else self._without
        )  # as simulated, which is not beside as compiled
        return view_step(self, self._problem, self._costs, without, as_compiled=compiled)

    def explore(self, path: str | Path, *, frontier: Frontier | None = None) -> None:
        """Writes a page that shows the step, with a slider over a frontier: `remat.report.explorer.explore`."""
        explore(self, path, frontier=frontier)

    def export(self, path: str | Path, *, format: str | None = None) -> None:  # noqa: A002
        """Writes the step for another tool: `remat.report.exports.export`."""
        export(self.view, path, format)
