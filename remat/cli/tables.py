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
    from collections.abc import Collection, Iterable, Sequence

    from remat.experiments.table import Comparison
    from remat.planning.frontier import Frontier
    from remat.planning.plan import Plan


#: Lines that explain the star and the columns "gap" and "step" in the table of `remat compare`.
LEGEND = (
    "* least recompute cost of these solvers at the budget; of equal costs, the one that saves fewer bytes",
    "gap: the cost above the proven lower bound, as a share of the cost; a dash: none is proven, or the budget is on the peak",
    "step: modelled, beside the step without remat, which is the plan of auto at budget 1",
)


def new_table(
    title: str = "",
    heads: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
    *,
    left: Collection[int] = (),
) -> Table:
    """Return a table in the style that all commands use.

    Args:
        title: title of the table; empty for none.
        heads: headings of the columns; if all are empty, the table has no header.
        rows: cells of each row.
        left: indices of columns with text, which is left-aligned and wraps. Other columns are right-aligned figures.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        show_header=any(heads),
    )
    for k, head in enumerate(heads):
        if k in left:
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def names_table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> Table:
    """Return a table whose cells are texts, with bold names in the first column."""
    table = new_table(title, heads, rows, left=range(len(heads)))
    table.columns[0].style = "bold"
    return table


def cost_text(resolved: str, requested: str) -> str:
    """Return the cost model's name and, if the user chose no cost model, the option that selects another device."""
    if requested != "auto":
        return resolved
    name, _, device = resolved.partition(":")
    other = "epyc" if device == "h100" else "h100"
    return f"{resolved}, the tensors' device (--cost {name}:{other} plans for another)"


def plan_table(plan: Plan, title: str, cost: str) -> Table:
    """Return a table with the figures of one plan; ``cost`` is the cost model that the user chose, or ``"auto"``."""
    rows = [
        ("budget", plan.requested.label),
        ("cost model", cost_text(plan.cost, cost)),
        *plan.rows,
    ]
    return names_table(("", ""), rows, title)


#: The table of `remat compare` has the column "step" only on terminals of at least this width in characters.
_WIDE = 90


def comparison_table(comparison: Comparison, title: str, *, width: int = 80) -> Table:
    """Return a table with a row for each solver at each budget; stars mark the best plans.

    On terminals below 90 characters in width, the table lacks the column "step".
    """
    names = ["saved", "recompute", "gap", "peak", *(["step"] if width >= _WIDE else []), "time"]
    # This heading gets two blanks, as wide as the " *" in the cells, so that the figures are aligned.
    heads = ["solver", *(f"{name}  " if name == "recompute" else name for name in names)]
    title = "\n".join(line for line in (title, comparison.without) if line)
    table = new_table(title, heads, left=[0])
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
    """Return the lines below the table of `remat compare`.

    The lines give the reasons for missing plans, and name the budgets at which a minimum cut costs less than the
    solver's plan. Further lines name the solvers that did less work than usual.
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


def frontier_table(frontier: Frontier, rows: int) -> Table:
    """Return a table of at most ``rows`` points of a frontier; an arrow marks the knee."""
    names = ["share", "saved", "recompute", "peak"]
    if frontier.by == "peak":
        names = names[:0:-1]
    table = new_table("", [*names, ""])
    knee = frontier.knee()
    for point in frontier.thinned(rows):
        share = point.saved_bytes / frontier.full_bytes if frontier.full_bytes else 1.0
        cells = {
            "share": f"{share:.3f}",
            "saved": format_bytes(point.saved_bytes),
            "recompute": format_cost(point.recompute_cost, frontier.unit),
            "peak": format_bytes(point.peak_bytes),
        }
        arrow, style = ("← knee", "bold") if point == knee else ("", None)
        table.add_row(*(cells[name] for name in names), arrow, style=style)
    return table
