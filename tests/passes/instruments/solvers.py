"""A solver that crashes."""

from __future__ import annotations

from typing import Any

import remat


class Crashes(remat.Solver):
    """Crashes on whatever it is given."""

    name = "crashes"

    def solve(self, problem: Any, **_: Any) -> Any:
        raise ZeroDivisionError("no items")

    def solve_graph(self, problem: Any, **_: Any) -> Any:
        raise ZeroDivisionError("no nodes")
