"""Detect whether a graph has changed, by comparing records of its nodes that are cheap to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch import fx

from remat.graph.memory.storages import SYMBOLIC


@dataclass(frozen=True, slots=True, eq=False)
class Stamp:
    """Record of a graph's nodes at one point in time, to detect later changes of the graph.

    Attributes:
        rows: for each node: the node, its name, target, args, kwargs and recompute tag.
    """

    rows: tuple[tuple[fx.Node, str, Any, Any, Any, Any], ...]

    @classmethod
    def of(cls, graph: fx.Graph) -> Stamp:
        """Record the current nodes of a graph."""
        return cls(
            tuple(
                # Arguments of nodes are immutable, so they are not copied.
                (n, n.name, n.target, n.args, n.kwargs, n.meta.get("recompute"))
                for n in graph.nodes
            )
        )

    def difference(self, later: Stamp) -> str | None:
        """Describe the first difference between this record of a graph and a later record; None if they are equal."""
        for before, after in zip(self.rows, later.rows, strict=False):
            if before is after or all(map(alike, before, after, repeat(_same_value))):
                continue
            if before[0] is not after[0]:
                return f"'{before[1]}' stood where '{after[1]}' stands now"
            for field, old, new in zip(_FIELDS, before[1:], after[1:], strict=True):
                if not alike(old, new, _same_value):
                    return f"{field} of '{before[1]}' was {_short(old)}, is {_short(new)} now"
        count = len(later.rows) - len(self.rows)
        if count:
            return f"it has {abs(count)} nodes {'more' if count > 0 else 'fewer'}"
        return None


_FIELDS = ("the name", "the target", "the arguments", "the keyword arguments", "the recompute tag")


def _same_value(a: Any, b: Any) -> bool:
    """Return whether two arguments of nodes are equal, without adding shape guards."""
    # The text of NaN equals itself, and the texts of 0.0 and -0.0 differ.
    # Comparing the values of symbols would add a shape guard.
    if isinstance(a, (float, complex, *SYMBOLIC)):
        return repr(a) == repr(b)
    return bool(a == b)


def alike(a: Any, b: Any, same_value: Callable[[Any, Any], bool]) -> bool:
    """Return whether two values are identical, or have the same type and equal contents.

    Args:
        a: a value. Tuples, lists and dicts are compared recursively; a node equals only itself.
        b: the other value.
        same_value: compares two values of any other type.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b, repeat(same_value)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k], same_value) for k in a)
    if isinstance(a, fx.Node):
        return False
    return same_value(a, b)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
