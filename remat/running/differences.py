"""Compare the results of two runs bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def first_difference(reference: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return a description of the first result that differs between two runs; None if none differs.

    The results of each run are given by name, and compared bit for bit, except that any NaN equals any
    NaN.
    """
    for name, value in reference.items():
        if name not in other:
            return f"{name} is gone"
        difference = _difference(value, other[name])
        if difference is not None:
            return f"{name} {difference}"
    extra = [name for name in other if name not in reference]
    return f"{extra[0]} is new" if extra else None


def _difference(value: Any, other: Any) -> str | None:
    """Return the end of a message that says how two values differ; None if the values are equal."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = type(value) is type(other) and (
            value == other or (value != value and other != other)
        )
        return None if same else f"was {value!r}, is {other!r}"
    if (value.dtype, value.shape) != (other.dtype, other.shape):
        return f"was {value.dtype} {list(value.shape)}, is {other.dtype} {list(other.shape)}"
    differs = _differing(value, other)
    count = int(differs.sum())
    if not count:
        return None
    at = tuple(differs.nonzero()[0].tolist())
    return (
        f"differs in {count} of {value.numel()} elements, first at {list(at)}: was {value[at].item()}, "
        f"is {other[at].item()}"
    )


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor viewed as integers of its elements' size, or of 64 bits for larger elements."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return tensor.view(integers.get(tensor.itemsize, torch.int64))


def _differing(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return, for each element of two tensors, whether the bits differ; any two NaNs are equal."""
    if value.is_complex():
        pairs = _differing(torch.view_as_real(value), torch.view_as_real(other))
        return pairs.any(-1)
    differs = as_integers(value) != as_integers(other)
    if value.is_floating_point() and differs.any():
        # As 32-bit numbers, since 8-bit floating-point types have no `isnan`.
        differs &= ~(value.float().isnan() & other.float().isnan())
    return differs
