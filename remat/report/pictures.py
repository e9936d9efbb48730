"""Common parts of all pictures: figures, units of axes, and atomic writing of files."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.errors import PlanError, ProblemError
from remat.files import write_file
from remat.units import scales_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Suffixes of the files to which a picture can be written.
FORMATS = (".svg", ".png")
RED, INK, GREY = "#b3261e", "#333333", "#8a8f96"
_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "remat",
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "DejaVu Sans",  # Matplotlib contains this font, so pictures are the same everywhere
}
_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Unit of an axis, such as GiB for bytes or ms for picoseconds.

    Attributes:
        size: number of bytes, or of the cost model's units of cost, in one ``unit``.
        unit: name of the unit, such as ``"GiB"`` or ``"ms"``.
    """

    size: int
    unit: str

    @classmethod
    def of(cls, most: float, unit: str) -> Scale:
        """Return the scale with the largest unit that is at most ``most``, or the smallest unit if all are larger.

        Args:
            most: largest amount on the axis, in ``unit``.
            unit: unit in which amounts are given: ``"B"`` for bytes, or a unit of cost such as ``"ps"``.
        """
        units = _BYTES if unit == "B" else scales_of(unit)
        name, size = next(((n, s) for n, s in units if most >= s), units[-1])
        return cls(size=size, unit=name)

    def text(self, amount: float) -> str:
        """Return an amount of bytes or cost as text in this unit, such as ``"1.5 GiB"``."""
        return f"{amount / self.size:.3g} {self.unit}"


def figure_of(
    size: tuple[float, float], box: tuple[float, float, float, float], title: str
) -> tuple[Figure, Axes]:
    """Create a Matplotlib figure with axes and a title, without the global state of pyplot.

    Args:
        size: width and height in inches.
        box: left, bottom, width and height of the axes, as fractions of the figure.
        title: title of the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    axes = figure.add_axes(box)
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(box[0], 0.945, shortened(title, 75), fontsize=11, fontweight="bold")
    return figure, axes


def write_picture(path: str | Path, draw: Callable[[], Figure]) -> None:
    """Draw a figure and write it to a file, atomically. Drawing the same plot twice gives identical files.

    Args:
        path: the file, which ends with ``.svg`` or ``.png``.
        draw: function that returns the figure; not called if the suffix is wrong or Matplotlib is missing.

    Raises:
        ProblemError: the path has another suffix.
        PlanError: Matplotlib is not installed, or the file cannot be written.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in FORMATS:
        raise ProblemError(
            f"a picture cannot be written to '{path}': its suffix is '{target.suffix}'; "
            f"expected {' or '.join(FORMATS)}"
        )
    try:
        import matplotlib
    except ImportError as error:
        raise PlanError(
            "drawing needs Matplotlib, which is not installed; pip install 'remat[plot]'"
        ) from error
    picture = io.BytesIO()  # a failed drawing must not leave part of a file
    with matplotlib.rc_context(_SETTINGS):
        # By default, Matplotlib writes the date into an SVG and its version into a PNG, so that files of equal
        # figures differ.
        metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
        draw().savefig(picture, format=suffix[1:], dpi=150, metadata=metadata)
    write_file(path, picture.getvalue(), "picture", PlanError)


def shortened(text: str, width: int) -> str:
    """Return a text with at most ``width`` characters; "…" replaces the end of a longer text."""
    return text if len(text) <= width else text[: width - 1] + "…"
