"""The frontier of one joint graph: the best plans over all budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from remat.errors import PlanError, ProblemError
from remat.files import Form, write_record
from remat.graph import ops
from remat.planning.plan import Plan
from remat.planning.planner import Decided, Planner
from remat.units import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan of a frontier, by its figures.

    Attributes:
        saved_bytes: bytes that forward hands to backward, beyond inputs and outputs.
        recompute_cost: cost of what runs twice, in the frontier's unit.
        peak_bytes: simulated peak of the step.
    """

    saved_bytes: int
    recompute_cost: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frontier:
    """The best plans over all budgets: less cost only for more bytes.

    Attributes:
        graph: name of the joint graph.
        solver: who decided.
        cost: the cost model.
        unit: unit of all costs.
        points: fewest saved bytes first; cost falls from each to the next.
        bound: vertices (bytes, cost) of a line below which no plan lies, fewest bytes first.
        full_bytes: bytes that the runtime-optimal partition saves.
        least_bytes: the least bytes that any plan saves.
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
    _planner: Planner = field(repr=False)
    _decided: tuple[Decided, ...] = field(repr=False)

    @classmethod
    def of(cls, planner: Planner) -> Frontier:
        """The frontier of a prepared graph."""
        decided = planner.pareto()
        return cls(
            graph=planner.state.joint.name,
            solver=planner.request.solver.name,
            cost=str(planner.request.cost),
            unit=planner.request.cost.unit,
            points=tuple(
                FrontierPoint(
                    saved_bytes=d.saved_bytes, recompute_cost=d.cost, peak_bytes=planner.peak(d)
                )
                for d in decided
            ),
            bound=tuple((v.saved_bytes, v.cost) for v in planner.hull.vertices),
            full_bytes=planner.full_bytes,
            least_bytes=planner.least_bytes,
            _planner=planner,
            _decided=decided,
        )

    def knee(self, *, by: str = "origin") -> FrontierPoint:
        """The point where more memory starts to buy little.

        Bytes and cost are scaled to [0, 1] over the frontier.

        Args:
            by: ``"origin"``: nearest to no bytes and no cost; ``"chord"``: farthest below the line
                from the first to the last point.
        """
        if by not in ("origin", "chord"):
            raise ProblemError(f"by is {by!r}; expected 'origin' or 'chord'")
        first, last = self.points[0], self.points[-1]
        wide = last.saved_bytes - first.saved_bytes
        high = first.recompute_cost - last.recompute_cost
        if wide == 0 or high == 0:
            return last

        def distance(p: FrontierPoint) -> float:
            x = (p.saved_bytes - first.saved_bytes) / wide
            y = (p.recompute_cost - last.recompute_cost) / high
            return x * x + y * y if by == "origin" else x + y

        return min(self.points, key=distance)

    def plan(self, point: FrontierPoint) -> Plan:
        """The plan of a point.

        Raises:
            ProblemError: the point is not of this frontier.
            PlanError: other operators are declared pure than when the frontier was made.
        """
        if ops.declarations() != self._planner.declarations:
            raise PlanError(
                f"what is declared pure has changed since this frontier of '{self.graph}' was made, and "
                "with it what may run again: make the frontier anew"
            )
        if point not in self.points:
            raise ProblemError(
                f"{point!r} is not a point of this frontier of {len(self.points)} points: take one "
                "from frontier.points"
            )
        decided = self._decided[self.points.index(point)]
        return self._planner.finish(decided, Budget(nbytes=point.saved_bytes))

    def plot(
        self,
        path: str | Path,
        *,
        chosen: Plan | FrontierPoint | None = None,
        others: Sequence[Frontier] = (),
        title: str | None = None,
    ) -> None:
        """Draws the frontier over its bound, with its knee, as ``.svg`` or ``.png``.

        Args:
            path: where to; the suffix says which.
            chosen: a plan or a point to mark.
            others: frontiers of other solvers on the same graph, as further curves.
            title: what is drawn; the graph and the cost model where None.

        Raises:
            ProblemError: the path has another suffix, or ``others`` or ``chosen`` are of another
                graph or cost model.
            PlanError: Matplotlib is not installed, or the file cannot be written.
        """
        from remat.report.frontier_plot import Curve, draw_frontiers

        label = "chosen"
        if isinstance(chosen, Plan):
            label = f"plan at budget {chosen.asked.label}"
            if (chosen.fingerprint, chosen.cost) != (self._planner.fingerprint, self.cost):
                raise ProblemError(
                    f"{chosen!r} is of another graph or cost model ({chosen.cost}) than this "
                    f"frontier ({self.cost}) and cannot be marked on it; plan the frontier's graph"
                )
        curves = [
            Curve(
                label=f.solver,
                points=tuple((p.saved_bytes, p.recompute_cost) for p in f.points),
                bound=f.bound,
                knee=(f.knee().saved_bytes, f.knee().recompute_cost),
                unit=f.unit,
                full_bytes=f.full_bytes,
            )
            for f in (self, *others)
        ]
        mark = (label, (chosen.saved_bytes, chosen.recompute_cost)) if chosen else None
        heading = title or f"{self.graph}, cost model {self.cost}"
        draw_frontiers(curves, path, title=heading, chosen=mark)

    def to_json(self) -> str:
        """The frontier as JSON, without its plans."""
        return write_record(self)
