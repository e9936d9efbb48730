"""The trade-off of one module as a picture: greedy, the lines above it, and the exact frontier."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from remat.graph.budget import format_bytes
from remat.graph.drawing import write_picture
from remat.sac.estimate.optimum import exact_frontier
from remat.sac.estimate.stats import PS_PER_MS, SACStats, SACTradeOffStats, group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GREEDY, _LINES, _EXACT = "#2f5d9e", "#d06a1b", "#3b8057"

Point = tuple[float, float]


def draw_tradeoff(
    stats: SACStats, fitted: SACTradeOffStats, path: str | Path, *, title: str
) -> None:
    """Draws the trade-off of a module to a file, whole or not at all.

    Args:
        stats: the module's operators.
        fitted: its greedy curve with the lines above.
        path: ends with ``.svg`` or ``.png``.
        title: what the module is called.

    Raises:
        ProblemError: the path has another suffix.
        PlanError: Matplotlib is not installed, or the file cannot be written.
    """
    write_picture(path, lambda: tradeoff_figure(stats, fitted, title=title))


def tradeoff_figure(stats: SACStats, fitted: SACTradeOffStats, *, title: str) -> Figure:
    """The picture of `draw_tradeoff` as a figure of its own; nothing global is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0))
    axes = figure.add_axes((0.1, 0.13, 0.86, 0.74))
    # To free a little more, the next candidate has to be recomputed whole: curves are stairs.
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
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.text(0.1, 0.93, title, fontsize=11, fontweight="bold")
    return figure


def exact_points(stats: SACStats) -> list[Point]:
    """Every best choice as (fraction of memory discarded, fraction of runtime recomputed)."""
    grouping, frontier = group(stats), exact_frontier(stats)
    free_bytes = sum(item.nbytes for item in grouping.free)
    free_ps = sum(item.runtime_ps for item in grouping.free)
    views_ps = sum(round(stats.runtimes[i] * PS_PER_MS) for i in grouping.recomputed)
    views_bytes = sum(stats.memory[i] for i in grouping.recomputed)
    memory, runtime_ps = sum(stats.memory) or 1, sum(stats.runtimes) * PS_PER_MS or 1
    pairs = zip(frontier.weights.tolist(), frontier.values.tolist(), strict=True)
    return [
        ((views_bytes + free_bytes - w) / memory, (views_ps + free_ps - v) / runtime_ps)
        for w, v in pairs
    ][::-1]
