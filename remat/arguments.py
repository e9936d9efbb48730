"""Helpers for public functions: recognise default arguments, document ``**options``, convert single items to lists."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from remat.errors import ProblemError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
#: The documentation of one argument, in a docstring without its indentation.
_ENTRY = re.compile(r"^ {4}\**(\w+): .*(?:\n {8}.*)*", re.MULTILINE)


class DefaultText(str):
    """Default value of an argument: a string of a class of its own, which no caller passes."""


class DefaultRatio(float):
    """Default value of an argument: a float of a class of its own, which no caller passes."""


#: Default budget, solver and cost model of `remat.plan`, and of functions with the same arguments.
BUDGET = DefaultRatio(1.0)
SOLVER = DefaultText("auto")
COST = DefaultText("auto")


@functools.cache
def documented(by: Callable[..., Any]) -> dict[str, str]:
    """Return what a callable's docstring says of arguments and attributes, as a dict from name to text."""
    return {m[1]: m[0] for m in _ENTRY.finditer(inspect.getdoc(by) or "")}


def passes_on(
    names: Iterable[str], to: Callable[..., Any], *, others: bool = False
) -> Callable[[F], F]:
    """Return a decorator for a function whose ``**options`` another callable declares and documents.

    The decorator adds the options to the function's signature and docstring. A call with an unknown option raises a
    `TypeError`, which suggests the nearest name.

    Args:
        names: names of the options that the function takes.
        to: the callable that declares the options, such as the class `PlanOptions`.
        others: whether the function takes further names as ``**options``, and checks these names itself.
    """
    texts, parameters = documented(to), inspect.signature(to).parameters
    declared = [parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names]

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        *first, options = own.parameters.values()
        shown = [*first, *declared]
        allowed = [p.name for p in shown]

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in allowed and not others:
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}"
                        f"{did_you_mean(name, allowed)}; expected one of {', '.join(allowed)}"
                    )
            return function(*args, **given)

        last = [options] if others else []
        checked.__signature__ = own.replace(parameters=[*shown, *last])  # type: ignore[attr-defined]
        entries = "".join(f"\n{texts[p.name]}" for p in declared if p.name in texts)
        checked.__doc__ = _ENTRY.sub(
            lambda m: m[0] + entries if m[1] == options.name else m[0],
            inspect.getdoc(function) or "",
        )
        return cast("F", checked)

    return decorate


def as_list(name: str, value: Any, item_types: tuple[type, ...]) -> list[Any]:
    """Convert an argument to a list; a single item of one of the types ``item_types`` becomes a list of one item.

    Raises:
        ProblemError: the argument ``name`` is neither an item nor an iterable, or is empty.
    """
    if isinstance(value, item_types):
        return [value]
    if not isinstance(value, Iterable):
        raise ProblemError(f"{name} is {value!r}; expected a list, for example a tuple")
    items = list(value)
    if not items:
        raise ProblemError(f"{name} is empty; name at least one, or leave the argument out")
    return items
