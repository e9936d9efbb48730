"""Print tables to standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table


def show(table: Table) -> None:
    """Print a table to standard output, without trailing blanks.

    Text is printed as it is: by default, Rich would read ``[hf]`` in ``remat[hf]`` as markup. If
    standard output is not a terminal, the table may be 1,000 columns wide, so that no cell is cut.
    """
    width = None if sys.stdout.isatty() else 1000
    out = Console(width=width, markup=False, emoji=False, highlight=False)
    with out.capture() as captured:
        out.print(table)
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")
