"""Plan of one joint graph: the plan's record, and methods that show the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat.planning.reading.node_rows import kept_storages, runs_of, uses
from remat.planning.reading.plan_text import rows_of, summary
from remat.planning.reading.view import explained, page_of, view_step
from remat.record import PlanRecord
from remat.report.by_module import Use
from remat.report.exports import export
from remat.report.memory_plot import plot_step
from remat.report.page import write_page
from remat.report.step_view import StepView


class Plan(PlanRecord):
    """The plan of one graph of a step: a `PlanRecord` with methods that show the plan as text, picture and page."""

    __slots__ = ()

    def __repr__(self) -> str:
        return summary(self)

    def explain(self) -> str:
        """Return the plan as text: bytes and costs, the saved activations, and the recomputed operators.

        A saved activation is shown with its bytes, its source line, and the cost of recomputing it alone. A recomputed
        operator is shown with its cost and the reason for the run: a tag, the bytes that it frees, or another
        recomputed operator that reads its result. Activations that repeat from layer to layer share one row.
        """
        return explained(self)

    def uses(self) -> list[Use]:
        """For each operator node of forward, return its recompute cost and the bytes of its saved results.

        Raises:
            PlanError: the plan was read from a file.
        """
        return uses(self, kept_storages(self), runs_of(self))

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The plan's bytes and costs as pairs (name, text), such as ``("recomputed", "3 nodes, at no cost")``."""
        return rows_of(self)

    @property
    def view(self) -> StepView:
        """The data of the step that `plot`, `explore` and `export` show.

        Raises:
            PlanError: the plan was read from a file.
        """
        return view_step(self)

    def plot(self, path: str | Path) -> None:
        """Draw the bytes alive over the step and the values alive at its peak, compared with the step without remat.

        A budget on the peak is drawn as a line. A budget on saved bytes is not drawn, because it bounds only a part of
        the memory shown. The memory without remat is a grey curve if this plan was just made. For any other plan, such
        as a plan of a compiled step, only the peak of the step without remat is drawn, as a line. In the picture, an
        operator is as wide as its cost; if costs are unknown, as for a compiled step, all are equally wide.

        Args:
            path: the file, which ends in ``.svg`` or ``.png``.

        Raises:
            PlanError: the plan was read from a file, or the picture cannot be written.
            ProblemError: the path has another suffix.
        """
        plot_step(self.view, path)

    def explore(self, path: str | Path, *, title: str = "") -> Mapping[str, Any]:
        """Write an HTML page that shows the plan's step; see `Frontier.explore` for a page with a slider.

        The page is a single file, which loads no other file and needs no server.

        Args:
            path: the file, which ends in ``.html``.
            title: title of the page; empty: the name of the graph.

        Returns:
            The data of the page, which the page also contains as JSON.

        Raises:
            PlanError: Bokeh is not installed, the plan was read from a file, or the page cannot be written.
        """
        return write_page(lambda: page_of([self], self, title=title), path)

    def export(self, path: str | Path) -> None:
        """Write the plan's step in the file format of another tool, which the suffix of the path selects.

        Args:
            path: the file: ``.pickle`` for PyTorch's memory viewer, ``.json`` for Chrome and Perfetto, ``.nodes.json``
                for Model Explorer, or ``.csv``.
        """
        export(self.view, path)
