"""What the commands print for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from remat.units import format_bytes, format_cost, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from remat.cli.listings import AnalysisLine, CostLine, PassLine, SolverLine
    from remat.planning.comparison import Comparison, ComparisonRow
    from remat.planning.frontier import Frontier, FrontierPoint
    from remat.planning.plan import Plan


#: What the star and the column "gap" of a comparison mean.
LEGEND = (
    "* least recompute cost of these solvers at the budget; of equal costs, the one that saves fewer bytes",
    "gap: at most this much of the cost is more than any plan needs; it stays open where nothing is proven",
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


def plan_table(plan: Plan, title: str) -> Table:
    """The figures of one plan."""
    from remat.report.explanation import counted

    share = f"{plan.saved_bytes / plan.full_bytes:.1%} of" if plan.full_bytes else "of"
    cost = format_cost(plan.recompute_cost, plan.unit)
    proven = format_cost(plan.recompute_bound, plan.unit)
    bound = [("bound", f"no plan within the budget needs less than {proven}")]
    bound = bound if plan.recompute_cost else []
    over = f" over {plan.items} items in {plan.solve_s:.3f} s" if plan.items else ""
    rows = [
        ("budget", _budget_told(plan)),
        (
            "saved",
            f"{format_bytes(plan.saved_bytes)}, {share} the {format_bytes(plan.full_bytes)} that "
            f"the runtime-optimal partition saves; {format_bytes(plan.least_bytes)} is the least",
        ),
        (
            "recomputed",
            f"{counted(len(plan.recomputed), 'node')}, {cost if plan.recompute_cost else 'at no cost'} "
            f"({plan.cost})",
        ),
        *bound,
        ("peak", f"{format_bytes(plan.peak_bytes)}, inputs and parameters included"),
        ("decided by", plan.solver + over + ("" if plan.deterministic else "; a clock ended it")),
    ]
    return rows_table(rows, title)


def _budget_told(plan: Plan) -> str:

    if raised := plan.raised_told:
        return raised
    label, allowed = plan.asked.label, format_bytes(plan.capacity)
    return label if label == allowed else f"{label} → {allowed}"


def comparison_table(comparison: Comparison, title: str) -> Table:
    """Solvers side by side under each budget; the best stand out and carry a star (see `LEGEND`)."""

    table = new_table(title)
    table.add_column("solver", overflow="fold")
    for name in ("saved", "recompute  ", "gap", "peak", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    budgets = [row.budget for row in comparison.rows]
    for i, row in enumerate(comparison.rows):
        if i == 0 or budgets[i - 1] != row.budget:
            table.add_row(f"budget {row.label}", style="italic")
        last = i + 1 < len(budgets) and budgets[i + 1] != row.budget
        table.add_row(
            f"  {row.solver}",
            *_cells(row),
            style="bold" if row.best else None,
            end_section=last,
        )
    return table


def comparison_notes(comparison: Comparison) -> list[str]:
    """What stands below the table: why a row is empty, and where a cut did better than the solver."""

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
    return [f"{', '.join(names)}: {text}" for text, names in notes.items()]


def frontier_table(found: Frontier, title: str, rows: int) -> Table:
    """The points of a frontier, thinned to a number of rows, its knee marked."""

    table = new_table(title)
    for name in ("share", "saved", "recompute", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for point in thinned(found, rows):
        is_knee = point == found.knee()
        share = point.saved_bytes / found.full_bytes if found.full_bytes else 1.0
        table.add_row(
            f"{share:.3f}",
            format_bytes(point.saved_bytes),
            format_cost(point.recompute_cost, found.unit),
            format_bytes(point.peak_bytes),
            "← knee" if is_knee else "",
            style="bold" if is_knee else None,
        )
    return table


def thinned(found: Frontier, rows: int) -> list[FrontierPoint]:
    """At most so many points, at least three: evenly over the frontier, its ends and its knee kept."""
    points, rows = found.points, max(3, rows)
    if len(points) <= rows:
        return list(points)
    last = len(points) - 1
    kept = {last * i // (rows - 2) for i in range(rows - 1)} | {points.index(found.knee())}
    return [points[i] for i in sorted(kept)]


def _cells(row: ComparisonRow) -> list[str]:

    if row.saved_bytes is None or row.recompute_cost is None:
        return ["–", "–  ", "–", "–", "–"]
    solve_s = row.solve_s or 0.0
    return [
        format_bytes(row.saved_bytes),
        format_cost(row.recompute_cost, row.unit or "") + (" *" if row.best else "  "),
        format_share(row.gap),
        format_bytes(row.peak_bytes or 0),
        f"{solve_s:.2f} s" if solve_s < 100 else f"{solve_s:.0f} s",
    ]


def solver_table(lines: Sequence[SolverLine]) -> Table:
    rows = [
        (
            line.name,
            "yes" if line.reason is None else f"no: {line.reason}",
            _yes(line.exact),
            _yes(line.deterministic),
            line.summary,
        )
        for line in lines
    ]
    styles = [None if line.reason is None else "dim" for line in lines]
    names = ("solver", "available", "exact", "deterministic", "what it does")
    return _listing(names, rows, styles)


def pass_table(lines: Sequence[PassLine]) -> Table:
    rows = [
        (line.name, line.stage, _shown(line.options), "\n".join(line.not_after), line.summary)
        for line in lines
    ]
    return _listing(("pass", "stage", "options", "not after", "what it does"), rows)


def analysis_table(lines: Sequence[AnalysisLine]) -> Table:
    rows = [(line.name, line.of, _shown(line.options), line.summary) for line in lines]
    return _listing(("analysis", "of", "options", "what it tells"), rows)


def cost_table(lines: Sequence[CostLine]) -> Table:
    rows = [
        (
            line.name,
            line.unit,
            line.summary,
            "\n".join(f"{line.name}:{name}  {label}" for name, label in line.devices.items()),
        )
        for line in lines
    ]
    return _listing(("cost model", "unit", "what it counts", "devices"), rows)


def _listing(
    names: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    styles: Sequence[str | None] | None = None,
) -> Table:
    """Columns that are never cut: the first one whole, the others folded where they must be."""
    table = new_table()
    table.add_column(names[0], no_wrap=True)
    for name in names[1:]:
        table.add_column(name, overflow="fold")
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        table.add_row(*row, style=style)
    return table


def _shown(options: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={default}" for name, default in options.items())


def _yes(value: bool) -> str:
    return "yes" if value else "no"
