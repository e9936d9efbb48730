"""Check the columns of a problem, such as its weights, names or inputs.

A *column* is a sequence with one entry for each item or node of the problem. Every check returns the
checked value, or raises a `ProblemError` whose message contains ``label``, the value's name.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from remat.errors import ProblemError

INT64_MAX = 2**63 - 1


def as_integer(number: object) -> int | None:
    """Convert a Python or NumPy integer to ``int``; return None for a bool or any other value."""
    if isinstance(number, bool):  # Python counts bools as ints, but here they are usually a mask
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def short(value: object) -> str:
    """Format a value for an error message, in at most sixty characters; of a list or dict, only type and length."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int with too many digits for `repr`
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def sequence(
    label: str,
    values: Any,
    length: int | None = None,
    *,
    each: str = "name",
    default: int | None = None,
) -> tuple[Any, ...]:
    """Return an ordered iterable as a tuple; raise `ProblemError` unless it has ``length`` entries.

    The argument ``each`` is the last word of an error message such as "expected 3, one for each name". For an empty
    iterable, the result is ``default`` repeated ``length`` times, unless ``default`` is None.
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, set, frozenset, dict)):
        raise ProblemError(
            f"{label} is {short(values)}; expected an ordered sequence: give a tuple or a list"
        )
    entries = tuple(values)
    if length is not None and default is not None and not entries:
        return (default,) * length
    if length is not None and len(entries) != length:
        raise ProblemError(
            f"{label} has {len(entries)} entries; expected {length}, one for each {each}"
        )
    return entries


def integer(label: str, value: object, low: int = 0, high: int = INT64_MAX) -> int:
    """Return an integer from ``low`` to ``high`` as an ``int``, or raise `ProblemError`."""
    number = as_integer(value)
    if number is None or not low <= number <= high:
        limit = "2**63 - 1" if high == INT64_MAX else str(high)
        do = ": convert or scale it first" if number is None else ""
        raise ProblemError(
            f"{label} is {short(value)}; expected an integer from {low} to {limit}{do}"
        )
    return number


def capacity(label: str, value: object) -> int | None:
    """Return a capacity that is an integer of at least 0, or None for no limit; otherwise raise `ProblemError`."""
    return None if value is None else integer(label, value)


def integers(
    label: str, values: Any, low: int = 0, high: int = INT64_MAX, *, names: Sequence[str] = ()
) -> tuple[int, ...]:
    """Return the entries of a column if all are integers from ``low`` to ``high``, or raise `ProblemError`."""
    entries = sequence(label, values)
    # Fast path: checking each entry on its own takes ten times as long.
    if set(map(type, entries)) <= {int} and (
        not entries or (low <= min(entries) and max(entries) <= high)
    ):
        return entries
    return tuple(integer(place(label, i, names), x, low, high) for i, x in enumerate(entries))


def amounts(label: str, values: Any, names: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return the entries of a column if they are non-negative integers, one for each name, with a sum below 2**63."""
    entries = sequence(label, values, None if names is None else len(names))
    numbers = integers(label, entries, names=names or ())
    if sum(numbers) > INT64_MAX:
        raise ProblemError(
            f"{label} sums to {short(sum(numbers))}; expected at most 2**63 - 1: use a coarser unit"
        )
    return numbers


def typed(
    label: str, values: Any, kind: type, names: Sequence[str] | None = None
) -> tuple[Any, ...]:
    """Return the entries of a column if all are of type ``kind``, which is bool or str; otherwise raise `ProblemError`."""
    entries = sequence(label, values, None if names is None else len(names))
    if not set(map(type, entries)) <= {kind}:
        i, bad = next((i, x) for i, x in enumerate(entries) if type(x) is not kind)
        expected = "text" if kind is str else "True or False"
        raise ProblemError(f"{place(label, i, names or ())} is {short(bad)}; expected {expected}")
    return entries


def earlier_nodes(label: str, rows: Any, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the inputs of each node as a tuple; raise `ProblemError` unless every input stands before its reader."""
    given = sequence(label, rows, len(names))
    if set(map(type, given)) <= {tuple, list}:
        given = tuple(map(tuple, given))
        # Fast path: checking each entry on its own takes ten times as long.
        if set(map(type, chain.from_iterable(given))) <= {int} and all(
            min(row) >= 0 and max(row) < i for i, row in enumerate(given) if row
        ):
            return given
    last = len(names) - 1
    checked = tuple(integers(f"{label}[{i}]", row, 0, last) for i, row in enumerate(given))
    for i, row in enumerate(checked):
        if row and max(row) >= i:
            raise ProblemError(
                f"{place(label, i, names)} has node {max(row)}; expected earlier nodes only, so that "
                "there is no cycle: list each node after its inputs"
            )
    return checked


def place(label: str, index: int, names: Sequence[str] = ()) -> str:
    """Format the place of a column entry for an error message, such as ``cost[3] ('mul')``."""
    return f"{label}[{index}] ({short(names[index])})" if names else f"{label}[{index}]"
