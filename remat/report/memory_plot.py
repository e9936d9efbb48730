"""Plot of the bytes alive over one step, by kind of storage, with a list of the source lines that fill the peak."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.graph.memory.liveness import Lifetime, MemoryCurve, StorageKind, Timeline
from remat.report.explanation import grouped
from remat.report.pictures import (
    GREY,
    INK,
    RED,
    Scale,
    figure_of,
    shortened,
    write_picture,
)
from remat.report.step_view import StepView, short_module
from remat.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Layers of the stacked plot, from bottom to top: label, color, kinds of storages.
LAYERS: tuple[tuple[str, str, tuple[StorageKind, ...]], ...] = (
    ("parameters and inputs", "#b9bec6", (StorageKind.INPUT,)),
    ("saved for backward", "#2f5d9e", (StorageKind.SAVED,)),
    (
        "outputs and gradients",
        "#4f9a6b",
        (StorageKind.OUTPUT, StorageKind.TANGENT, StorageKind.GRADIENT),
    ),
    ("recomputed", "#e0913f", (StorageKind.RECOMPUTED,)),
    ("temporary", "#efd999", (StorageKind.TEMPORARY,)),
)
#: Largest number of columns of the plot. A program point of a step is a run of a node or, in compiled code, of a
#: kernel. If a step has more program points than columns, each column stands for several program points, and shows the
#: one with the most bytes.
_COLUMNS = 1200
#: Height of the plot as a multiple of the highest peak. The space above the peak is room for the peak's label.
_ROOM = 1.16
_LINES = 8


def fillings(step: Timeline) -> list[list[Lifetime]]:
    """Group the storages alive at a step's peak by the source line that made them, most bytes first."""
    return grouped(step.alive(step.peak_point), _line, _nbytes)


def _line(alive: Lifetime) -> str:
    """Return the source line that made a storage; for an input, or if the line is unknown, the kind of the storage."""
    is_input = alive.kind is StorageKind.INPUT
    return str(alive.kind) if is_input or not alive.source else alive.source


def _nbytes(alive: Lifetime) -> int:
    return alive.nbytes


def _module(paths: Sequence[str]) -> str:
    """Return a pattern such as ``"layers.*.mlp"`` for paths that differ in numbers only; otherwise empty text."""
    first = paths[0]
    if len(set(paths)) > 1:
        first = re.sub(r"\d+", "*", first)
        if any(re.sub(r"\d+", "*", path) != first for path in paths):
            return ""
    return short_module(first)


def plot_step(view: StepView, path: str | Path) -> None:
    """Plot the memory over one step, as `step_figure` draws it, to a file; errors as in `write_picture`."""
    write_picture(path, lambda: step_figure(view))


def step_figure(view: StepView) -> Figure:
    """Return a plot of the memory over a step as a Matplotlib figure.

    The memory without remat is a grey curve over the time of its own step, or a grey line if only its peak is known. A
    budget on the peak is a red line. If the times of operators are unknown (no clock), the horizontal axis counts
    operators.
    """
    step, without, clock = view.timeline, view.without, view.clock
    figure, axes = figure_of((11.5, 5.2), (0.075, 0.24, 0.53, 0.62), view.title)
    list_axes = figure.add_axes((0.63, 0.04, 0.36, 0.82))
    highest = max(step.peak_bytes, without.peak_bytes if without else view.without_peak_bytes)
    scale = Scale.of(highest, "B")
    at: Sequence[float] = range(len(step.program_points) + 1)
    at_without: Sequence[float] = range(len(without.nbytes) + 1 if without else 0)
    axes.set_xlabel("operators run")
    if clock is not None:
        time = Scale.of(clock.starts[-1], clock.unit)
        at, at_without = ([t / time.size for t in ts] for ts in (clock.starts, clock.without))
        axes.set_xlabel(clock.label(time.unit))
    _stack(axes, step, scale, highest, at)
    _without(axes, scale, without, view.without_peak_bytes, at_without)
    if view.peak_budget is not None and view.peak_budget <= _ROOM * highest:
        label = f"budget: {format_bytes(view.peak_budget)} alive at once"
        height = view.peak_budget / scale.size
        axes.axhline(height, color=RED, linewidth=1, linestyle="--", label=label)
    _mark_peak(axes, step, scale, at)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.01, -0.14),
        ncols=3,
        frameon=False,
        borderpad=0,
        handlelength=1.6,
        columnspacing=1.0,
    )
    _list(list_axes, step)
    return figure


def _stack(axes: Axes, step: Timeline, scale: Scale, highest: int, at: Sequence[float]) -> None:
    """Draw the bytes alive over the step, stacked by kind of storage, with forward and backward labelled."""
    program_points = highest_points(step.nbytes())
    # The last height is repeated, because a drawn step function needs a point at its end.
    rows = [
        [sums[i] / scale.size for i in (*program_points, program_points[-1])]
        for sums in (step.nbytes(*kinds) for *_, kinds in LAYERS)
    ]
    # The first column begins at 0, even if the highest program point of its range is a later one.
    axes.stackplot(
        [at[0], *(at[i] for i in program_points[1:]), at[-1]],
        rows,
        labels=[label for label, *_ in LAYERS],
        colors=[color for _, color, _ in LAYERS],
        linewidth=0,
        step="post",
    )
    axes.set_xlim(0, at[-1])
    axes.set_ylim(0, _ROOM * highest / scale.size or 1)
    axes.set_ylabel(f"bytes alive, {scale.unit}")
    middle = at[step.boundary]
    axes.axvline(middle, color=INK, linewidth=0.8)
    for text, side, gap in (("forward", "right", -5), ("backward", "left", 5)):
        axes.annotate(
            text,
            (middle, 1.03),
            xycoords=axes.get_xaxis_transform(),
            xytext=(gap, 0),
            textcoords="offset points",
            ha=side,
            va="bottom",
        )


def highest_points(sums: Sequence[int], columns: int = _COLUMNS) -> list[int]:
    """Return the program points to draw: all or, from each of ``columns`` equal ranges, the one with the most bytes."""
    n = len(sums)
    if n <= columns:
        return list(range(n))
    edges = [n * c // columns for c in range(columns + 1)]
    return [max(range(a, b), key=sums.__getitem__) for a, b in pairwise(edges)]


def _without(
    axes: Axes, scale: Scale, curve: MemoryCurve | None, peak_bytes: int, at: Sequence[float]
) -> None:
    """Draw the memory of the step without remat in grey: a curve or, if only the peak is known, a horizontal line."""
    label = f"without remat: peak {format_bytes(curve.peak_bytes if curve else peak_bytes)}"
    style: dict[str, Any] = {"color": GREY, "linewidth": 1.2, "label": label}
    if curve is None:
        if peak_bytes:
            axes.axhline(peak_bytes / scale.size, linestyle=":", **style)
        return
    program_points = highest_points(curve.nbytes)
    places = [at[i] for i in (*program_points, len(curve.nbytes))]
    heights = [curve.nbytes[i] / scale.size for i in (*program_points, program_points[-1])]
    axes.plot(places, heights, drawstyle="steps-post", **style)
    axes.set_xlim(0, max(axes.get_xlim()[1], places[-1]))


def _mark_peak(axes: Axes, step: Timeline, scale: Scale, at: Sequence[float]) -> None:
    """Mark the peak of a step, with the peak's bytes and the node that runs at the peak as label."""
    from matplotlib.patheffects import withStroke

    peak_bytes, program_point = step.peak_bytes, step.peak_point
    middle = (at[program_point] + at[program_point + 1]) / 2
    axes.plot([middle], [peak_bytes / scale.size], marker="v", color=RED, markersize=6)
    share = middle / axes.get_xlim()[1]
    side = "left" if share < 1 / 3 else "right" if share > 2 / 3 else "center"
    axes.text(
        middle,
        1.05 * peak_bytes / scale.size,
        shortened(f"peak {format_bytes(peak_bytes)} at {step.program_points[program_point]}", 48),
        ha=side,
        va="bottom",
        color=RED,
        # The text has an outline, because a box would hide the line that shows the memory without remat.
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )


def _list(axes: Axes, step: Timeline) -> None:
    """List the source lines whose storages fill the peak, most bytes first; a last entry sums all other lines."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    color_of = {kind: color for _, color, kinds in LAYERS for kind in kinds}
    entries, groups = [], fillings(step)
    for group in groups[:_LINES]:
        # One line may make storages of several kinds, such as saved ones and temporary ones.
        kind = grouped(group, lambda alive: alive.kind, _nbytes)[0][0].kind
        heading = f"{kind}, × {len(group)}" if len(group) > 1 else str(kind)
        texts = (_module([alive.module for alive in group]), _line(group[0]))
        source = " · ".join(text for text in texts if text and text != kind)
        entries.append((color_of[kind], sum(map(_nbytes, group)), heading, source))
    if rest := groups[_LINES:]:
        nbytes, count = sum(sum(map(_nbytes, group)) for group in rest), sum(map(len, rest))
        entries.append(("#ffffff", nbytes, f"{len(rest)} more lines, {count} storages", ""))
    axes.text(0.0, 0.985, "What fills the peak", fontweight="bold", va="top")
    high = step.peak_bytes or 1
    for row, (color, nbytes, heading, source) in enumerate(entries):
        y = 0.925 - row * 0.104
        axes.barh([y - 0.022], [0.035], height=0.04, color=color)
        axes.text(0.19, y, format_bytes(nbytes), ha="right", va="top")
        axes.text(0.22, y, f"{nbytes / high:.0%}", va="top", color="#555555")
        axes.text(0.31, y, heading, va="top")
        if source:
            axes.text(
                0.05, y - 0.046, shortened(source, 62), va="top", fontsize=7.5, color="#444444"
            )
