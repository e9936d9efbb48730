"""Arguments that are lists: one thing by itself is a list of one, and text is not a list of letters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remat.errors import ProblemError


def as_list(name: str, value: Any, one: tuple[type, ...]) -> list[Any]:
    """The items of an argument.

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
