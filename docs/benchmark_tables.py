"""Writes the tables of the benchmarks into the README and the pages: ``python docs/benchmark_tables.py``.

The tables are made by `benchmarks.tables` of `benchmarks/results`; a test fails if a page has another table.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script has only its own folder on the path

from benchmarks.tables import PLACE as PLACE  # noqa: E402
from benchmarks.tables import TABLES as TABLES  # noqa: E402
from benchmarks.tables import filled as filled  # noqa: E402

PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "saved-tensor-hooks.md",
)

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
        print(f"written: {page.relative_to(ROOT)}")
