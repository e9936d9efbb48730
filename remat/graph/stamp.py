"""Whether a graph is as it was: a cheap record of its nodes, to hold against a later one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True, eq=False)
class Stamp:
    """The nodes of a graph with what they call, read and are tagged with, as they were once.

    Attributes:
        rows: for each node: itself, its name, target, arguments and recompute tag.
    """

    rows: tuple[tuple[fx.Node, str, Any, Any, Any, Any], ...]

    @classmethod
    def of(cls, graph: fx.Graph) -> Stamp:
        """Takes down a graph as it is now; arguments are immutable, so they are kept as they are."""
        return cls(
            tuple(
                (n, n.name, n.target, n.args, n.kwargs, n.meta.get("recompute"))
                for n in graph.nodes
            )
        )

    def difference(self, later: Stamp) -> str | None:
        """The first thing that is different later, in words; None where nothing is."""
        for before, after in zip(self.rows, later.rows, strict=False):
            if before is after or all(map(_same, before, after)):
                continue
            if before[0] is not after[0]:
                return f"'{before[1]}' stood where '{after[1]}' stands now"
            for what, old, new in zip(_FIELDS, before[1:], after[1:], strict=True):
                if not _same(old, new):
                    return f"{what} of '{before[1]}' was {_short(old)}, is {_short(new)} now"
        count = len(later.rows) - len(self.rows)
        if count:
            return f"it has {abs(count)} nodes {'more' if count > 0 else 'fewer'}"
        return None


_FIELDS = ("the name", "the target", "the arguments", "the keyword arguments", "the recompute tag")


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same; symbols are compared by their text, which guards nothing."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, fx.Node):
        return False
    if isinstance(a, (float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return repr(a) == repr(b)
    return bool(a == b)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
