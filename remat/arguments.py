"""Default arguments of public functions, and a conversion of list arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from remat.errors import ProblemError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)
class Unset(Generic[T]):
    """Default value of an argument, distinguishable from an equal value that the caller passes.

    ``repr`` shows the plain value, so ``help(remat.plan)`` shows ``budget=1.0``.

    Attributes:
        value: the default value that the function uses.
    """

    value: T

    def __repr__(self) -> str:
        return repr(self.value)


#: Default budget, solver and cost model of `remat.plan`, and of functions with the same arguments.
BUDGET = Unset(1.0)
SOLVER = Unset("auto")
COST = Unset("auto")


def value_of(given: Any) -> Any:
    """Return the value of an argument; for an `Unset` default, the value that it wraps."""
    return given.value if isinstance(given, Unset) else given


def as_list(name: str, value: Any, one: tuple[type, ...]) -> list[Any]:
    """Convert a list argument to a list; a single item becomes a list of one.

    Args:
        name: the argument's name, for the error message.
        value: an iterable of items, or a single item.
        one: the types of a single item. If ``str`` is one of these types, text counts as one item,
            not as a list of letters.

    Raises:
        ProblemError: ``value`` is neither an item nor an iterable, or is empty.
    """
    if isinstance(value, one):
        return [value]
    if not isinstance(value, Iterable):
        raise ProblemError(f"{name} is {value!r}; expected a list, for example a tuple")
    items = list(value)
    if not items:
        raise ProblemError(f"{name} is empty; name at least one, or leave the argument out")
    return items
