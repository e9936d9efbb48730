"""Tables and notes that the commands print."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from remat.report.tables import console as console
from remat.report.tables import show as show
from remat.units import format_bytes, format_cost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from remat.experiments.table import Comparison
    from remat.planning.frontier import Frontier
    from remat.planning.plan import Plan


#: Lines that explain the star and the columns "gap" and "step" in the table of `remat compare`.
LEGEND = (
    "* least recompute cost of these solvers at the budget; of equal costs, the one that saves fewer bytes",
    "gap: the cost above the proven lower bound, as a share of the cost; a dash: none is proven, or the budget is on the peak",
    "step: modelled, beside the step without remat, which is the plan of auto at budget 1",
)


def new_table(title: str = "") -> Table:
    """Return an empty table in the style that all commands use."""
    return Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def rows_table(rows: Iterable[tuple[str, str]], title: str) -> Table:
    """Return a table without a header, with a column of names and a column of values."""
    table = new_table(title)
    table.show_header = False
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def cost_text(resolved: str, asked: str) -> str:
    """Return the name of the cost model that was used.

    If the user did not choose a cost model, the text ends with a hint: the option ``--cost`` for
    another device.

    Args:
        resolved: the cost model that was used.
        asked: the cost model that the user asked for; ``"auto"`` if none.
    """
    if asked != "auto":
        return resolved
    name, _, device = resolved.partition(":")
    other = "epyc" if device == "h100" else "h100"
    return f"{resolved}, the tensors' device (--cost {name}:{other} plans for another)"


def plan_table(plan: Plan, title: str, cost: str) -> Table:
    """Return a table with the figures of one plan.

    Args:
        plan: the plan.
        title: title of the table.
        cost: the cost model that the user asked for; ``"auto"`` if none.
    """
    rows = [("budget", plan.asked.label), ("cost model", cost_text(plan.cost, cost)), *plan.rows]
    return rows_table(rows, title)


#: The table of `remat compare` has the column "step" only on terminals of at least this width in characters.
_WIDE = 90


def comparison_table(comparison: Comparison, title: str, *, width: int = 80) -> Table:
    """Return a table with a row for each solver at each budget; stars mark the best plans.

    Args:
        comparison: the plans of all solvers at all budgets.
        title: title of the table.
        width: width of the terminal in characters. Below 90, the column "step" is left out.
    """
    wide = width >= _WIDE

    table = new_table("\n".join(line for line in (title, comparison.without) if line))
    table.add_column("solver", overflow="fold")
    names = ["saved", "recompute", "gap", "peak", *(["step"] if wide else []), "time"]
    for name in names:
        # The header gets two blanks, as wide as the " *" in the cells, so that the figures are aligned.
        shown = f"{name}  " if name == "recompute" else name
        table.add_column(shown, justify="right", no_wrap=True)
    for _, group in groupby(comparison.rows, key=lambda row: row.budget):
        rows = list(group)
        table.add_section()
        table.add_row(f"budget {rows[0].label}", style="italic")
        for row in rows:
            cells = row.cells
            cells["recompute"] += " *" if row.best else "  "
            figures = (cells[name] for name in names)
            table.add_row(f"  {row.solver}", *figures, style="bold" if row.best else None)
    return table


def comparison_notes(comparison: Comparison) -> list[str]:
    """Return the lines of text to print below the table of `remat compare`.

    The lines give the reasons for missing plans. They name the budgets at which a minimum cut costs
    less than the solver's plan, and the solvers that searched with less work than usual.
    """
    from remat.passes.decide.min_cut import MinCut

    notes: dict[str, list[str]] = {}
    for row in comparison.rows:
        budget = row.label
        if row.reason is not None:
            text = f"no plan at {budget}: {' '.join(row.reason.split())}"
        elif row.decided_by == MinCut.name:
            text = f"at {budget} the cut of the pass '{row.decided_by}' costs less than the solver's plan"
        else:
            continue
        notes.setdefault(text, []).append(row.solver)
    lines = [f"{', '.join(names)}: {text}" for text, names in notes.items()]
    if comparison.brief:
        lines.append(
            f"{', '.join(comparison.brief)}: searched with a twentieth of their work, so that the table comes soon; "
            "named with --solvers they do all of it"
        )
    return lines


def frontier_table(found: Frontier, rows: int) -> Table:
    """Return a table of the points of a frontier; an arrow marks the knee.

    Args:
        found: the frontier.
        rows: largest number of points to show.
    """
    table = new_table()
    columns = ("share", "saved", "recompute", "peak")
    for name in columns if found.by == "saved" else reversed(columns[1:]):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for point in found.thinned(rows):
        is_knee = point == found.knee()
        share = point.saved_bytes / found.full_bytes if found.full_bytes else 1.0
        cells = [
            f"{share:.3f}",
            format_bytes(point.saved_bytes),
            format_cost(point.recompute_cost, found.unit),
            format_bytes(point.peak_bytes),
        ]
        table.add_row(
            *(cells if found.by == "saved" else reversed(cells[1:])),
            "← knee" if is_knee else "",
            style="bold" if is_knee else None,
        )
    return table
