"""HTML pages that explain plans. Each page is one file, which loads no other file and needs no server.

Bokeh draws the plots. The slider and the tables are plain HTML: unlike Bokeh's slider and tables,
they work by keyboard and screen reader, and follow light and dark mode.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from remat.errors import PlanError
from remat.files import write_file
from remat.report.page_data import Page, page_data
from remat.report.pictures import Scale
from remat.report.step_view import FrontierView

_ASSETS = Path(__file__).with_name("assets")
_WITHOUT = (
    "The grey line is the step <dfn>without remat</dfn>, the plan at budget 1: its memory over its own time, or "
    "else its peak. "
)
_ONE_PLAN = (
    "There is no slider, because the page has one plan. For a slider, use a frontier with several plans: "
    "remat.frontier(joint).explore(path, plan), or the command remat explain MODEL --html FILE."
)
_AXIS = {"saved": "saved for backward", "peak": "peak of the step"}


def require_bokeh() -> None:
    """Raise a PlanError if the package Bokeh, which draws HTML pages, is not installed; called before any long work."""
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise PlanError(
            "pages are drawn with Bokeh, which is not installed; pip install 'remat[explore]'"
        ) from error


def write_page(make: Callable[[], Page], path: str | Path) -> Mapping[str, Any]:
    """Write an HTML page that explains plans, and return the data of its plans and of the frontier.

    Args:
        make: function that returns the contents of the page; not called if Bokeh is missing.
        path: the file.

    Raises:
        PlanError: Bokeh is not installed, or the file cannot be written.
    """
    require_bokeh()
    page = make()
    write_file(path, html_of(page), "page", PlanError)
    return page.figures


def html_of(page: Page) -> str:
    """Return the contents of a page as one HTML text."""
    from bokeh.resources import Resources

    plots = {"timeline": _timeline(page)}
    if page.curve is not None:
        plots["frontier"] = _frontier(page, page.curve)
    view, several = page.first.view, len(page.stops) > 1
    return _fill(
        "page",
        title=escape(page.title),
        lead=escape(page.lead),
        control=_control(page, page.curve) if page.curve and several else "",
        frontier=_frontier_html(page, page.curve) if page.curve else "",
        without=_WITHOUT if view.without is not None or view.without_peak_bytes else "",
        note="" if several else f'<p class="note">{escape(_ONE_PLAN)}</p>',
        figures=_json(page.figures),
        data=_json(page_data(page)),
        plots=_json(plots),
        # Bokeh's script is inline, because the page must load nothing.
        bokeh=Resources(mode="inline", components=["bokeh"]).render_js(),
        css=_asset("page.css"),
        js=_asset("page.js"),
    )


def _fill(name: str, **texts: object) -> str:
    """Return an HTML template with the given texts."""
    return Template(_asset(f"{name}.html")).substitute(texts)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """Return data as JSON with "<" escaped, so that it can stand in an HTML script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _control(page: Page, curve: FrontierView) -> str:
    """Return the HTML of the slider that selects a plan."""
    last, first = len(page.stops) - 1, escape(page.first.label)
    return _fill("slider", by=curve.by, last=last, start=page.start, knee=page.knee, first=first)


def _frontier_html(page: Page, curve: FrontierView) -> str:
    """Return the HTML around the plot of the frontier: heading, explanation, and label of the axis."""
    bound = "The grey region is proven to hold no plan. " if page.bound else ""
    return _fill("frontier", bound=bound, axis=_AXIS[curve.by], unit=page.scales[0].unit)


def _figure(name: str, height: int, **options: Any) -> Any:
    """Return an empty Bokeh figure in the style of the page; ``height`` is in pixels."""
    from bokeh.plotting import figure

    plot = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=12,
        **options,
    )
    plot.title = None
    for axis in (plot.xaxis, plot.yaxis):
        axis.minor_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
    plot.xgrid.grid_line_color = None
    return plot


def _hover(plot: Any, renderer: Any, part: str) -> None:
    """Make a figure call ``window.rematHover`` of the page's script when the pointer is over a part of the plot."""
    from bokeh.models import CustomJS, HoverTool

    code = f"window.rematHover && window.rematHover('{part}', cb_data)"
    plot.add_tools(HoverTool(renderers=[renderer], tooltips=None, callback=CustomJS(code=code)))


def _timeline(page: Page) -> Any:
    """Return the plot of memory over the step as Bokeh's JSON; the page's script adds the data."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, Label, Range1d, Span, TapTool

    scale = Scale.of(page.highest, "B")
    top = 1.14 * page.highest / scale.size or 1  # room for the labels "forward" and "backward"
    plot = _figure(
        "timeline-figure",
        320,
        x_range=Range1d(start=0, end=1),
        y_range=Range1d(start=0, end=top),
        y_axis_label=f"bytes alive, {scale.unit}",
    )
    # Areas for values that are not drawn one by one: temporary, recomputed, and small ones.
    for name in ("total", "again", "small"):
        # Bokeh's script hangs when it draws a step function without points.
        points = ColumnDataSource({"x": [0, 1], "low": [0, 0], "y": [0, 0]})
        plot.varea_step("x", "low", "y", source=points, step_mode="after", name=name)
    box = {"left": "left", "right": "right", "bottom": "bottom", "top": "top"}
    cells = plot.quad(**box, source=_empty(*box), fill_alpha=0, line_alpha=0, name="cells")
    plot.quad(**box, source=_empty(*box), line_alpha=0, name="inputs")
    values = plot.patches(
        "xs",
        "ys",
        source=_empty("xs", "ys", "color"),
        fill_color="color",
        line_alpha=0,
        nonselection_fill_alpha=1,
        nonselection_fill_color="color",
        nonselection_line_alpha=0,
        selection_fill_alpha=1,
        selection_line_alpha=1,
        selection_line_width=1,
        name="values",
    )
    plot.text(
        "x",
        "y",
        "text",
        source=_empty("x", "y", "text", "color"),
        text_align="center",
        text_baseline="middle",
        text_color="color",
        text_font_size="11px",
        name="blocks",
    )
    plot.step("x", "y", source=_empty("x", "y"), mode="after", line_width=1.5, name="without")
    plot.add_layout(Span(dimension="height", location=0, line_width=1, name="boundary"))
    for name, side, gap in (("forward", "right", -6), ("backward", "left", 6)):
        place: dict[str, Any] = {"x": 0, "y": top, "x_offset": gap, "y_offset": -2}
        look: dict[str, Any] = {
            "text_align": side,
            "text_baseline": "top",
            "text_font_size": "12px",
        }
        plot.add_layout(Label(text=name, name=name, **place, **look))
    plot.scatter(
        "x",
        "y",
        source=_empty("x", "y"),
        marker="inverted_triangle",
        size=9,
        line_alpha=0,
        name="peak",
    )
    _hover(plot, values, "value")
    _hover(plot, cells, "cell")
    plot.add_tools(TapTool(renderers=[values]))
    return json_item(plot)


def _frontier(page: Page, curve: FrontierView) -> Any:
    """Return the plot of a frontier, its bound and its knee as Bokeh's JSON, with a marker for the shown plan."""
    from bokeh.embed import json_item
    from bokeh.models import Range1d

    (x, y), knee = page.scales, page.stops[page.knee]
    right = 1.05 * max(p[0] for p in curve.points) / x.size
    # If all points of the frontier are far from 0 bytes, the axis of bytes does not start at 0.
    left = (
        0.97 * min(p[0] for p in curve.points) / x.size
        if curve.points[0][0] * 2 > curve.points[-1][0]
        else 0
    )
    plot = _figure(
        "frontier-figure",
        260,
        x_range=Range1d(start=left, end=right or 1),
        y_range=Range1d(start=0, end=1.08 * max(1, *(p[1] for p in curve.points)) / y.size),
        y_axis_label=f"recomputed, {y.unit}",
    )
    corners = [(b / x.size, c / y.size) for b, c in page.bound]
    if corners:
        edge = [*corners, (right, corners[-1][1])]
        plot.varea([p[0] for p in edge], 0, [p[1] for p in edge], name="bound")
    xs, ys = [p[0] / x.size for p in curve.points], [p[1] / y.size for p in curve.points]
    plot.line(xs, ys, line_width=1.5, name="frontier")
    points = plot.scatter(xs, ys, size=6, line_alpha=0, name="points")
    plot.scatter(
        [knee.point[0] / x.size],
        [knee.point[1] / y.size],
        size=15,
        fill_alpha=0,
        line_width=2,
        name="knee",
    )
    plot.scatter("x", "y", source=_empty("x", "y"), size=12, line_width=2, name="now")
    _hover(plot, points, "point")
    return json_item(plot)


def _empty(*columns: str) -> Any:
    """Return a Bokeh data source whose given columns are all empty."""
    from bokeh.models import ColumnDataSource

    return ColumnDataSource({name: [] for name in columns})
