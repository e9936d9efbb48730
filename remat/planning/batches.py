"""What `remat.fit` is given, read once: the memory, the batches, and what makes the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.errors import BudgetError, ProblemError
from remat.graph.calling import read_call
from remat.torch_compat import pytree
from remat.units import parse_bytes

#: Bytes below which a memory can only be a number without its unit.
_LEAST_MEMORY = 1 << 16
#: The largest batch that ``"max"`` looks at.
_MOST = 1 << 20
#: How close ``"max"`` comes to the largest batch that fits, as a part of it.
_PART = 50
#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def read_memory(memory: object) -> int:
    """A memory in bytes.

    Raises:
        BudgetError: it has no unit, or is nothing of the kind.
    """
    text = f"memory is {memory!r}; expected bytes with their unit, such as '80GiB'"
    if isinstance(memory, str):
        if memory.strip().replace(".", "", 1).isdigit():
            raise BudgetError(f"{text}: did you mean '{memory.strip()}GiB'?")
        nbytes = parse_bytes(memory)
        if nbytes:
            return nbytes
    elif type(memory) is int:
        if memory >= _LEAST_MEMORY:
            return memory
        if memory > 0:
            raise BudgetError(
                f"{text}: did you mean '{memory}GiB'? As a number it is {memory} bytes"
            )
    raise BudgetError(text)


@dataclass(slots=True)
class Batches:
    """Which batches to look at next, by which of those before did fit.

    Attributes:
        listed: the batches, in order; empty: powers of two until one does not fit, then between.
    """

    listed: tuple[int, ...]
    _fits: dict[int, bool] = field(default_factory=dict)

    def learn(self, batch: int, *, fits: bool) -> None:
        """Notes whether a batch fits, before the next one is asked for."""
        self._fits[batch] = fits

    def __iter__(self) -> Iterator[int]:
        if self.listed:
            yield from self.listed
            return
        low, high = 0, 1
        while high <= _MOST:
            yield high
            if not self._fits[high]:
                break
            low, high = high, 2 * high
        while high <= _MOST and high - low > max(1, low // _PART):
            middle = (low + high) // 2
            yield middle
            low, high = (middle, high) if self._fits[middle] else (low, middle)

    def ahead(self, batch: int, width: int) -> tuple[int, ...]:
        """A batch that is asked for, with those that will be if it fits, in order; at most ``width`` of them."""
        if self.listed:
            found = self.listed[self.listed.index(batch) :]
        elif all(self._fits.values()):
            found = tuple(batch << k for k in range(width) if batch << k <= _MOST)
        else:
            found = (batch,)
        return found[:width]


def read_batches(batches: object) -> Batches:
    """The batches to look at.

    Args:
        batches: whole numbers, one number, or ``"max"``.

    Raises:
        ProblemError: they are something else, or one is below 1.
    """
    if batches == "max":
        return Batches(())
    given = [batches] if isinstance(batches, (int, str)) else batches
    listed: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for batch in listed:
        if type(batch) is not int or batch < 1:
            raise ProblemError(
                f"batch is {batch!r}; expected whole numbers of 1 or more, such as 1, 2, 4, or 'max' for "
                "the largest that fits"
            )
    if not listed:
        raise ProblemError("batches is empty; expected whole numbers such as 1, 2, 4, or 'max'")
    return Batches(tuple(sorted(set(listed))))


def read_args(args: Any, kwargs: Mapping[str, Any] | None) -> Callable[[int], Arguments]:
    """What makes the arguments of a call for a batch.

    Args:
        args: a callable of a batch, which returns a tuple, a dict, or a pair of both; or arguments.
        kwargs: keyword arguments, beside arguments that are no callable.

    Raises:
        ProblemError: keyword arguments beside a callable, or tensors without a batch.
        CaptureError: they are no arguments of a call.
    """
    if not callable(args):
        return varied(*read_call(args, kwargs))
    if kwargs is not None:
        raise ProblemError(
            "kwargs are given beside a callable that makes the arguments for a batch; let it return "
            "(args, kwargs)"
        )

    def made(batch: int) -> Arguments:
        found = args(batch)
        if isinstance(found, Mapping):
            return read_call((), found)
        if isinstance(found, torch.Tensor):
            return (found,), {}
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
            positional = found[0]
            if isinstance(positional, (tuple, list)):
                return read_call(positional, found[1])
        return read_call(found, None)

    return made


def varied(args: Any, kwargs: Mapping[str, Any]) -> Callable[[int], Arguments]:
    """Arguments whose tensors have another first dimension, without their numbers.

    Raises:
        ProblemError: their first dimensions differ, or there is none.
    """
    tensors = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    sizes = sorted({int(t.shape[0]) for t in tensors if t.dim()})
    if len(sizes) != 1:
        raise ProblemError(
            f"the tensors of a call have first dimensions {', '.join(map(str, sizes)) or 'none'}; "
            "expected one, the batch: give a callable that makes the arguments for a batch, such as "
            "lambda batch: (torch.empty(batch, 1024, device='meta'),)"
        )

    def made(batch: int) -> Arguments:
        def at(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            like = value.new_empty((batch, *value.shape[1:]))
            return like.requires_grad_(value.requires_grad)

        return pytree.tree_map(at, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]

    return made
