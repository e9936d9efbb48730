"""Print tables to standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table


def console() -> Console:
    """Return a Rich console for standard output that prints text as it is, without reading markup.

    By default, Rich would read ``[hf]`` in ``remat[hf]`` as markup. If standard output is not a
    terminal, the console is 1,000 columns wide, so that no cell is cut.
    """
    plain = {"markup": False, "emoji": False, "highlight": False}
    terminal = Console(**plain)  # type: ignore[arg-type]
    if terminal.is_terminal:
        return terminal
    return Console(width=1000, soft_wrap=True, **plain)  # type: ignore[arg-type]


def show(table: Table) -> None:
    """Print a table to standard output. If standard output is no terminal, trailing blanks are removed."""
    out = console()
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")
