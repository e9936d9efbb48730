"""Pipelines as text: how they are written, and how they are read.

    pipeline := call {"," call}
    call     := name ["(" [argument {"," argument}] ")"]
    argument := option "=" value | call

A value ends at the next comma or parenthesis; one that has such signs is written in double quotes, as in JSON. It is
read as the type that the field of the option is declared with.
"""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, TypeVar

from remat.errors import ProblemError, RematError, did_you_mean

T = TypeVar("T")

#: Name of the field that holds the passes of a pass that is made of passes.
NESTED = "passes"
#: Passes may be nested this deep in text.
DEEPEST = 50
#: Characters that an error shows on either side of the column that it points at.
SHOWN = 80


# Writing ------------------------------------------------------------------------------------------


def write_pipeline(passes: Sequence[object]) -> str:
    """The text of a pipeline; `read_pipeline` reads it back."""
    return ",".join(map(str, passes))


def write_call(called: Any) -> str:
    """A pass, or an analysis, with those of its options that are not at their defaults."""
    written: list[str] = []
    for f in fields(called):
        value = getattr(called, f.name)
        if f.name == NESTED:
            written += map(str, value)
        elif value != f.default:
            written.append(f"{_kebab(f.name)}={write_option(value)}")
    return f"{called.name}({','.join(written)})" if written else called.name


def write_option(value: Any) -> str:
    """The value of an option as text."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = value if isinstance(value, str) else _named(value)
    is_unquoted = _UNQUOTED.fullmatch(text) and text == text.strip()
    return text if is_unquoted else json.dumps(text)


def _named(value: Any) -> str:
    """Cost models print with their device; solvers are called by their names."""
    shown = str(value)
    name = getattr(value, "name", None)
    return name if isinstance(name, str) and not shown.startswith(name) else shown


def _kebab(name: str) -> str:
    return name.replace("_", "-")


# Reading ------------------------------------------------------------------------------------------


def read_pipeline(
    text: str,
    *,
    passes: Mapping[str, type[T]],
    readers: Mapping[type, Callable[[str], Any]],
) -> tuple[T, ...]:
    """Reads a pipeline.

    Args:
        text: the text.
        passes: passes by name.
        readers: how to read the values of options, by the declared type; bool, int, float and str
            are known. A value of any other type stays text.

    Raises:
        ProblemError: the text cannot be read; the message points at the column.
    """
    if not isinstance(text, str):
        raise ProblemError(f"a pipeline is text, got {type(text).__name__}: {text!r}")
    reader = _Reader(passes, {**_PLAIN, **readers}, text)
    found = [reader.call()]
    while reader.next() == ",":
        reader.at += 1
        found.append(reader.call())
    reader.end()
    return tuple(found)


class _Reader:
    """Makes passes of text.

    Args:
        known: classes of passes by name.
        readers: how to read the value of an option, by its type.
        text: the text.
    """

    def __init__(
        self,
        known: Mapping[str, type[Any]],
        readers: Mapping[type, Callable[[str], Any]],
        text: str,
    ) -> None:
        self.at = self._depth = 0
        self._known, self._readers, self._text = known, readers, text

    def fault(self, column: int, message: str) -> ProblemError:
        """An error that points at a column of the text, of which it shows the part around."""
        start, end = max(0, column - SHOWN), column + SHOWN
        before, after = "…" * (start > 0), "…" * (end < len(self._text))
        part = "".join(c if c.isprintable() else " " for c in self._text[start:end])
        caret = " " * (len(before) + column - start)
        return ProblemError(
            f"pipeline, column {column + 1}: {message}\n  {before}{part}{after}\n  {caret}^"
        )

    def next(self) -> str:
        """The next character that is no blank; empty at the end."""
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1
        return self._text[self.at : self.at + 1]

    def end(self) -> None:
        """Refuses whatever follows."""
        if self.next():
            raise self.fault(self.at, f"expected ',' or the end, got '{self._text[self.at]}'")

    def call(self) -> Any:
        """The pass that stands here."""
        self.next()
        column, name = self.at, self._match(_WORD)
        if not name:
            raise self.fault(column, "expected the name of a pass")
        known = self._known
        if name not in known:
            meant = did_you_mean(name, known)
            hint = f"{meant} Known" if meant else "; known"
            raise self.fault(column, f"no pass is called '{name}'{hint} are {', '.join(known)}")
        kind = known[name]
        values = self._arguments(name, kind)
        missing = [
            f"{_kebab(f.name)}=…"
            for f in fields(kind)
            if f.default is MISSING and f.default_factory is MISSING and f.name not in values
        ]
        if missing:
            raise self.fault(column, f"'{name}' needs {', '.join(missing)}")
        try:
            return kind(**values)
        except RematError as error:
            raise self.fault(column, str(error)) from None

    def _arguments(self, name: str, kind: Any) -> dict[str, Any]:
        """What stands in the parentheses behind the name of a class, by field."""
        types = dict(_option_types(kind))
        values: dict[str, Any] = {}
        if types.pop(NESTED, None) is not None:
            values[NESTED] = ()
        if self.next() != "(":
            return values

        def no_option(column: int, given: str) -> ProblemError:
            takes = ", ".join(map(_kebab, types)) or "none"
            return self.fault(column, f"pass '{name}' has no option '{given}'; it takes: {takes}")

        opened = self.at
        self.at += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise self.fault(opened, f"nested more than {DEEPEST} deep")
        while (following := self.next()) != ")":
            if not following:
                raise self.fault(opened, "this parenthesis is never closed")
            if following == ",":
                self.at += 1
                continue
            column, key = self.at, self._match(_WORD)
            if self.next() == "=":
                self.at += 1
                raw = self._value()
                option = key.replace("-", "_")
                if option not in types:
                    raise no_option(column, f"{key}={raw[:40]}")
                if option in values:
                    raise self.fault(column, f"option '{key}' of '{name}' is given twice")
                try:
                    values[option] = self._read(types[option], raw)
                except RematError:
                    raise
                except ValueError as error:
                    raise self.fault(column, f"option '{key}' of '{name}': {error}") from None
            elif NESTED in values or not key:
                self.at = column
                values[NESTED] += (self.call(),)
            else:
                raise no_option(column, key)
            if self.next() not in (",", ")", ""):
                raise self.fault(self.at, f"expected ',' or ')', got '{self._text[self.at]}'")
        self.at += 1
        self._depth -= 1
        return values

    def _read(self, types: Sequence[type], raw: str) -> Any:
        """The value of an option, as the first of its types that can be read."""
        if raw == "none" and type(None) in types:
            return None
        for declared in types:
            for base, read in self._readers.items():
                if issubclass(declared, base):
                    return read(raw)
        return raw

    def _match(self, pattern: re.Pattern[str]) -> str:
        """What matches a pattern here, maybe nothing."""
        match = pattern.match(self._text, self.at)
        assert match is not None
        self.at = match.end()
        return match.group()

    def _value(self) -> str:
        """The value that stands here, without its quotes."""
        if self.next() != '"':
            return self._match(_UNQUOTED).strip()
        try:
            value, self.at = json.JSONDecoder().raw_decode(self._text, self.at)
        except ValueError:
            raise self.fault(self.at, "this quotation is never closed") from None
        return str(value)


_UNQUOTED = re.compile(r'[^,()"]*')
_WORD = re.compile(r"[\w.-]*")


@functools.lru_cache(maxsize=1000)  # looking annotations up takes longer than all else
def _option_types(kind: Any) -> Mapping[str, list[type]]:
    """The types that are declared for the fields of a pass or an analysis, one or several each.

    Where an annotation cannot be looked up at run time, the types of the defaults count.
    """
    try:
        hints = typing.get_type_hints(kind)
    except NameError:
        hints = {}
    found = {}
    for f in fields(kind):
        hint = hints.get(f.name, type(f.default))
        union = typing.get_origin(hint) in (typing.Union, UnionType)
        members = typing.get_args(hint) if union else (hint,)
        members = tuple(typing.get_origin(m) or m for m in members)
        found[f.name] = [m for m in members if isinstance(m, type)]
    return found


def _plain(expected: str, read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader whose error says what it expects."""

    def read_or_say(text: str) -> T:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise ValueError(f"expected {expected}, got '{text[:40]}'") from None

    return read_or_say


#: How options of plain types are read; a bool is an int too, and comes before it.
_PLAIN: Mapping[type, Callable[[str], Any]] = {
    bool: _plain("true or false", {"true": True, "false": False}.__getitem__),
    int: _plain("a whole number", int),
    float: _plain("a number", float),
    str: str,
}
