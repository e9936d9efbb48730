"""Tables of an estimate for selective checkpointing, and a plot of a module's trade-off of memory and time."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from remat.report.pictures import figure_of
from remat.sac.estimation.stats import SACGreedyOrderMeta, SACStats, SACTradeOffStats, group
from remat.units import columns, format_bytes, some_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Largest number of operator names in a row of a table.
_NAMED = 4
#: Colours in the plot: greedy curve, and lines fitted above this curve.
_GREEDY, _LINES = "#2f5d9e", "#d06a1b"


def operator_lines(stats: SACStats) -> list[str]:
    """Return the lines of a table with one row for each operator of a module."""
    titles = "Op Idx", "Op Name", "Runtime (ms)", "Memory (B)"
    rows = [(*titles, "View-like", "Random", "Saved", "In-place with")]
    views, random_ops = set(stats.view_like_ops), set(stats.rand_ops)
    saved, first_ops = set(stats.saved_autograd_ops), dict(stats.inplace_ops)
    for i, name in enumerate(stats.func_names):
        figures = f"{stats.runtimes[i]:.6f}", str(stats.memory[i])
        view, random, kept = ("yes" if i in ops else "" for ops in (views, random_ops, saved))
        rows.append((str(i), name, *figures, view, random, kept, str(first_ops.get(i, ""))))
    return columns(rows, left=(1, 4, 5, 6, 7))


def greedy_order_lines(order: SACGreedyOrderMeta, stats: SACStats) -> list[str]:
    """Return the lines of a table of a module's operators in greedy order, with cumulative bytes and recompute time.

    In the table, operators that are always recomputed come first, and operators that are always stored come last.
    """
    grouping = group(stats)
    members = {item.ops[0]: item.ops for item in (*grouping.free, *grouping.stored)}
    entries: list[tuple[tuple[int, ...], str, str]]
    entries = [((i,), "", "recomputed") for i in sorted(order.recomputed_ops)]
    entries += [(members[c.op_idx], f"{c.msps:.2e}", "") for c in order.msps_meta]
    entries += [(members[head], "", "stored") for head in sorted(order.stored_ops)]
    memory, runtime = sum(stats.memory) or 1, sum(stats.runtimes) or 1
    titles = "Op Idx", "Op Names", "Discarded", "Discarded (B)"
    rows = [(*titles, "Recomputed", "Recomputed (ms)", "MSPS", "Always")]
    # Bytes and time in a row are cumulative, as if all operators up to this row were recomputed.
    freed, spent = 0, 0.0
    for ops, msps, always in entries:
        freed += sum(stats.memory[i] for i in ops)
        spent += sum(stats.runtimes[i] for i in ops)
        names = some_of(list(dict.fromkeys(stats.func_names[i] for i in ops)), _NAMED)
        discarded = f"{freed / memory:.4f}", str(freed)
        recomputed = f"{spent / runtime:.4f}", f"{spent:.6f}"
        rows.append((" ".join(map(str, ops)), names, *discarded, *recomputed, msps, always))
    return columns(rows, left=(1, 7))


def tradeoff_figure(fitted: SACTradeOffStats, title: str) -> Figure:
    """Return a plot of a module's trade-off: greedy curve, and lines fitted above the curve."""
    figure, axes = figure_of((8.0, 5.0), (0.1, 0.13, 0.86, 0.74), title)
    # The curve has stairs, because freeing one more byte means recomputing the whole next candidate.
    x, y = zip(*fitted.tradeoff_curve.items(), strict=True)
    axes.step(x, y, where="pre", color=_GREEDY, marker="o", markersize=3, label="greedy")
    lines = zip(pairwise(fitted.fit_breaks), fitted.slopes, fitted.intercepts, strict=True)
    for k, ((a, b), slope, intercept) in enumerate(lines):
        ends = [slope * a + intercept, slope * b + intercept]
        axes.plot([a, b], ends, color=_LINES, label=None if k else "upper envelope")
    axes.set_xlabel(f"memory discarded, share of {format_bytes(fitted.sac_memory)}")
    axes.set_ylabel(f"runtime recomputed, share of {fitted.sac_runtime:.4g} ms")
    axes.legend(frameon=False, loc="upper left")
    return figure
