"""What writing and reading of values agree on: what need not be said because it follows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
from torch import fx

from remat.graph.text.expressions import Size
from remat.graph.writes import aliased_places


def base_of(node: fx.Node) -> Any:
    """The value whose memory a node's value lies in unless something else is said.

    That is the element that is taken out of a tuple; or, where an operator's only result may alias an
    argument by its schema, the first such argument.
    """
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        if len(node.args) != 2:
            return None
        whole, k = node.args
        value = whole.meta.get("val") if isinstance(whole, fx.Node) else None
        return element(value, k) if isinstance(value, (tuple, list)) and type(k) is int else None
    for k, _ in aliased_places(node.target):
        base = node.args[k] if k < len(node.args) else None
        if isinstance(base, fx.Node):
            return base.meta.get("val")
    return None


def element(base: Any, k: int) -> Any:
    """What the element of a value lies in, if the value lies in ``base``."""
    if not isinstance(base, (tuple, list)):
        return base
    return base[k] if -len(base) <= k < len(base) else None


def contiguous(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a tensor whose last dimension is dense, and so on up."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(sizes):
        strides.append(step)
        step = step * (max(size, 1) if type(size) is int else size)
    return tuple(reversed(strides))


def equal(one: Size, other: Size) -> bool:
    """Whether two sizes are the same number, whatever form they are in."""
    if one == other:
        return True
    return not (type(one) is int and type(other) is int) and sympy.expand(one - other) == 0


def extent(sizes: Sequence[Size], strides: Sequence[Size], offset: Size, itemsize: int) -> Size:
    """Bytes that a tensor needs from the beginning of its memory."""
    if any(type(s) is int and s == 0 for s in sizes):
        return 0
    if offset == 0 and tuple(strides) == contiguous(sizes):
        count: Size = itemsize
        for size in sizes:
            count = count * size
        return count
    last = offset
    for size, stride in zip(sizes, strides, strict=True):
        last = last + (size - 1) * stride
    return (last + 1) * itemsize
