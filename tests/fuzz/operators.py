"""What random programs are made of: one line of Python each, and what it can be applied to.

An operator is the text of an expression over values ``{0}``, ``{1}``, … and numbers that are drawn
to fit them, so that a program that fails is read, run and shortened as the Python that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

#: Elements of a value, at most.
LARGEST = 16000

#: Whether a value can take a place, given those in the places before.
Fits = Callable[..., bool]
#: Draws what else the text needs.
Draws = Callable[..., dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of line.

    Attributes:
        text: the expression, or the statement where ``writes``.
        fits: one predicate for each value that it reads; the first is what it writes to.
        draws: draws the numbers in the text, given a draw function and the values.
        writes: whether it is a statement that changes its first value in place.
        spoils: places of values that it changes without autograd knowing.
        weight: how often it is drawn, compared with others.
    """

    text: str
    fits: tuple[Fits, ...]
    draws: Draws = lambda draw, *values: {}
    writes: bool = False
    spoils: tuple[int, ...] = ()
    weight: int = 1

    @property
    def strides(self) -> bool:
        """Whether it looks at memory through strides of its own."""
        return "as_strided" in self.text

    @property
    def transposes(self) -> bool:
        """Whether what it changes is how its first value looks at memory."""
        return ".t_(" in self.text


# What fits --------------------------------------------------------------------------------------


def real(v: torch.Tensor, *_: Any) -> bool:
    return v.is_floating_point()


def single(v: torch.Tensor, *_: Any) -> bool:
    """Of the one type for which every kernel exists."""
    return v.dtype is torch.float32


def complex_(v: torch.Tensor, *_: Any) -> bool:
    return v.is_complex()


def whole(v: torch.Tensor, *_: Any) -> bool:
    return v.dtype is torch.int64


def mask(v: torch.Tensor, *_: Any) -> bool:
    return v.dtype is torch.bool


def filled(v: torch.Tensor, *_: Any) -> bool:
    return v.numel() > 0


def plain(v: torch.Tensor, *_: Any) -> bool:
    return not v.requires_grad


def contiguous(v: torch.Tensor, *_: Any) -> bool:
    return v.is_contiguous()


def dims(least: int, most: int = 9) -> Fits:
    return lambda v, *_: least <= v.dim() <= most


def every(*fits: Fits) -> Fits:
    return lambda *values: all(f(*values) for f in fits)


def same_type(v: torch.Tensor, first: torch.Tensor, *_: Any) -> bool:
    return v.dtype is first.dtype


def broadcasts(v: torch.Tensor, *others: torch.Tensor) -> bool:
    """With all before it, to something that is not too large."""
    try:
        shape = torch.broadcast_shapes(v.shape, *(o.shape for o in others))
    except RuntimeError:
        return False
    return shape.numel() <= LARGEST


def broadcasts_into(v: torch.Tensor, first: torch.Tensor, *_: Any) -> bool:
    return broadcasts(v, first) and torch.broadcast_shapes(v.shape, first.shape) == first.shape


def multiplies(v: torch.Tensor, first: torch.Tensor, *_: Any) -> bool:
    if v.dim() == 0 or first.dim() == 0 or max(v.dim(), first.dim()) > 3:
        return False
    inner = v.shape[-2] if v.dim() > 1 else v.shape[0]
    return bool(first.shape[-1] == inner and broadcasts_batches(v, first))


def broadcasts_batches(v: torch.Tensor, first: torch.Tensor, *_: Any) -> bool:
    try:
        torch.broadcast_shapes(v.shape[:-2], first.shape[:-2])
    except RuntimeError:
        return False
    return True


def channels(v: torch.Tensor, first: torch.Tensor, *_: Any) -> bool:
    return v.dim() == 1 and v.shape[0] == first.shape[1] and plain(v) and single(v)


def other_than(k: int) -> Fits:
    """Does not share memory with the value in place ``k``."""

    def fits(v: torch.Tensor, *earlier: torch.Tensor) -> bool:
        return v.untyped_storage()._cdata != earlier[k].untyped_storage()._cdata

    return fits


def not_overlapping(v: torch.Tensor, *_: Any) -> bool:
    """Every element has memory of its own, so that it may be written to."""
    reach = 1
    for size, stride in sorted(zip(v.shape, v.stride(), strict=True), key=lambda p: p[1]):
        if size > 1 and stride < reach:
            return False
        reach += (size - 1) * stride
    return True


# What is drawn ----------------------------------------------------------------------------------


def dim(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    return {"dim": draw(st.integers(0, max(0, v.dim() - 1)))}


def dim_keep(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    return {**dim(draw, v), "keep": draw(st.booleans())}


def two_dims(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    return {**dim(draw, v), "other": draw(st.integers(0, v.dim() - 1))}


def part(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    """A range of one dimension; it may be empty where the dimension is."""
    found = dim(draw, v)
    size = v.shape[found["dim"]]
    start = draw(st.integers(0, max(0, size - 1)))
    length = draw(st.integers(min(1, size - start), size - start))
    return {**found, "start": start, "length": length}


def place(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    found = dim(draw, v)
    return {**found, "at": draw(st.integers(0, v.shape[found["dim"]] - 1))}


def count(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    found = dim(draw, v)
    return {**found, "k": draw(st.integers(1, v.shape[found["dim"]]))}


def number(draw: Any, *_: Any) -> dict[str, Any]:
    return {"c": draw(st.sampled_from([0.5, -1.0, 2.0, 0.25]))}


def shape(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    return {"shape": tuple(v.shape)}


def new_shape(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    """Another shape for the same elements."""
    n = v.numel()
    found = [(n,), (1, n), (n, 1), (*v.shape, 1)]
    found += [(k, n // k) for k in (2, 3, 4) if n and n % k == 0]
    return {"shape": draw(st.sampled_from(found))}


def wider(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    """The shape with dimensions of size one widened, and perhaps one more in front."""
    sizes = [draw(st.sampled_from([1, 3])) if s == 1 else s for s in v.shape]
    return {"shape": (*((2,) if draw(st.booleans()) else ()), *sizes)}


def strides(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    """A window on the memory from where ``v`` begins, without overlap."""
    room = v.untyped_storage().nbytes() // v.element_size() - v.storage_offset()
    rows = draw(st.integers(1, max(1, min(4, room))))
    columns = draw(st.integers(1, max(1, min(4, room // rows))))
    offset = draw(st.integers(0, room - rows * columns))
    return {
        "size": (rows, columns),
        "stride": (columns, 1),
        "offset": v.storage_offset() + offset,
    }


def has_room(v: torch.Tensor, *_: Any) -> bool:
    return v.untyped_storage().nbytes() // v.element_size() > v.storage_offset()


def indexed(draw: Any, v: torch.Tensor, *_: Any) -> dict[str, Any]:
    found = dim(draw, v)
    return {**found, "n": v.shape[found["dim"]]}


def dtype(draw: Any, *_: Any) -> dict[str, Any]:
    names = ["float64", "bfloat16", "float32", "float16"]
    return {"dtype": f"torch.{draw(st.sampled_from(names))}"}
