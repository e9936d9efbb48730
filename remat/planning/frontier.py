"""The frontier of one joint graph: its Pareto-optimal plans, by saved bytes and cost or by peak and cost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from remat.errors import PeakWarning, PlanError, ProblemError, warn
from remat.files import Form, save_record, write_record
from remat.graph import ops
from remat.planning.plan import Plan
from remat.planning.planner import Planner
from remat.planning.reading.plan_text import MOST_SHOWN
from remat.planning.reading.view import page_of
from remat.planning.search.all_peaks import frontier_by_peak
from remat.planning.search.candidates import Candidate
from remat.record import PlanRecord
from remat.report.page import write_page
from remat.report.page_data import Page
from remat.report.step_view import FrontierView
from remat.solvers.graph.pareto import knee
from remat.units import Budget, format_apart, format_bytes, format_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """Saved bytes, cost and peak of one plan on a frontier.

    Attributes:
        saved_bytes: bytes that forward hands to backward, beyond inputs and outputs.
        recompute_cost: recompute cost plus exposed transfer time, in the frontier's unit.
        peak_bytes: peak of the step: simulated or, on large graphs, computed from the plan's schedule.
    """

    saved_bytes: int
    recompute_cost: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Frontier:
    """Pareto-optimal plans of one joint graph over all budgets, by bytes and cost.

    Attributes:
        by: which bytes are compared with the cost: ``"saved"``: those that a plan saves, ``"peak"``: the peak of the
            step.
        graph: name of the joint graph.
        solver: name of the solver. In a frontier by peak, the solver ``auto`` decides only at budget 1 and around the
            least peak. All other points come from minimum cuts, and from searches that start at these cuts.
        cost: the cost model.
        unit: unit of all costs.
        points: the plans of the frontier as points with increasing bytes and decreasing cost.
        bound: vertices (bytes, cost) of a line below which no plan lies, fewest bytes first. The attribute ``by``
            decides whether bytes are saved bytes or peaks.
        full_bytes: bytes that the runtime-optimal partition saves. Budget 0.5 allows half of ``full_bytes``.
        least_bytes: the least bytes that any plan saves.
        link: the link over which values may be offloaded, as text; empty if none may.
    """

    form: ClassVar[Form] = Form("frontier", "remat_frontier", 1)

    graph: str
    solver: str
    cost: str
    unit: str
    full_bytes: int
    least_bytes: int
    points: tuple[FrontierPoint, ...]
    bound: tuple[tuple[int, int], ...]
    by: str = "saved"
    link: str = ""
    _planner: Planner = field(repr=False)
    _decided: tuple[Candidate, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        planner: Planner,
        by: str = "saved",
    ) -> Frontier:
        """Compute the frontier of a prepared graph.

        Args:
            planner: the planner of the graph.
            by: ``"saved"`` (or its alias ``"bytes"``) or ``"peak"``, as for the attribute ``by``.

        Raises:
            ProblemError: the request has the option ``offload``, and ``by`` is not ``"peak"``.
        """
        by = "saved" if by == "bytes" else by
        context, search = planner.context, planner.search
        if by != "peak":
            context.request.check("no offloading", "a frontier by what is saved")
        if by == "peak":
            candidates, bound = frontier_by_peak(search)
        else:
            decided = [*map(search.offloads.with_tagged, search.decisions.pareto())]
            candidates = [replace(d, peak_bytes=search.measures.simulated(d)) for d in decided]
            # The hull counts values that are tagged for offloading as saved bytes, but the points do not. Subtracting
            # the most bytes that a point offloads keeps the bound valid.
            offloaded_bytes = max(d.host_bytes for d in decided)
            bound = tuple((v.saved_bytes - offloaded_bytes, v.cost) for v in context.hull.vertices)
        return cls(
            graph=context.state.joint.name,
            solver=context.request.solver.name,
            cost=str(context.request.cost),
            unit=context.request.cost.unit,
            points=tuple(
                FrontierPoint(
                    saved_bytes=d.saved_bytes, recompute_cost=d.cost, peak_bytes=d.peak_bytes
                )
                for d in candidates
            ),
            bound=bound,
            by=by,
            link=context.link,
            full_bytes=context.full_bytes,
            least_bytes=context.least_bytes,
            _planner=planner,
            _decided=tuple(candidates),
        )

    @property
    def label(self) -> str:
        """Name of the frontier in plots and texts: the solver, and the link over which values may be offloaded."""
        return self.solver + (f", offload {self.link}" if self.link else "")

    def bytes_of(self, point: FrontierPoint | PlanRecord) -> int:
        """Return the position of a point or plan on the frontier's axis of bytes: the saved bytes or the peak."""
        return point.saved_bytes if self.by == "saved" else point.peak_bytes

    def knee(self, *, by: str = "origin") -> FrontierPoint:
        """Return the frontier's knee: the point beyond which more memory reduces the cost only a little.

        The knee is found after bytes and costs have been scaled to [0, 1] over the frontier.

        Args:
            by: the definition of the point. ``"origin"``: nearest to (least bytes, least cost). ``"chord"``: farthest
                below the line from the first to the last point.

        Raises:
            ProblemError: ``by`` has another value.
        """
        points = [(self.bytes_of(p), p.recompute_cost) for p in self.points]
        return self.points[knee(points, by)]

    def plan(self, point: FrontierPoint) -> Plan:
        """Build the plan for which a point of the frontier stands.

        The plan's budget is the point's saved bytes or, on a frontier by peak, the point's peak. On a frontier by peak,
        a `PeakWarning` is given if the plan's simulated peak is above the point's peak. On the frontier of a large
        graph, peaks are not simulated but computed from schedules.

        Raises:
            ProblemError: the point is not on this frontier.
            PlanError: the set of operators that are declared pure has changed since the frontier was computed.
        """
        if ops.declarations() != self._planner.context.declarations:
            raise PlanError(
                f"the operators that are declared pure have changed since this frontier of '{self.graph}' was made, "
                "and they decide which nodes may run again: compute the frontier again"
            )
        if point not in self.points:
            raise ProblemError(
                f"{point!r} is not a point of this frontier of {len(self.points)} points: take one "
                "from frontier.points"
            )
        decided = self._decided[self.points.index(point)]
        if self.by == "saved":
            return self._planner.finish(decided, Budget(nbytes=point.saved_bytes))
        plan = self._planner.finish(decided, Budget(peak_bytes=point.peak_bytes))
        if plan.peak_bytes > point.peak_bytes:
            shown, _ = format_apart(plan.peak_bytes, point.peak_bytes)
            warn(
                f"the plan of '{self.graph}' has a peak of {shown} ({plan.peak_bytes} "
                f"bytes), above the {point.peak_bytes} bytes of its point: that peak was one of a schedule, "
                f"not simulated. remat.plan(joint, remat.Peak({point.peak_bytes})) keeps to it",
                PeakWarning,
            )
        return plan

    def check_same(self, plan: Plan) -> None:
        """Raise a ProblemError if a plan has another graph or cost model than this frontier."""
        if (plan.fingerprint, plan.cost) != (self._planner.context.fingerprint, self.cost):
            raise ProblemError(
                f"{plan!r} is of another graph or cost model ({plan.cost}) than this "
                f"frontier ({self.cost}) and cannot be marked on it; plan the frontier's graph"
            )

    def plot(
        self,
        path: str | Path,
        *,
        chosen: Plan | FrontierPoint | None = None,
        others: Sequence[Frontier] = (),
        title: str | None = None,
    ) -> None:
        """Draw the frontier with its bound and its knee, as ``.svg`` or ``.png``.

        Args:
            path: the file; its suffix selects the format.
            chosen: a plan or a point to mark.
            others: frontiers of other solvers on the same graph, drawn as further curves.
            title: title of the picture; None: the graph and the cost model.

        Raises:
            ProblemError: the path has another suffix, ``others`` or ``chosen`` belong to another graph or cost
                model, or ``others`` have another ``by``.
            PlanError: Matplotlib is not installed, or the file cannot be written.
        """
        # Imported here, so that planning does not load the code for pictures.
        from remat.report.frontier_plot import frontier_figure
        from remat.report.pictures import write_picture

        label = "chosen"
        if isinstance(chosen, Plan):
            label = f"plan at budget {chosen.requested.label}"
            self.check_same(chosen)
        if strange := [f.by for f in others if f.by != self.by]:
            raise ProblemError(
                f"others has a frontier by {strange[0]}, this one is by {self.by}; expected frontiers that go "
                f"by the same: make them with by='{self.by}'"
            )

        # With offloading, there are more plans. So the bound of a frontier with offloading also holds for a frontier
        # without offloading.
        below = next((f for f in (self, *others) if f.link), self)
        alike = len({(f._planner.context.fingerprint, f.cost) for f in (self, *others)}) == 1
        curves = [replace(f.view, bound=below.bound if alike else f.bound) for f in (self, *others)]
        mark = (label, self._at(chosen)) if chosen else None
        heading = title or f"{self.graph}, cost model {self.cost}"
        write_picture(path, lambda: frontier_figure(curves, title=heading, chosen=mark))

    @property
    def view(self) -> FrontierView:
        """The data of the frontier that `plot` and `explore` show."""
        return FrontierView(
            label=self.label,
            by=self.by,
            unit=self.unit,
            points=tuple(map(self._at, self.points)),
            texts=tuple(
                f"{format_bytes(p.saved_bytes)} saved\n{format_cost(p.recompute_cost, self.unit)} recomputed\n"
                f"peak {format_bytes(p.peak_bytes)}"
                for p in self.points
            ),
            bound=self.bound,
            knee=self._at(self.knee()),
        )

    def _at(self, point: FrontierPoint | Plan) -> tuple[int, int]:
        return self.bytes_of(point), point.recompute_cost

    def explore(
        self,
        path: str | Path,
        plan: Plan,
        *,
        title: str = "",
        on_progress: Callable[[str], None] | None = None,
    ) -> Mapping[str, Any]:
        """Write an HTML page that explains a plan, with a slider over plans of the frontier.

        The page is a single file, which loads no other file and needs no server.

        Args:
            path: the file, which ends in ``.html``.
            plan: the plan that the page shows first, of the frontier's graph and cost model.
            title: title of the page; empty: the name of the graph.
            on_progress: called with a line of text before each plan for the slider is made; None: no calls.

        Returns:
            The data of the page, which the page also contains as JSON: the fields of the plan, the frontier, and the
            fields of each plan of the slider.

        Raises:
            PlanError: Bokeh is not installed, the plan was read from a file, or the page cannot be written.
            ProblemError: the plan has another graph or cost model than the frontier.
        """
        self.check_same(plan)
        return write_page(lambda: self._page(plan, title, on_progress), path)

    def _page(self, plan: Plan, title: str, on_progress: Callable[[str], None] | None) -> Page:
        """Return the HTML page that `explore` writes; the page's slider has one position for each decision."""
        # The slider and the text of a frontier have the same stops.
        points, knee, plans = self.thinned(MOST_SHOWN), plan, list[Plan]()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", PeakWarning
            )  # the page shows the peak of the plan itself
            for k, point in enumerate(points, 1):
                if on_progress is not None:
                    on_progress(f"plan {k} of {len(points)} along the frontier")
                candidate = self.plan(point)
                if candidate.values == plan.values:
                    candidate = plan
                else:
                    plans.append(candidate)
                if point == self.knee():
                    knee = candidate
        plans = sorted([*plans, plan], key=lambda p: (self.bytes_of(p), -p.added_cost))
        return page_of(
            plans,
            plan,
            title=title,
            bytes_of=self.bytes_of,
            knee=knee,
            curve=self.view,
            frontier=self.to_json(),
        )

    def to_json(self) -> str:
        """Return the attributes of the frontier, such as its points, as JSON text, without the plans."""
        return write_record(self)

    def save(self, path: str | Path) -> None:
        """Write the attributes of the frontier, such as its points, to a JSON file, atomically, without the plans.

        Raises:
            PlanError: the file cannot be written; an existing file stays unchanged.
        """
        save_record(self, path)

    def thinned(self, rows: int) -> list[FrontierPoint]:
        """Return at most ``rows`` evenly spaced points of the frontier, including both ends and the knee.

        Args:
            rows: number of points to return at most; less than 3 counts as 3.
        """
        # `rows - 1` evenly spaced points, both ends included, and the knee.
        points, rows = self.points, max(3, rows)
        if len(points) <= rows:
            return list(points)
        last = len(points) - 1
        positions = {last * i // (rows - 2) for i in range(rows - 1)} | {points.index(self.knee())}
        return [points[i] for i in sorted(positions)]

    def __repr__(self) -> str:
        knee, shown = self.knee(), self.thinned(MOST_SHOWN)
        lines = [
            f"<frontier of {self.graph} by {self.by}: {len(self.points)} points of {self.label}, cost model "
            f"{self.cost}"
        ]
        lines += [
            f"  {format_bytes(p.saved_bytes):>9} saved  {format_cost(p.recompute_cost, self.unit):>9} "
            f"recomputed  {format_bytes(p.peak_bytes):>9} peak{'  knee' if p == knee else ''}"
            for p in shown
        ]
        rest = len(self.points) - len(shown)
        return "\n".join([*lines, *([f"  and {rest} more between them"] if rest else [])]) + ">"
