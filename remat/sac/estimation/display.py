"""Tables of an estimate for selective checkpointing, and a plot of a module's trade-off of memory and time."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

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


def print_operators(stats: SACStats, *, boxed: bool) -> None:
    """Print a table with one row for each operator of a module."""
    views, random_ops = set(stats.view_like_ops), set(stats.rand_ops)
    saved, first_ops = set(stats.saved_autograd_ops), dict(stats.inplace_ops)
    rows = [
        (
            *(str(i), name, f"{stats.runtimes[i]:.6f}", str(stats.memory[i])),
            *("yes" if i in among else "" for among in (views, random_ops, saved)),
            str(first_ops.get(i, "")),
        )
        for i, name in enumerate(stats.func_names)
    ]
    numbers, words = (
        ("Runtime (ms)", "Memory (B)"),
        ("View-like", "Random", "Saved", "In-place with"),
    )
    _print(("Op Name", *numbers, *words), numbers, rows, boxed=boxed)


def print_greedy_order(order: SACGreedyOrderMeta, stats: SACStats, *, boxed: bool) -> None:
    """Print a module's operators in greedy order for recomputation, with cumulative freed bytes and recompute time.

    In the table, operators that are always recomputed come first, and operators that are always stored come last.
    """
    grouping = group(stats)
    members = {item.ops[0]: item.ops for item in (*grouping.free, *grouping.stored)}
    entries: list[tuple[tuple[int, ...], str, str]]
    entries = [((i,), "", "recomputed") for i in sorted(order.recomputed_ops)]
    entries += [(members[c.op_idx], f"{c.msps:.2e}", "") for c in order.msps_meta]
    entries += [(members[head], "", "stored") for head in sorted(order.stored_ops)]
    memory, runtime = sum(stats.memory) or 1, sum(stats.runtimes) or 1
    # Bytes and time in a row are cumulative, as if all operators up to this row were recomputed.
    freed, spent, rows = 0, 0.0, []
    for ops, msps, always in entries:
        freed += sum(stats.memory[i] for i in ops)
        spent += sum(stats.runtimes[i] for i in ops)
        names = some_of(list(dict.fromkeys(stats.func_names[i] for i in ops)), _NAMED)
        discarded = f"{freed / memory:.4f}", str(freed)
        recomputed = f"{spent / runtime:.4f}", f"{spent:.6f}"
        rows.append((" ".join(map(str, ops)), names, *discarded, *recomputed, msps, always))
    numbers = ("Discarded", "Discarded (B)", "Recomputed", "Recomputed (ms)", "MSPS")
    _print(("Op Names", *numbers, "Always"), numbers, rows, boxed=boxed)


def _print(
    names: Sequence[str], numbers: Collection[str], rows: Iterable[Sequence[str]], *, boxed: bool
) -> None:
    """Print a table with the column "Op Idx" and the given columns, with numbers right-aligned."""
    table = Table(show_edge=True, pad_edge=False, collapse_padding=True, box=None)
    if sys.stdout.isatty():
        table.box = box.ROUNDED if boxed else box.SIMPLE_HEAD
    for k, name in enumerate(("Op Idx", *names)):
        justify: Any = "right" if k == 0 or name in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold" if k < 2 else "ellipsis")
    for row in rows:
        table.add_row(*row)
    show(table)


def tradeoff_figure(stats: SACStats, fitted: SACTradeOffStats, *, title: str) -> Figure:
    """Return a plot of a module's trade-off: greedy curve, lines fitted above the curve, and exact frontier."""
    figure, axes = figure_of((8.0, 5.0), (0.1, 0.13, 0.86, 0.74), title)
    # The curve has stairs, because freeing one more byte means recomputing the whole next candidate.
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
    """Return (fraction of memory discarded, fraction of runtime recomputed) along a module's exact frontier."""
    grouping, frontier = group(stats), exact_frontier(stats)
    most_bytes = sum(stats.memory) - sum(item.nbytes for item in grouping.stored)
    memory, runtime_ps = sum(stats.memory) or 1, sum(stats.runtimes) * PS_PER_MS or 1
    pairs = zip(frontier.weights.tolist(), frontier.values.tolist(), strict=True)
    return [
        ((most_bytes - w) / memory, (grouping.recompute_ps - v) / runtime_ps) for w, v in pairs
    ][::-1]
