"""Draws the pictures of the README and the site: ``python docs/pictures.py [NAME …]``.

Those in `SKETCHES` show an idea and are drawn in no time; a test holds the files against them. Those in
`planned_pictures.PLANNED` are of real plans (fake tensors, no GPU), which takes minutes in all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from drawing import Drawing

HERE = Path(__file__).resolve().parent


def joint_graph() -> Drawing:
    d = Drawing(
        860,
        300,
        "Forward and backward of a step in one graph; activations go from one to the other",
    )
    names = ("embed", "linear", "gelu", "linear", "loss")
    at = [150 + 142 * k for k in range(5)]
    d.text(24, 82, "forward", "head")
    d.text(24, 242, "backward", "head")
    for k, (x, name) in enumerate(zip(at, names, strict=True)):
        d.box(x, 55, 104, 44, [name])
        d.box(x, 215, 104, 44, ["loss’s" if k == 4 else f"{name}’s", "gradient"])
        if k:
            d.arrow((at[k - 1] + 104, 77), (x, 77))
            d.arrow((x, 237), (at[k - 1] + 104, 237))
            d.arrow((x - 19, 77), (x - 19, 160), (x + 20, 160), (x + 20, 215), color="blue")
    d.text(150, 166, "activations", "t-blue head")
    d.text(
        150, 285, "runs from left to right, then back: what is made first is needed last", "small"
    )
    d.text(150, 36, "one graph, as PyTorch’s AOTAutograd traces it", "small")
    return d


def runtime_optimal() -> Drawing:
    d = Drawing(
        860,
        270,
        "A matrix product is saved; what follows it is fused and computed again for nothing",
    )
    d.text(24, 62, "forward", "head")
    d.box(140, 35, 110, 46, ["matmul", "expensive"], "blue")
    d.box(330, 20, 400, 76, [""], "grey", dashed=True)
    for k, name in enumerate(("add bias", "gelu", "dropout")):
        d.box(350 + 125 * k, 35, 105, 46, [name, "cheap"])
        d.arrow((250 if not k else 330 + 125 * k, 58), (350 + 125 * k, 58))
    d.arrow((720, 58), (800, 58))
    d.text(740, 116, "one fused kernel", "small", anchor="end")
    d.text(24, 222, "backward", "head")
    d.box(330, 180, 400, 76, [""], "grey", dashed=True)
    for k, name in enumerate(("add bias", "gelu", "gradients")):
        d.box(
            350 + 125 * k,
            195,
            105,
            46,
            [name, "again" if k < 2 else "of all three"],
            "orange" if k < 2 else "grey",
        )
    d.arrow((455, 218), (475, 218))
    d.arrow((580, 218), (600, 218))
    d.arrow((195, 81), (195, 218), (350, 218), color="blue")
    d.text(207, 140, "saved: its output alone", "t-blue head")
    d.text(207, 160, "the rest is computed again in registers, which costs nothing", "small")
    return d


def unchanged() -> Drawing:
    d = Drawing(
        860, 300, "Dropout that is drawn anew in backward has another mask; remat replays its state"
    )
    for y, who, color in ((70, "drawn anew", "orange"), (190, "remat: replayed", "green")):
        d.text(24, y + 5, who, f"t-{color} head")
        d.box(190, y - 24, 150, 48, ["forward draws", "mask 1 0 1 1 0"])
        wrong = color == "orange"
        d.box(
            420,
            y - 24,
            170,
            48,
            ["backward draws", "mask 0 1 1 0 1" if wrong else "mask 1 0 1 1 0"],
            color,
        )
        d.arrow((340, y), (420, y), color=color, dashed=wrong)
        d.text(620, y - 2, "a wrong gradient" if wrong else "the gradient", f"t-{color}")
        d.text(620, y + 18, "and no message" if wrong else "of what forward computed", "small")
    d.text(352, 180, "state", "small")
    d.text(
        190,
        262,
        "The same holds for custom operators (they run once), for buffers that the step writes to",
        "small",
    )
    d.text(
        190,
        280,
        "(what was read before the write is kept), and for the random numbers of the next step.",
        "small",
    )
    return d


def rooms() -> Drawing:
    """The four packages that an author of passes or solvers needs, between entry points and output."""
    d = Drawing(900, 540, "Entry points, the four packages of an author, and what people look at")
    d.text(24, 34, "you call", "head")
    calls = (
        'torch.compile(…, backend="remat")',
        "remat.plan · frontier · fit",
        "remat.sac",
        "remat run · plan · fit",
    )
    x = 24.0
    for call, width in zip(calls, (290, 230, 110, 186), strict=True):
        d.box(x, 46, width, 34, [])
        d.text(x + width / 2, 68, call, "mono", anchor="middle")
        x += width + 12
    d.line([(24, 92), (876, 92)])
    d.arrow((108, 92), (108, 150))
    d.text(120, 114, "a joint graph: forward and backward", "small")
    d.text(24, 138, "remat/", "head mono")
    about = {
        "graph/": (
            "green",
            24,
            ["the joint graph: operators,", "bytes alive, costs, and the", "problem in integers"],
        ),
        "passes/": (
            "grey",
            252,
            ["change the graph, decide,", "and split the graph into", "forward and backward"],
        ),
        "solvers/": (
            "blue",
            480,
            ["which values to save,", "within a budget, at the", "least cost; no PyTorch"],
        ),
        "plugins/": (
            "orange",
            708,
            ["finds passes, solvers, cost", "models and operators of", "other packages"],
        ),
    }
    for name, (color, left, lines) in about.items():
        d.box(left - 4, 150, 176, 104, [name, *lines], color)
    d.arrow((196, 202), (248, 202))
    d.text(222, 194, "facts", "small", anchor="middle")
    d.arrow((424, 186), (476, 186))
    d.text(450, 178, "problem", "small", anchor="middle")
    d.arrow((476, 222), (424, 222))
    d.text(450, 240, "decision", "small", anchor="middle")
    d.arrow((704, 202), (652, 202), color="orange")
    d.arrow((792, 150), (792, 132), (336, 132), (336, 150), color="orange")
    d.arrow((336, 254), (336, 300))
    d.text(348, 282, "a plan: two graphs, with the proven gap to the optimum", "small")
    d.text(24, 312, "you look at", "head")
    _step_curves(d, (40, 372, 430, 140))
    lines = (
        ("plan.explain()", "kept and recomputed values, by source line"),
        ("frontier.plot(…)", "the cheapest plan for every budget, and a bound"),
        ("remat.compare(…)", "solvers and budgets in one table"),
        ("plan.explore(…)", "a page with a slider over the budgets"),
    )
    for k, (call, text) in enumerate(lines):
        d.text(520, 346 + 42 * k, call, "mono")
        d.text(520, 364 + 42 * k, text, "small")
    return d


def _step_curves(d: Drawing, place: tuple[float, float, float, float]) -> None:
    """Memory over the tutorial's step, at the scale of `place`: left, upper, width, height."""
    planned = (HERE / "pictures/tutorial-step.svg").read_text()
    curves = {
        color: [tuple(map(float, point.split(","))) for point in points.split()]
        for color, points in re.findall(r'class="curve (\w+)" points="([^"]+)"', planned)
    }
    left, upper, width, height = place
    xs, ys = zip(*[point for curve in curves.values() for point in curve], strict=True)
    x0, y0, base = min(xs), min(ys), 299.0  # the picture's line of 0 bytes
    for color, curve in curves.items():
        d.curve(
            [
                (left + width * (x - x0) / (max(xs) - x0), upper + height * (y - y0) / (base - y0))
                for x, y in curve
            ],
            color,
        )
    d.line([(left, upper), (left, upper + height), (left + width, upper + height)])
    peaks = re.findall(r">(peak [^<]+)<", planned)
    d.text(left, upper - 34, "memory over one training step", "small")
    d.text(left, upper - 14, f"without remat: {peaks[0]}", "t-grey small")
    d.text(left + width, upper - 14, f"with remat: {peaks[1]}", "t-blue small", anchor="end")


SKETCHES: dict[str, Callable[[], Drawing]] = {
    "pictures/joint-graph.svg": joint_graph,
    "pictures/runtime-optimal.svg": runtime_optimal,
    "pictures/unchanged.svg": unchanged,
    "pictures/rooms.svg": rooms,
}


def main(names: list[str]) -> None:
    """Draws the named pictures, or all."""
    from planned_pictures import PLANNED

    for name, draw in {**SKETCHES, **PLANNED}.items():
        if not names or Path(name).stem in names:
            (HERE / name).write_text(draw().svg())
            print(f"drawn: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
