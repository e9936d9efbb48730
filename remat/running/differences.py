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
    differs = _differing(one, other)
    count = int(differs.sum())
    if not count:
        return None
    at = tuple(differs.nonzero()[0].tolist())
    return (
        f"differs in {count} of {one.numel()} elements, first at {list(at)}: was {one[at].item()}, "
        f"is {other[at].item()}"
    )


#: Integer type by number of bytes of an element.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compare two tensors elementwise by their bits; any two NaNs are equal."""
    if one.is_complex():
        pairs = _differing(torch.view_as_real(one), torch.view_as_real(other))
        return pairs.any(-1)
    integers = _INTEGERS[one.element_size()]
    differs = one.view(integers) != other.view(integers)
    if one.is_floating_point() and differs.any():
        # As 32-bit numbers, since 8-bit floating-point types have no `isnan`.
        differs &= ~(one.float().isnan() & other.float().isnan())
    return differs
