"""Tables of the estimator's results, and a plot of a module's trade-off between memory and time."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from remat.report.pictures import figure_of
from remat.report.tables import show
from remat.sac.estimation.stats import (
    PS_PER_MS,
    SACGreedyOrderMeta,
    SACStats,
    SACTradeOffStats,
    group,
)
from remat.sac.estimation.tradeoff import exact_frontier
from remat.units import format_bytes, some_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Largest number of operator names in a row of a table.
_NAMED = 4
#: Colours in the plot, in this order: greedy curve, lines fitted above this curve, exact frontier.
_GREEDY, _LINES, _EXACT = "#2f5d9e", "#d06a1b", "#3b8057"

Point = tuple[float, float]


def print_table(table: Table, *, ruled: bool = False) -> None:
    """Print a table.

    Args:
        table: the table.
        ruled: whether to draw a box around the table, instead of one line below its header. If
            standard output is no terminal, such as a file, the table has no lines in either case.
    """
    table.box = (box.ROUNDED if ruled else box.SIMPLE_HEAD) if sys.stdout.isatty() else None
    show(table)


def operators(stats: SACStats) -> Table:
    """Return a table of a module's operators, one per row."""
    table = _table()
    table.add_column("Op Name", overflow="fold")
    for name in ("Runtime (ms)", "Memory (B)"):
        table.add_column(name, justify="right")
    for name in ("View-like", "Random", "Saved", "In-place with"):
        table.add_column(name)
    views, drawn = set(stats.view_like_ops), set(stats.rand_ops)
    saved, first = set(stats.saved_autograd_ops), dict(stats.inplace_ops)
    for i, name in enumerate(stats.func_names):
        flags = (_yes(i in views), _yes(i in drawn), _yes(i in saved), str(first.get(i, "")))
        table.add_row(str(i), name, f"{stats.runtimes[i]:.6f}", str(stats.memory[i]), *flags)
    return table


def steps(order: SACGreedyOrderMeta, stats: SACStats) -> Table:
    """Return a table of a module's greedy order, with cumulative discarded bytes and recompute time.

    The first rows are the operators that are always recomputed. Then follow the candidates in
    greedy order, and last the operators that are always stored. Each row shows the bytes discarded
    and the milliseconds of recomputation if all operators up to this row were recomputed.
    """
    table = _table()
    table.add_column("Op Names", overflow="fold")
    for name in ("Discarded", "Discarded (B)", "Recomputed", "Recomputed (ms)", "MSPS"):
        table.add_column(name, justify="right")
    table.add_column("Always")
    grouping = group(stats)
    members = {item.ops[0]: item.ops for item in (*grouping.free, *grouping.stored)}
    memory, runtime = sum(stats.memory), sum(stats.runtimes)
    freed, spent = 0, 0.0

    def row(ops: tuple[int, ...], msps: str, always: str) -> None:
        nonlocal freed, spent
        freed += sum(stats.memory[i] for i in ops)
        spent += sum(stats.runtimes[i] for i in ops)
        names = list(dict.fromkeys(stats.func_names[i] for i in ops))
        table.add_row(
            " ".join(map(str, ops)),
            some_of(names, _NAMED),
            f"{freed / memory if memory else 0:.4f}",
            str(freed),
            f"{spent / runtime if runtime else 0:.4f}",
            f"{spent:.6f}",
            msps,
            always,
        )

    for i in sorted(order.recomputed_ops):
        row((i,), "", "recomputed")
    for candidate in order.msps_meta:
        row(members[candidate.op_idx], f"{candidate.msps:.2e}", "")
    for head in sorted(order.stored_ops):
        row(members[head], "", "stored")
    return table


def _table() -> Table:
    table = Table(show_edge=True, pad_edge=False, collapse_padding=True)
    table.add_column("Op Idx", justify="right", overflow="fold")
    return table


def _yes(value: bool) -> str:
    return "yes" if value else ""


def tradeoff_figure(stats: SACStats, fitted: SACTradeOffStats, *, title: str) -> Figure:
    """Return a plot of a module's greedy curve, the lines fitted above it, and the exact frontier.

    Args:
        stats: statistics of the module's operators.
        fitted: the module's greedy curve, and the lines fitted above this curve.
        title: title of the plot.
    """
    figure, axes = figure_of((8.0, 5.0), (0.1, 0.13, 0.86, 0.74), title)
    # Stairs, because freeing one more byte means recomputing the whole next candidate.
    x, y = zip(*fitted.tradeoff_curve.items(), strict=True)
    axes.step(x, y, where="pre", color=_GREEDY, marker="o", markersize=3, label="greedy")
    x, y = zip(*exact_points(stats), strict=True)
    axes.step(x, y, where="pre", color=_EXACT, linestyle="--", label="exact")
    lines = zip(pairwise(fitted.fit_breaks), fitted.slopes, fitted.intercepts, strict=True)
    for k, ((a, b), slope, intercept) in enumerate(lines):
        ends = [slope * a + intercept, slope * b + intercept]
        axes.plot([a, b], ends, color=_LINES, label=None if k else "upper envelope")
    axes.set_xlabel(f"memory discarded, share of {format_bytes(fitted.sac_memory)}")
    axes.set_ylabel(f"runtime recomputed, share of {fitted.sac_runtime:.4g} ms")
    axes.legend(frameon=False, loc="upper left")
    return figure


def exact_points(stats: SACStats) -> list[Point]:
    """Return the points of a module's exact Pareto frontier, fewest discarded bytes first.

    Returns:
        For each point, (fraction of memory discarded, fraction of runtime recomputed).
    """
    grouping, frontier = group(stats), exact_frontier(stats)
    most_bytes = sum(stats.memory) - sum(item.nbytes for item in grouping.stored)
    memory, runtime_ps = sum(stats.memory) or 1, sum(stats.runtimes) * PS_PER_MS or 1
    pairs = zip(frontier.weights.tolist(), frontier.values.tolist(), strict=True)
    return [
        ((most_bytes - w) / memory, (grouping.recompute_ps - v) / runtime_ps) for w, v in pairs
    ][::-1]
