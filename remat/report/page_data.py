"""Data for the script of an HTML page that explains plans: columns of numbers, and a list of distinct texts.

The browser neither rounds numbers nor composes texts. All texts on the page are formatted in Python
by `remat.units`, as in the tables of the command ``remat``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from remat.graph.memory.liveness import StorageKind, sums_of
from remat.report.explanation import grouped
from remat.report.memory_plot import LAYERS, highest_points
from remat.report.pictures import Scale
from remat.report.step_view import (
    KEPT,
    OFFLOADED,
    FrontierView,
    Point,
    StepView,
    Value,
    short_module,
)
from remat.units import counted, format_bytes, format_cost

#: Largest number of columns of the curve of alive bytes. A program point of a step is a run of an operator or kernel.
#: If a step has more program points than columns, each column stands for several program points, and shows the one with
#: the most bytes.
COLUMNS = 500
#: Largest number of kept values, and of other values, that are drawn one by one. Only the largest values are
#: drawn one by one, and all others are summed.
MOST_KEPT, MOST_OTHERS = 1000, 120
#: Fraction of the peak below which a value is not drawn by itself, unless it is kept.
_SMALL = 1 / 200
#: Largest number of rows in the table of recomputed operators.
MOST_AGAIN = 400
#: Names in the style sheet for the colors of `LAYERS`, in the same order.
_COLORS = ("input", "kept", "output", "recomputed", "temporary")


#: Dict from each distinct text of a page to the text's number; looking up a new text gives it the next number.
Texts = defaultdict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One plan of an HTML page, which the page shows when the slider selects it.

    Attributes:
        label: name of the plan on the page.
        spoken: peak, cost and other main figures of the plan in one line, for screen readers.
        cards: the main figures as texts (name, value, comparison).
        rows: all figures as texts (name, value).
        view: the step under the plan.
        point: (bytes, cost) of the plan in the plot of the frontier.
    """

    label: str
    spoken: str
    cards: Sequence[tuple[str, str, str]]
    rows: Sequence[tuple[str, str]]
    view: StepView
    point: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Contents of an HTML page that explains one plan or several.

    Attributes:
        title: title of the page.
        lead: line of text below the title.
        stops: the plans of the page. If there are several, a slider selects the plan to show.
        start: position in ``stops`` of the plan that is shown first.
        knee: position in ``stops`` of the plan at the knee of the frontier.
        curve: the frontier to draw; None: no frontier, and a single plan.
        figures: data of the plans and the frontier, which the page also contains as JSON.
    """

    title: str
    lead: str
    stops: Sequence[Stop]
    start: int
    knee: int
    curve: FrontierView | None
    figures: Mapping[str, Any]

    @property
    def first(self) -> Stop:
        """The plan that the page shows first.

        The page draws the first plan's curve of memory without remat beside every plan.
        """
        return self.stops[self.start]

    @property
    def bound(self) -> Sequence[Point]:
        """Vertices of the frontier's proven bound to draw; empty if the bound lies left of every point."""
        curve = self.curve
        return curve.bound if curve and curve.bound[-1][0] >= curve.points[0][0] else ()

    @property
    def scales(self) -> tuple[Scale, Scale]:
        """Units of the axes of bytes and cost; for a page without a frontier, twice the unit of the memory plot."""
        if self.curve is None:
            return (Scale.of(self.highest, "B"),) * 2
        (*_, most), (dearest, *_) = self.curve.points, self.curve.points
        return Scale.of(most[0], "B"), Scale.of(max(1, dearest[1]), self.curve.unit)

    @property
    def highest(self) -> int:
        """The highest peak on the page in bytes, over the peaks of all plans and the peaks without remat."""
        without = self.first.view.without
        peaks = [
            peak
            for stop in self.stops
            for peak in (stop.view.timeline.peak_bytes, stop.view.without_peak_bytes)
        ]
        return max([*peaks, without.peak_bytes if without else 0])


def page_data(page: Page) -> dict[str, Any]:
    """Return the data that a page's script draws, as a dict for JSON."""
    texts, curve, first = Texts(count().__next__), page.curve, page.first
    # All plans share one scale, so that the axis of bytes does not change when the slider moves.
    scale = Scale.of(page.highest, "B")
    kinds = list(StorageKind)
    color_of = {
        kind: color for color, (_, _, group) in zip(_COLORS, LAYERS, strict=True) for kind in group
    }
    clock = first.view.clock
    # The plan shown first determines the unit of time for all plans, so that the axis of time does not change
    # when the slider moves.
    time = Scale.of(clock.starts[-1], clock.unit) if clock else Scale(size=1, unit="")
    stops = [_stop(stop, texts, kinds, page.scales, time) for stop in page.stops]
    return {
        "texts": list(texts),
        "scale": {"size": scale.size, "unit": scale.unit},
        "kinds": [{"label": str(kind), "color": color_of[kind]} for kind in kinds],
        "legend": [
            *zip(_COLORS, (label for label, *_ in LAYERS), strict=True),
            ("without", "without remat"),
        ],
        "paint": PAINT,
        "without": _without(first, time),
        "axes": [
            clock.label(time.unit) if clock else "",
            f"{'kernels' if first.view.as_compiled else 'operators'} run",
        ],
        "points": curve.texts if curve else (),
        "start": page.start,
        "stops": stops,
    }


#: For each color in the plots: name of the renderer, the renderer's property, name of the color in the style sheet.
PAINT = [
    ("total", "fill_color", "temporary"),
    ("again", "fill_color", "recomputed"),
    ("small", "fill_color", "output"),
    ("inputs", "fill_color", "input"),
    ("without", "line_color", "without"),
    ("peak", "fill_color", "mark"),
    ("frontier", "line_color", "kept"),
    ("points", "fill_color", "kept"),
    ("bound", "fill_color", "bound"),
    ("now", "fill_color", "mark"),
    ("now", "line_color", "page"),
    ("knee", "line_color", "ink"),
]  # fmt: skip


def _stop(
    stop: Stop,
    texts: Texts,
    kinds: list[StorageKind],
    scales: tuple[Scale, Scale],
    time: Scale,
) -> dict[str, Any]:
    """Return the data that a page's script draws for one plan, as a dict for JSON."""
    # The returned data refer to texts by number, and to kinds of storages by position in ``kinds``.
    view, step = stop.view, stop.view.timeline
    sums, running = step.nbytes(), view.operator_at
    program_points = highest_points(sums, COLUMNS)
    kept_values = sorted((v for v in view.values if v.state == KEPT), key=lambda v: -v.nbytes)
    named = _named(view, kept_values)
    peak, one_by_one = step.peak_point, set(map(id, named))
    # All values that are not drawn one by one are summed in two areas: small values, and recomputed values.
    # The two areas lie between the parameters below and the temporary values above.
    apart = (StorageKind.INPUT, StorageKind.RECOMPUTED, StorageKind.TEMPORARY)
    rest = [v for v in view.values if id(v) not in one_by_one]
    small, again = (
        sums_of(((v.nbytes, v.first, v.last) for v in values), len(sums))
        for values in (
            [v for v in rest if v.kind not in apart],
            [v for v in rest if v.kind is StorageKind.RECOMPUTED],
        )
    )
    return {
        "label": stop.label,
        "spoken": stop.spoken,
        "cards": stop.cards,
        "rows": stop.rows,
        "moments": len(sums),
        "boundary": step.boundary,
        "times": [t / time.size for t in view.clock.starts] if view.clock else [],
        "base": sum(v.nbytes for v in view.values if v.kind is StorageKind.INPUT),
        "peak": {
            "moment": peak,
            "nbytes": sums[peak],
            "text": f"The peak, {format_bytes(sums[peak])}, is reached in "
            f"{'backward' if peak >= step.boundary else 'forward'} while {step.program_points[peak]} runs.",
        },
        "columns": {
            "x": [len(sums) * k // len(program_points) for k in range(len(program_points))],
            "nbytes": [sums[m] for m in program_points],
            "small": [small[m] for m in program_points],
            "again": [again[m] for m in program_points],
            "said": [texts[format_bytes(sums[m])] for m in program_points],
            "op": [texts[" · ".join(filter(None, running[m]))] for m in program_points],
        },
        "values": {
            "name": [texts[v.name] for v in named],
            "op": [texts[_op(v)] for v in named],
            "kind": [kinds.index(v.kind) for v in named],
            "kept": [int(v.state == KEPT) for v in named],
            "bytes": [v.nbytes for v in named],
            "said": [texts[format_bytes(v.nbytes)] for v in named],
            "first": [v.first for v in named],
            "last": [v.last for v in named],
            "price": [v.price for v in named],
            "cost": [texts[_price(v, view.unit)] for v in named],
            "source": [texts[v.source] for v in named],
            "module": [texts[v.module] for v in named],
            "block": [texts[short_module(v.module)] for v in named],
            "shape": [texts[v.shape] for v in named],
        },
        "keptText": texts[_kept_text(kept_values)],
        **_again(view, texts),
        "point": [stop.point[0] / scales[0].size, stop.point[1] / scales[1].size],
    }


def _named(view: StepView, kept_values: Sequence[Value]) -> list[Value]:
    """Return the values that are drawn one by one: kept values, and others that are large relative to the peak."""
    least = view.timeline.peak_bytes * _SMALL
    others = [
        v
        for v in view.values
        if v.state != KEPT and v.kind is not StorageKind.INPUT and v.nbytes >= least
    ]
    largest = sorted(others, key=lambda v: -v.nbytes)[:MOST_OTHERS]
    return sorted([*kept_values[:MOST_KEPT], *largest], key=lambda v: (v.first, v.last))


def _op(value: Value) -> str:
    """Return the operator that made a value, with a note if the value is offloaded."""
    return f"{value.op}, offloaded" if value.state == OFFLOADED else value.op


def _price(value: Value, unit: str) -> str:
    """Return the cost of recomputing a kept value, or ``"cannot be recomputed"``; empty for a value not kept."""
    if value.price is not None:
        return format_cost(value.price, unit)
    return "cannot be recomputed" if value.state == KEPT else ""


def _kept_text(kept_values: Sequence[Value]) -> str:
    """Return the text above the table of kept values: how many values and bytes, and what the columns mean."""
    if not kept_values:
        return "Forward keeps nothing for backward but inputs and outputs."
    text = (
        f"{counted(len(kept_values), 'value')}, {format_bytes(sum(v.nbytes for v in kept_values))}. "
        "Cost saved: what recomputing that value alone would take. Select a row to find the value in the picture."
    )
    rest = kept_values[MOST_KEPT:]
    if rest:
        text += (
            f" Not listed: {len(rest):,} smaller ones, {format_bytes(sum(v.nbytes for v in rest))}."
        )
    return text


def _again(view: StepView, texts: Texts) -> dict[str, Any]:
    """Return the table of recomputed operators by column, and the text above the table, both as entries of one dict."""
    # Runs without a cost, such as views, have no row. The text above the table gives the number of
    # runs without a cost.
    runs = [run for run in view.recomputed if run.cost]
    rows = grouped(runs, lambda run: (run.op, run.source), lambda run: run.cost or 0)
    shown, rest = rows[:MOST_AGAIN], rows[MOST_AGAIN:]
    costs = [sum(run.cost or 0 for run in row) for row in rows]
    text = "Nothing that costs time runs twice."
    if rows:
        cost = format_cost(sum(costs), view.unit)
        text = f"{counted(len(runs), 'further run')} of operators, {cost} together."
    if free := len(view.recomputed) - len(runs):
        text += f" {counted(free, 'node')} besides at no cost: views, sizes, elements of tuples."
    if rest:
        left = format_cost(sum(costs[MOST_AGAIN:]), view.unit)
        text += f" Not listed: {left} in {len(rest)} lines."
    nbytes = [sum(run.nbytes for run in row) for row in shown]
    return {
        "again": {
            "op": [texts[row[0].op] for row in shown],
            "source": [texts[row[0].source] for row in shown],
            "cost": costs[:MOST_AGAIN],
            "costText": [texts[format_cost(cost, view.unit)] for cost in costs[:MOST_AGAIN]],
            "count": [len(row) for row in shown],
            "bytes": nbytes,
            "bytesText": [texts[format_bytes(n)] for n in nbytes],
        },
        "againText": texts[text],
    }


def _without(first: Stop, scale: Scale) -> dict[str, Any]:
    """Return the curve of memory without remat as a dict for JSON, with times if operators have costs."""
    curve, clock = first.view.without, first.view.clock
    if curve is None:
        return {"x": [], "nbytes": [], "peak": first.view.without_peak_bytes}
    program_points = highest_points(curve.nbytes, COLUMNS)
    x = [*program_points, len(curve.nbytes)]
    nbytes = [curve.nbytes[i] for i in (*program_points, program_points[-1])]
    times = [clock.without[i] / scale.size for i in x] if clock else []
    return {"x": x, "times": times, "nbytes": nbytes, "peak": first.view.without_peak_bytes}
