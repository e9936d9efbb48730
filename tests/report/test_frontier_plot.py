"""Pictures of frontiers: what they show, and labels that do not collide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from remat.errors import ProblemError
from remat.report.frontier_plot import frontier_figure
from remat.report.step_view import FrontierView, Point
from tests.report.test_memory_plot import collisions, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

LONG = "some_package.some_module:SomeSolverClassWithALongName"
GIB, MS = 2**30, 10**9


def curve(label: str = "mine", *, worse: float = 1.0, **fields: Any) -> FrontierView:
    """A frontier from 1 to 11 GiB; its cost is ``worse`` times the bound where it has points."""
    bound = tuple((GIB * i, MS * (11 - i) ** 2) for i in range(1, 12))
    points = tuple((b, int(c * worse)) for b, c in bound)
    given: dict[str, Any] = {
        "label": label,
        "by": "saved",
        "texts": ("",) * len(points),
        "points": points,
        "bound": bound,
        "knee": points[4],
        "unit": "ps",
    }
    return FrontierView(**given | fields)


def lines(figure: Figure) -> dict[str, Line2D]:
    """The curves by the first line of their labels."""
    return {
        str(line.get_label()).partition("\n")[0]: line
        for line in figure.axes[0].lines
        if not str(line.get_label()).startswith("_")
    }


# Up to 7 curves have two lines each in the legend, up to 16 have one, and more have a smaller font.
@pytest.mark.parametrize("count", [7, 8, 24])
def test_labels_do_not_collide(count: int) -> None:
    curves = [curve(f"{i}{LONG}") for i in range(count)]
    chosen = ("plan at budget peak 1023 GiB " + LONG, (5 * GIB, 10**10))
    assert collisions(frontier_figure(curves, title=LONG * 3, chosen=chosen)) == []


def scaled(scale: int, unit: str) -> FrontierView:
    points = tuple((scale * i, scale * (12 - i)) for i in range(1, 12))
    return curve(points=points, bound=points, knee=points[3], unit=unit)


def single(only: Point) -> FrontierView:
    return curve(points=(only,), bound=(only,), knee=only)


@pytest.mark.parametrize(
    "made",
    [
        curve(),
        *(scaled(10**k, unit) for k, unit in ((0, "op"), (8, "ps"), (13, "FLOP"))),
        *(single(point) for point in ((0, 0), (GIB, MS))),
    ],
)
def test_labels_of_one_curve_do_not_collide(made: FrontierView) -> None:
    assert collisions(frontier_figure([made], title="t")) == []


def test_the_axis_says_whose_bytes_they_are() -> None:
    saved = words(frontier_figure([curve()], title="t"))
    peak = words(frontier_figure([curve(by="peak")], title="t"))
    assert "saved by forward for backward, GiB" in saved
    assert "saved by forward for backward, GiB" not in peak
    assert "peak of the step, GiB" in peak


def test_curves_are_steps_through_their_points() -> None:
    """Between two points the cost is that of the one with fewer bytes."""
    made = curve()
    line = lines(frontier_figure([made], title="t"))["mine"]
    assert line.get_drawstyle() == "steps-post"
    drawn = list(zip(*line.get_data(), strict=True))
    assert drawn[:-1] == [(b / GIB, c / MS) for b, c in made.points]
    assert drawn[-1][1] == drawn[-2][1]


def test_what_no_plan_reaches_is_shaded_and_nothing_else() -> None:
    made = curve(worse=1.3)
    axes = frontier_figure([made], title="t").axes[0]
    (shade,) = (c for c in axes.collections if "proven" in str(c.get_label()))
    (path,) = shade.get_paths()
    for nbytes, cost in made.bound[1:-1]:
        assert path.contains_point((nbytes / GIB, 0.97 * cost / MS))
        assert not path.contains_point((nbytes / GIB, 1.03 * cost / MS))
    least, most = made.bound[0]
    assert path.contains_point((0.9 * least / GIB, most / MS)), "fewer bytes than the least"
    assert not path.contains_point((1.1 * least / GIB, most / MS))


def test_each_solver_has_a_curve_of_its_own_and_they_share_the_bound() -> None:
    curves = [curve(f"solver {i}", worse=1 + i) for i in range(24)]
    figure = frontier_figure(curves, title="t")
    drawn = lines(figure)
    looks = {
        (drawn[c.label].get_color(), drawn[c.label].get_marker(), drawn[c.label].get_linestyle())
        for c in curves
    }
    assert len(looks) == 24
    assert sum("proven" in t for t in words(figure)) == 1


def test_the_knee_and_the_chosen_plan_are_marked_and_named() -> None:
    made = curve()
    figure = frontier_figure([made], title="a title", chosen=("the plan", (3 * GIB, 70 * MS)))
    shown = words(figure)
    assert "a title" in shown
    assert "mine\nknee at 5 GiB, 36 ms" in shown
    assert "the plan\n3 GiB, 70 ms" in shown
    assert {"saved by forward for backward, GiB", "recomputed in backward, ms"} <= set(shown)
    single = [
        (line.get_xdata()[0], line.get_ydata()[0])
        for line in figure.axes[0].lines
        if len(line.get_xdata()) == 1
    ]
    assert single == [(5.0, 36.0), (3.0, 70.0)]


@pytest.mark.parametrize("fields", [{"unit": "op"}, {"bound": ((1, 2),)}])
def test_frontiers_of_different_graphs_are_not_drawn_together(fields: dict[str, Any]) -> None:
    with pytest.raises(ProblemError, match="'mine' and 'other' have different bounds"):
        frontier_figure([curve(), curve("other", **fields)], title="t")
