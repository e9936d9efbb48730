"""Draws the pictures of the README and the site: ``python docs/pictures.py [NAME …]``.

Those in `SKETCHES` show an idea and are drawn in no time; a test holds the files against them. Those in
`planned_pictures.PLANNED` are of real plans (fake tensors, no GPU), which takes minutes in all.
"""

from __future__ import annotations

import re
import sys
import textwrap
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


def house() -> Drawing:
    """The rooms of `architecture.md`, from its text."""
    block = (HERE / "architecture.md").read_text().split("```")[1]
    rows: list[tuple[str, str]] = []
    for line in block.splitlines():
        *names, about = re.split(r" {2,}", line.strip())
        if names:
            rows.append((" · ".join(names), about))
        elif about and rows:  # the second line of a description
            rows[-1] = rows[-1][0], f"{rows[-1][1]} {about}"
    height = 44
    d = Drawing(900, 50 + height * len(rows), "The rooms of remat; imports point down only")
    for k, (name, about) in enumerate(rows):
        y, width = 24 + height * k, 200 if len(name) < 26 else 380
        color = {"solvers": "blue", "graph": "green"}.get(name, "grey")
        d.box(40, y, width, height - 8, [name], color)
        lines = textwrap.wrap(about, 82 if width == 200 else 60)
        for n, text in enumerate(lines):
            d.text(56 + width, y + 23 + 16 * n - 8 * (len(lines) - 1), text, "small")
    d.arrow((20, 24), (20, 24 + height * len(rows) - 8))
    return d


SKETCHES: dict[str, Callable[[], Drawing]] = {
    "pictures/joint-graph.svg": joint_graph,
    "pictures/runtime-optimal.svg": runtime_optimal,
    "pictures/unchanged.svg": unchanged,
    "pictures/house.svg": house,
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
