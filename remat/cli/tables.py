"""Tables and text that the commands print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from remat.units import format_bytes, format_cost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from remat.planning.experiment_table import Comparison
    from remat.planning.frontier import Frontier
    from remat.planning.plan import Plan


#: What the star and the column "gap" of a comparison mean.
LEGEND = (
    "* least recompute cost of these solvers at the budget; of equal costs, the one that saves fewer bytes",
    "gap: at most this much of the cost is more than any plan needs; it stays open where nothing is proven",
    "step: modelled, beside the step without remat, which is the plan of auto at budget 1",
)


def console() -> Console:
    """Standard output; as wide as it takes where it is not a terminal, so that nothing is cut.

    Text is printed as it is: ``remat[hf]`` is no markup.
    """
    plain = {"markup": False, "emoji": False, "highlight": False}
    terminal = Console(**plain)  # type: ignore[arg-type]
    if terminal.is_terminal:
        return terminal
    return Console(width=1000, soft_wrap=True, **plain)  # type: ignore[arg-type]


def show(table: Table) -> None:
    """Prints a table without blanks at the ends of lines."""
    out = console()
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def new_table(title: str = "") -> Table:
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
    """Names and what is to say of each."""
    table = new_table(title)
    table.show_header = False
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def cost_text(resolved: str, asked: str) -> str:
    """The cost model of a result; if nobody named one, with the option that names another device."""
    if asked != "auto":
        return resolved
    name, _, device = resolved.partition(":")
    other = "epyc" if device == "h100" else "h100"
    return f"{resolved}, the tensors' device (--cost {name}:{other} plans for another)"


def plan_table(plan: Plan, title: str, cost: str) -> Table:
    """The figures of one plan; ``cost`` is the cost model that was asked for."""
    rows = [("budget", plan.asked.label), ("cost model", cost_text(plan.cost, cost)), *plan.rows]
    return rows_table(rows, title)


#: Columns of a terminal from which on a comparison also has the share by which the step costs more.
_WIDE = 90


def comparison_table(comparison: Comparison, title: str, *, width: int = 80) -> Table:
    """Solvers side by side under each budget; the best stand out and carry a star (see `LEGEND`).

    Args:
        comparison: the solvers.
        title: what stands above.
        width: columns of the terminal. Where they are few, the step beside that without remat is left out.
    """
    wide = width >= _WIDE

    table = new_table("\n".join(line for line in (title, comparison.without) if line))
    table.add_column("solver", overflow="fold")
    names = ["saved", "recompute", "gap", "peak", *(["step"] if wide else []), "time"]
    for name in names:
        shown = f"{name}  " if name == "recompute" else name  # room for the star
        table.add_column(shown, justify="right", no_wrap=True)
    budgets = [row.budget for row in comparison.rows]
    for i, row in enumerate(comparison.rows):
        if i == 0 or budgets[i - 1] != row.budget:
            table.add_row(f"budget {row.label}", style="italic")
        last = i + 1 < len(budgets) and budgets[i + 1] != row.budget
        cells = row.cells
        cells["recompute"] += " *" if row.best else "  "
        table.add_row(
            f"  {row.solver}",
            *(cells[name] for name in names),
            style="bold" if row.best else None,
            end_section=last,
        )
    return table


def comparison_notes(comparison: Comparison) -> list[str]:
    """Notes below the table: reasons for empty rows, rows in which the cut was cheaper, solvers with little work."""

    notes: dict[str, list[str]] = {}
    for row in comparison.rows:
        budget = row.label
        if row.reason is not None:
            text = f"no plan at {budget}: {' '.join(row.reason.split())}"
        elif row.decided_by != row.solver:
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


def frontier_table(found: Frontier, title: str, rows: int) -> Table:
    """The points of a frontier, thinned to a number of rows, its knee marked."""

    table = new_table(title)
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
