"""Pictures of the site as SVG: boxes, arrows and curves on a card that is readable in light and in dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]

#: Colours by name, in light and in dark.
LIGHT = {
    "card": "#ffffff", "ink": "#1d2733", "soft": "#5a6876", "grey": "#8b98a5", "plain": "#eef1f5", "grid": "#dfe4ea",
    "blue": "#2f5d9e", "pale-blue": "#dce7f6", "orange": "#b9540c", "pale-orange": "#fbe5d3",
    "green": "#2f7a4f", "pale-green": "#dcf0e3",
}  # fmt: skip
DARK = {
    "card": "#1d222b", "ink": "#e8ebef", "soft": "#a9b3be", "grey": "#7a8794", "plain": "#2b323d", "grid": "#343c48",
    "blue": "#8db4ee", "pale-blue": "#27405f", "orange": "#f0a063", "pale-orange": "#56351c",
    "green": "#7fcf9f", "pale-green": "#23472f",
}  # fmt: skip
_SHAPES = (
    'text{font:15px system-ui,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}.small{font-size:13px}'
    ".head{font-weight:600}.mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13.5px}"
    ".shade{stroke:none}.curve{fill:none;stroke-width:2.2;stroke-linejoin:round}"
    ".arrow{fill:none;stroke-width:1.7}.dash{stroke-dasharray:6 5}"
)


def _colors(of: Mapping[str, str]) -> str:
    """Rules that give each class its colour. They name no variables: papers and slides would draw those black."""
    rules = [
        f".card{{fill:{of['card']}}}text{{fill:{of['ink']}}}.small,.t-grey{{fill:{of['soft']}}}",
        f".shade{{fill:{of['grid']}}}.grid{{stroke:{of['grid']}}}",
        f".b-grey{{fill:{of['plain']};stroke:{of['grey']}}}.grey{{stroke:{of['grey']}}}.tip-grey{{fill:{of['grey']}}}",
    ]
    for name in ("blue", "orange", "green"):
        color = of[name]
        rules.append(
            f".b-{name}{{fill:{of[f'pale-{name}']};stroke:{color}}}.{name}{{stroke:{color}}}"
        )
        rules.append(f".t-{name},.tip-{name}{{fill:{color}}}")
    return "".join(rules)


STYLE = f"{_SHAPES}{_colors(LIGHT)}@media (prefers-color-scheme:dark){{{_colors(DARK)}}}"


class Drawing:
    """An SVG under construction; coordinates are pixels from the upper left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Starts with an empty card.

        Args:
            width: of the picture.
            height: of the picture.
            title: what it shows, for those who do not see it.
        """
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, text: str, style: str = "", *, anchor: str = "start"
    ) -> None:
        """A line of text, its baseline at y."""
        kind = f' class="{style}"' if style else ""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{kind}{at}>{escape(text)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: Sequence[str],
        color: str = "grey",
        *,
        dashed: bool = False,
    ) -> None:
        """A box with lines of text in its middle; those after the first are small."""
        dash = " dash" if dashed else ""
        self.parts.append(
            f'<rect class="b-{color}{dash}" x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="7" stroke-width="1.6"/>'
        )
        top = y + height / 2 + 5.5 - 9 * (len(lines) - 1)
        for k, line in enumerate(lines):
            self.text(x + width / 2, top + 18 * k, line, "small" if k else "", anchor="middle")

    def arrow(self, *points: Point, color: str = "grey", dashed: bool = False) -> None:
        """A line through points with a tip at the last."""
        (x0, y0), (x, y) = points[-2:]
        length = max(1e-9, ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5)
        dx, dy = (x - x0) / length, (y - y0) / length
        base = (x - 9 * dx, y - 9 * dy)
        tip = [(x, y), *((base[0] + 4.5 * s * dy, base[1] - 4.5 * s * dx) for s in (1, -1))]
        self.line((*points[:-1], base), color, dashed=dashed)
        self.parts.append(f'<polygon class="{color} tip-{color}" points="{path(tip)}"/>')

    def line(self, points: Sequence[Point], color: str = "grey", *, dashed: bool = False) -> None:
        dash = " dash" if dashed else ""
        self.parts.append(f'<polyline class="arrow {color}{dash}" points="{path(points)}"/>')

    def area(self, points: Sequence[Point], style: str = "shade") -> None:
        self.parts.append(f'<polygon class="{style}" points="{path(points)}"/>')

    def curve(self, points: Sequence[Point], color: str) -> None:
        self.parts.append(f'<polyline class="curve {color}" points="{path(points)}"/>')

    def dot(self, x: float, y: float, color: str, radius: float = 6) -> None:
        self.parts.append(
            f'<circle class="b-{color}" cx="{x:g}" cy="{y:g}" r="{radius:g}" stroke-width="2"/>'
        )

    def svg(self) -> str:
        card = f'<rect width="{self.width}" height="{self.height}" rx="8" class="card"/>'
        body = "\n".join((f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", card))
        size = (
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{body}\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


class Chart:
    """Axes on a part of a drawing: `at` says where a point of the data lies."""

    def __init__(
        self,
        on: Drawing,
        place: tuple[float, float, float, float],
        right: float,
        top: float,
    ) -> None:
        """Both axes begin at 0.

        Args:
            on: what is drawn on.
            place: left, upper, width and height in pixels.
            right: the data at the right end.
            top: the data at the upper end.
        """
        self.on, self.place, self.right, self.top = on, place, right, top

    def at(self, x: float, y: float) -> Point:
        left, upper, width, height = self.place
        return left + width * x / self.right, upper + height * (1 - y / self.top)

    def axes(
        self, across: str, up: str, xs: Sequence[float] = (), ys: Sequence[float] = ()
    ) -> None:
        """Lines of a grid with their numbers, and what the axes mean."""
        left, upper, width, height = self.place
        for y in ys:
            _, at = self.at(0, y)
            self.on.parts.append(
                f'<line class="grid" x1="{left:g}" x2="{left + width:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
            )
            self.on.text(left - 8, at + 4, f"{y:g}", "small", anchor="end")
        for x in xs:
            self.on.text(self.at(x, 0)[0], upper + height + 18, f"{x:g}", "small", anchor="middle")
        self.on.line([(left, upper), (left, upper + height), (left + width, upper + height)])
        self.on.text(left, upper - 12, up, "small")
        below = upper + height + (38 if xs else 20)
        self.on.text(left + width, below, across, "small", anchor="end")

    def curve(self, points: Sequence[Point], color: str, *, steps: bool = False) -> None:
        """A curve through points of the data; with steps each height holds until the next point."""
        if steps:
            points = [
                q
                for k, p in enumerate(points)
                for q in ([(p[0], points[k - 1][1]), p] if k else [p])
            ]
        self.on.curve([self.at(*p) for p in points], color)


def path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
