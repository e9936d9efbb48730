"""Pictures of a step: files, and labels that do not collide."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import remat
from remat.errors import PlanError, ProblemError
from remat.graph.memory.liveness import Lifetime, MemoryCurve, StorageKind, Timeline
from remat.report import memory_plot
from remat.report.memory_plot import LAYERS, fillings
from remat.report.pictures import GREY, write_picture
from remat.report.step_view import Clock, StepView
from remat.units import format_bytes

if TYPE_CHECKING:  # tests are collected without Matplotlib, which takes half a second
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

LONG = (
    "a_file_with_quite_a_long_name.py:12345 " + "result = combine(everything, with_everything) " * 4
)


def made_up(peak_at: int, boundary: int, program_points: int = 40, lines: int = 12) -> Timeline:
    """A step that peaks where it is told to, with many lines that are too long."""
    whole = {"node": "parameter", "nbytes": 10**9, "kind": StorageKind.INPUT, "source": ""}
    alive = [Lifetime(**whole, first=0, last=program_points - 1)]  # type: ignore[arg-type]
    kinds = ("SAVED", "TEMPORARY", "OUTPUT", "GRADIENT", "TANGENT")
    alive += [
        Lifetime(
            node=f"value_{i}",
            nbytes=10**8 - i,
            kind=StorageKind[kinds[i % len(kinds)]],
            source=f"{i}{LONG}",
            first=peak_at,
            last=peak_at,
        )
        for i in range(lines)
    ]
    names = tuple(
        f"a_node_with_a_name_that_goes_on_and_on_and_on_{i}" for i in range(program_points)
    )
    return Timeline(program_points=names, boundary=boundary, lifetimes=tuple(alive))


def step_figure(step: Timeline, **fields: Any) -> Figure:
    """The plot of a step that has nothing but its memory, and the given fields."""
    given = {"as_compiled": False, "values": (), "runs": (), "kept": (), "unit": "ps"} | fields
    return memory_plot.step_figure(StepView(graph="g", timeline=step, **given))  # type: ignore[arg-type]


def collisions(figure: Figure) -> list[str]:
    """Texts of a figure that overlap one another or stick out of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    beyond = _labels_not_drawn(figure)
    shown = [
        (t.get_text(), t.get_window_extent())
        for t in texts(figure)
        if t not in beyond and t.get_text().strip()
    ]
    assert len(shown) > 10
    found = [f"{a!r} and {b!r}" for (a, x), (b, y) in combinations(shown, 2) if _overlap(x, y) > 1]
    page = figure.bbox
    found += [
        f"{text!r} sticks out"
        for text, box in shown
        if box.x0 < page.x0 or box.x1 > page.x1 or box.y0 < page.y0 or box.y1 > page.y1
    ]
    return found


def _labels_not_drawn(figure: Figure) -> set[Text]:
    """Labels of ticks beyond the end of their axis, or of an axis that is off."""
    found: set[Text] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            found |= {
                tick.label1
                for tick in axis.get_major_ticks()
                if not axes.axison or not low <= tick.get_loc() <= high
            }
    return found


def _overlap(a: Bbox, b: Bbox) -> float:
    shared = a.intersection(a, b)
    return 0.0 if shared is None else float(shared.width * shared.height)


def test_labels_do_not_collide(plan: remat.Plan) -> None:
    assert collisions(step_figure(plan.timeline, title=plan.graph)) == []


@pytest.mark.parametrize(("peak_at", "boundary"), [(0, 1), (13, 20), (39, 39)])
def test_labels_do_not_collide_wherever_the_peak_is(peak_at: int, boundary: int) -> None:
    step = made_up(peak_at, boundary)
    figure = step_figure(
        step, title=LONG, peak_budget=int(1.05 * step.peak_bytes), without_peak_bytes=3 * 10**9
    )
    assert collisions(figure) == []


def test_a_collision_is_found() -> None:
    figure = step_figure(made_up(20, 20), title="two titles")
    figure.text(0.075, 0.945, "in one place")
    assert collisions(figure) == ["'two titles' and 'in one place'"]


def texts(figure: Figure) -> list[Text]:
    from matplotlib.text import Text

    return [t for t in figure.findobj(Text) if isinstance(t, Text)]


def words(figure: Figure) -> list[str]:
    return [t.get_text() for t in texts(figure)]


def test_the_picture_says_what_the_plan_says(plan: remat.Plan) -> None:
    step = plan.timeline
    shown = words(step_figure(step, title="a title"))
    assert "a title" in shown
    assert any(t.startswith("peak ") and step.program_points[step.peak_point] in t for t in shown)
    assert not any("budget: " in t for t in shown), "bytes that are saved are not the peak"
    assert any("blocks.py:" in t and "gelu" in t for t in shown)


def test_a_budget_on_the_peak_is_a_line_at_its_height_unless_far_above_the_picture() -> None:
    axes = step_figure(made_up(20, 20), title="t", peak_budget=2**30).axes[0]
    (line,) = (x for x in axes.lines if str(x.get_label()).startswith("budget: 1 GiB"))
    assert set(line.get_ydata()) == {1.0}
    (label,) = [text for text in axes.texts if text.get_text().startswith("peak ")]
    assert label.get_bbox_patch() is None, "a box would hide the line"
    far = words(step_figure(made_up(20, 20), title="t", peak_budget=10**12))
    assert not any("budget" in t for t in far)


def test_the_step_without_remat_is_drawn_in_grey() -> None:
    """It has a width of its own, and its peak is in the picture."""
    curve = MemoryCurve(nbytes=(2**30, 3 * 2**30, 4 * 2**30, 2**30), boundary=2)
    step = made_up(31, 10, program_points=40)
    axes = step_figure(step, title="t", without=curve).axes[0]
    (line,) = (x for x in axes.lines if str(x.get_label()) == "without remat: peak 4 GiB")
    assert line.get_color() == GREY
    assert list(line.get_ydata()) == [1, 3, 4, 1, 1]
    assert list(line.get_xdata()) == [0, 1, 2, 3, 4]
    assert axes.get_ylim()[1] > 4


def test_the_axis_is_time_where_costs_are_known() -> None:
    """Both steps lie in their own time, and the names of the halves stand at the boundary."""
    curve = MemoryCurve(nbytes=(2**30, 3 * 2**30), boundary=1, runs=("a", "b"))
    clock = Clock(
        starts=[10**9 * k * k for k in range(41)], without=[0, 10**9, 3 * 10**9], unit="ps"
    )
    figure = step_figure(made_up(31, 10), title="t", without=curve, clock=clock)
    axes = figure.axes[0]
    assert axes.get_xlabel() == "modelled time, s"
    (line,) = (x for x in axes.lines if "without remat" in str(x.get_label()))
    assert list(line.get_xdata()) == [0, 0.001, 0.003]
    assert axes.get_xlim() == (0, 1.6)
    assert 0.1 in [x.get_xdata()[0] for x in axes.lines]
    assert collisions(figure) == []


def test_recomputed_values_are_a_layer_of_their_own(plan: remat.Plan) -> None:
    nodes = {x.node for x in plan.timeline.lifetimes if x.kind is StorageKind.RECOMPUTED}
    assert nodes
    assert nodes <= set(plan.recomputed)
    axes = step_figure(plan.timeline, title="t").axes[0]
    labels = [str(c.get_label()) for c in axes.collections]
    assert labels == [label for label, *_ in LAYERS]
    assert "recomputed" in labels


def test_a_plan_from_a_file_is_refused(plan: remat.Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has no modules"):
        remat.Plan.from_json(plan.to_json()).plot(tmp_path / "plan.svg")


def test_where_only_its_peak_is_known_it_is_a_line() -> None:
    axes = step_figure(made_up(20, 20), title="t", without_peak_bytes=2**31).axes[0]
    (line,) = (x for x in axes.lines if "without remat" in str(x.get_label()))
    assert set(line.get_ydata()) == {2.0}


def test_a_long_step_keeps_its_peak() -> None:
    """The peak lasts for one of 50,000 program points; every column shows its highest program point."""
    step = made_up(31_415, 20_000, program_points=50_000)
    axes = step_figure(step, title="t").axes[0]
    tops = [path.vertices[:, 1].max() for c in axes.collections for path in c.get_paths()]
    assert max(tops) * 2**30 == pytest.approx(step.peak_bytes)


def test_what_fills_the_peak_is_grouped_by_line(joint: remat.JointGraph) -> None:
    step = remat.plan(joint, 1).timeline
    groups = fillings(step)
    nbytes = [sum(alive.nbytes for alive in group) for group in groups]
    assert sum(nbytes) == step.peak_bytes
    assert nbytes == sorted(nbytes, reverse=True)
    (parameters,) = (group for group in groups if group[0].kind is StorageKind.INPUT)
    assert len(parameters) == 3 * 6 + 1
    saved = (group for group in groups if {alive.kind for alive in group} == {StorageKind.SAVED})
    assert max(map(len, saved)) >= 3
    shown = words(step_figure(step, title="t"))
    assert f"parameters and inputs, × {len(parameters)}" in shown


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".PNG", b"\x89PNG\r\n")])
def test_plans_draw_themselves(plan: remat.Plan, tmp_path: Path, suffix: str, start: bytes) -> None:
    import matplotlib as mpl

    before, target = dict(mpl.rcParams), tmp_path / f"plan{suffix}"
    plan.plot(target)
    first = target.read_bytes()
    assert first.startswith(start)
    plan.plot(str(target))
    assert target.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == [target.name]
    assert dict(mpl.rcParams) == before


def test_a_picture_shows_the_step_without_remat_and_the_budget_in_bytes(
    peak_plan: remat.Plan, tmp_path: Path
) -> None:
    assert peak_plan.without_peak_bytes > peak_plan.peak_bytes
    peak_plan.plot(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert f"without remat: peak {format_bytes(peak_plan.without_peak_bytes)}" in text, (
        "text is text"
    )
    assert f"budget: {format_bytes(peak_plan.peak_limit)} alive" in text


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("plan.pdf", ProblemError, r"its suffix is '\.pdf'; expected .svg or .png"),
        ("plan", ProblemError, "its suffix is ''"),
        ("missing/plan.svg", PlanError, "cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_an_error(
    tmp_path: Path, name: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        write_picture(tmp_path / name, lambda: step_figure(made_up(1, 2), title="t"))
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlanError, match=r"pip install 'remat\[plot\]'"):
        write_picture(tmp_path / "plan.svg", lambda: step_figure(made_up(1, 2), title="t"))
