"""Compare the results of two runs bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def first_difference(reference: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return a description of the first result that differs between two runs; None if none differs.

    Results are compared bit for bit, except that any NaN equals any NaN.

    Args:
        reference: results of the reference run, by name.
        other: results of the other run, by name.
    """
    for name, value in reference.items():
        if name not in other:
            return f"{name} is gone"
        difference = _difference(value, other[name])
        if difference is not None:
            return f"{name} {difference}"
    extra = [name for name in other if name not in reference]
    return f"{extra[0]} is new" if extra else None


def _difference(one: Any, other: Any) -> str | None:
    """Return the end of a sentence that says how two values differ; None if the values are equal."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return None if same else f"was {one!r}, is {other!r}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"was {one.dtype} {list(one.shape)}, is {other.dtype} {list(other.shape)}"
    if one.element_size() in _INTEGERS and not one.is_complex():
        integers = _INTEGERS[one.element_size()]
        if torch.equal(one.view(integers), other.view(integers)):  # usual, and fast
            return None
    differs = ~_equal_bits(one, other)
    count = int(differs.sum())
    if not count:
        return None
    at = tuple(differs.nonzero()[0].tolist())
    return (
        f"differs in {count} of {one.numel()} elements, first at {list(at)}: was {one[at].item()}, "
        f"is {other[at].item()}"
    )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compare two tensors elementwise; an element of the result is True for equal bits or two NaNs."""
    if one.is_complex():
        pairs = _equal_bits(torch.view_as_real(one), torch.view_as_real(other))
        return pairs.all(-1)
    if not one.is_floating_point():
        return one == other
    if one.element_size() == 1:  # 8-bit floating-point types support few operators
        one, other = one.float(), other.float()
    # The sign bit tells 0.0 from -0.0, which compare as equal.
    equal = (one == other) & (one.signbit() == other.signbit())
    return equal | (one.isnan() & other.isnan())
