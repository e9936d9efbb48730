"""Plot of frontiers: one curve per solver, the knee of each curve, and the proven lower bound for all curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from remat.errors import ProblemError
from remat.report.pictures import INK, RED, Scale, figure_of, shortened
from remat.report.step_view import FrontierView, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Color and marker of each curve in turn. The markers of two curves also differ in size, in case the curves coincide.
_STYLES = (
    ("#2f5d9e", "o"),
    ("#d06a1b", "s"),
    ("#3b8057", "^"),
    ("#8c4799", "D"),
    ("#a98a00", "v"),
    ("#2797a8", "P"),
    ("#a3314a", "p"),
    ("#6b6b6b", "X"),
)
_LINES = ("-", "--", ":")
_AXIS = {"saved": "saved by forward for backward", "peak": "peak of the step"}
_SHADE = "#e3e5e8"
#: Largest number of curves whose legend entries have a second line for the knee, and whose legend has a full-size font.
_TWO_LINES, _FULL_SIZE = 7, 16


def frontier_figure(
    curves: Sequence[FrontierView],
    *,
    title: str,
    chosen: tuple[str, Point] | None = None,
) -> Figure:
    """Return a Matplotlib figure with the frontiers that several solvers find for one graph under one cost model.

    Args:
        curves: the frontiers, at least one, with the same bound and unit. The bound is drawn once.
        title: title of the plot.
        chosen: (name, point) of a plan to mark; None: no mark.

    Raises:
        ProblemError: the curves have different bounds or units.
    """
    _check(curves)
    points = [p for c in curves for p in c.points] + ([chosen[1]] if chosen else [])
    right = 1.04 * max(x for x, _ in (*points, curves[0].bound[-1]))
    top = 1.06 * max(y for _, y in (*points, curves[0].bound[0]))
    x, y = Scale.of(right, "B"), Scale.of(top, curves[0].unit)
    figure, axes = figure_of((10.5, 5.0), (0.075, 0.12, 0.6, 0.78), title)
    axes.set_xlim(0, right / x.size or 1)
    axes.set_ylim(0, top / y.size or 1)
    for number, curve in enumerate(curves):
        _curve(axes, curve, number, len(curves), x, y)
    _knee_legend(axes)
    if chosen:
        _chosen(axes, chosen, x, y)
    # The bound is drawn last, so that the legend ends with the bound.
    _bound(axes, curves[0].bound, x, y)
    axes.set_xlabel(f"{_AXIS[curves[0].by]}, {x.unit}")
    axes.set_ylabel(f"recomputed in backward, {y.unit}")
    # The legend stands beside the axes, where it hides no curve. If there are many curves, the
    # legend's font is smaller.
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.02, 1.02),
        frameon=False,
        fontsize=9 * min(1.0, _FULL_SIZE / len(curves)),
        labelspacing=0.8 if len(curves) <= _TWO_LINES else 0.3,
    )
    return figure


def _check(curves: Sequence[FrontierView]) -> None:
    """Raise a ProblemError unless all frontiers to draw have the same unit of cost and the same bound."""
    first = curves[0]
    for other in curves[1:]:
        if (other.unit, other.bound) != (first.unit, first.bound):
            raise ProblemError(
                f"the frontiers of '{first.label}' and '{other.label}' have different bounds; "
                "expected frontiers of one graph under one cost model"
            )


def _bound(axes: Axes, bound: Sequence[Point], x: Scale, y: Scale) -> None:
    """Shade the area that is proven to contain no plan: below the bound's line, and left of the line's first vertex."""
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    line = [(b / x.size, c / y.size) for b, c in bound]
    at = [0.0, line[0][0], *(p[0] for p in line), max(right, line[-1][0])]
    height = [top, top, *(p[1] for p in line), line[-1][1]]
    label = "proven: no plan is in here"
    axes.fill_between(at, height, color=_SHADE, linewidth=0, label=label, zorder=1)


def _curve(axes: Axes, curve: FrontierView, number: int, count: int, x: Scale, y: Scale) -> None:
    """Draw one frontier as a step function, and mark the frontier's knee."""
    # Between the bytes of two points, the best known plan is that of the point with fewer bytes.
    color, marker = _STYLES[number % len(_STYLES)]
    label = shortened(curve.label, 34)
    if count <= _TWO_LINES:
        label += f"\nknee at {x.text(curve.knee[0])}, {y.text(curve.knee[1])}"
    # Later curves have smaller markers, because they are drawn on top.
    size = 3.5 + 5 * (count - 1 - number) / max(4, count)
    at = [b / x.size for b, _ in curve.points]
    height = [c / y.size for _, c in curve.points]
    axes.step(
        [*at, axes.get_xlim()[1]],
        [*height, height[-1]],
        where="post",
        color=color,
        linewidth=1.1,
        linestyle=_LINES[number // len(_STYLES) % len(_LINES)],
        marker=marker,
        markersize=size,
        markerfacecolor="white",
        markevery=range(len(at)),
        label=label,
        zorder=3 + number / 100,
        clip_on=False,
    )
    axes.plot(
        [curve.knee[0] / x.size],
        [curve.knee[1] / y.size],
        marker=marker,
        markersize=size + 4,
        markeredgecolor=INK,
        markerfacecolor=color,
        linestyle="none",
        clip_on=False,
        zorder=4 + number / 100,
    )


def _knee_legend(axes: Axes) -> None:
    """Add a legend entry that explains that filled markers are knees."""
    style: dict[str, Any] = {"marker": "o", "linestyle": "none", "markersize": 7}
    label = "filled: the knee of a curve,\nbeyond it more memory buys little"
    axes.plot([], [], color="#8a8f96", markeredgecolor=INK, label=label, **style)


def _chosen(axes: Axes, chosen: tuple[str, Point], x: Scale, y: Scale) -> None:
    """Mark the chosen plan by a star, and add the plan's name, bytes and cost to the legend."""
    label, (nbytes, cost) = chosen
    axes.plot(
        [nbytes / x.size],
        [cost / y.size],
        marker="*",
        markersize=15,
        color=RED,
        markeredgecolor="white",
        linestyle="none",
        label=f"{shortened(label, 34)}\n{x.text(nbytes)}, {y.text(cost)}",
        zorder=6,
        clip_on=False,
    )
