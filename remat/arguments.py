"""Arguments of public functions: defaults and lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from remat.errors import ProblemError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)
class Unset(Generic[T]):
    """The default of an argument. Its type shows that the caller gave none.

    It prints as the value that it stands for, so that ``help(remat.plan)`` reads as usual.
    """

    value: T

    def __repr__(self) -> str:
        return repr(self.value)


#: What a plan is made for and by, where nothing else is said.
BUDGET = Unset(1.0)
SOLVER = Unset("auto")
COST = Unset("auto")


def value_of(given: Any) -> Any:
    """The value of an argument, or of its default."""
    return given.value if isinstance(given, Unset) else given


def as_list(name: str, value: Any, one: tuple[type, ...]) -> list[Any]:
    """The items of an argument: one thing by itself is a list of one, and text is no list of letters.

    Args:
        name: of the argument, for the message.
        value: an iterable of items, or a single one.
        one: the types of a single item.

    Raises:
        ProblemError: it is neither, or empty.
    """
    if isinstance(value, one):
        return [value]
    if not isinstance(value, Iterable):
        raise ProblemError(f"{name} is {value!r}; expected a list, for example a tuple")
    items = list(value)
    if not items:
        raise ProblemError(f"{name} is empty; name at least one, or leave the argument out")
    return items
