"""Write pipelines as text, and read pipelines from text.

The grammar of a pipeline's text is::

    pipeline := call {"," call}
    call     := name ["(" [argument {"," argument}] ")"]
    argument := option "=" value | call

An option's value without quotes ends at the next comma, parenthesis or double quote. A value that
contains a comma, parenthesis or double quote is written in double quotes, as in JSON. The declared type
of an option's field decides how the option's value is parsed.
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

#: Name of the dataclass field that holds the inner passes of a pass such as `Fixpoint`.
NESTED = "passes"
#: Deepest nesting of parentheses that the reader accepts, so that no text overflows the stack.
DEEPEST = 50
#: Number of characters of the text that an error message shows on each side of the faulty column.
SHOWN = 80


# Writing ------------------------------------------------------------------------------------------


def write_pipeline(passes: Sequence[object]) -> str:
    """Return the text of a pipeline, which `read_pipeline` parses."""
    return ",".join(map(str, passes))


def write_call(called: Any) -> str:
    """Return a pass or an analysis as text: name, inner passes, and options that differ from the defaults.

    Args:
        called: an instance of a pass or analysis class, which is a dataclass.
    """
    written: list[str] = []
    for f in fields(called):
        value = getattr(called, f.name)
        if f.name == NESTED:
            written += map(str, value)
        elif value != f.default:
            written.append(f"{_kebab(f.name)}={write_option(value)}")
    return f"{called.name}({','.join(written)})" if written else called.name


def write_option(value: Any) -> str:
    """Return the value of an option as text, in double quotes if the grammar needs quotes."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = value if isinstance(value, str) else _named(value)
    is_unquoted = _UNQUOTED.fullmatch(text) and text == text.strip()
    return text if is_unquoted else json.dumps(text)


def _named(value: Any) -> str:
    """Return the text of an object that is the value of an option, such as a solver or a cost model."""
    shown = str(value)
    name = getattr(value, "name", None)
    # A text such as ``roofline:h100`` begins with the name, and says more.
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
    """Parse the text of a pipeline and return its passes.

    Args:
        text: the text of the pipeline.
        passes: dict from the name of each pass to the class of the pass.
        readers: for each declared type of options, the function that parses an option's text.
            Readers for bool, int, float and str are built in. A value whose type has no reader
            stays text.

    Raises:
        ProblemError: the text cannot be parsed; the message points at the faulty column.
    """
    if not isinstance(text, str):
        raise ProblemError(f"a pipeline is text, got {type(text).__name__}: {text!r}")
    reader = _Reader(passes, {**_PLAIN, **readers}, text)
    parsed = [reader.call()]
    while reader.next() == ",":
        reader.at += 1
        parsed.append(reader.call())
    if following := reader.next():
        raise reader.fault(reader.at, f"expected ',' or the end, got '{following}'")
    return tuple(parsed)


class _Reader:
    """Recursive-descent parser that creates passes from the text of a pipeline."""

    def __init__(
        self,
        pass_types: Mapping[str, type[Any]],
        readers: Mapping[type, Callable[[str], Any]],
        text: str,
    ) -> None:
        self.at = self._depth = 0
        self._pass_types, self._readers, self._text = pass_types, readers, text

    def fault(self, column: int, message: str) -> ProblemError:
        """Return an error that shows a pipeline's text around a column, counted from 0, and points at the column."""
        start, end = max(0, column - SHOWN), column + SHOWN
        before, after = "…" * (start > 0), "…" * (end < len(self._text))
        # A line break or another control character would shift the caret.
        part = "".join(c if c.isprintable() else " " for c in self._text[start:end])
        caret = " " * (len(before) + column - start)
        return ProblemError(
            f"pipeline, column {column + 1}: {message}\n  {before}{part}{after}\n  {caret}^"
        )

    def next(self) -> str:
        """Skip whitespace, and return the text's next character without consuming it; "" at the end of the text."""
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1
        return self._text[self.at : self.at + 1]

    def call(self) -> Any:
        """Parse a pass and its arguments at the current position of the text, and return the new pass."""
        self.next()
        column, name = self.at, self._match(_WORD)
        if not name:
            raise self.fault(column, "expected the name of a pass")
        pass_types = self._pass_types
        if name not in pass_types:
            meant = did_you_mean(name, pass_types)
            hint = f"{meant} Known" if meant else "; known"
            raise self.fault(
                column, f"no pass is called '{name}'{hint} are {', '.join(pass_types)}"
            )
        kind = pass_types[name]
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
        """Parse the arguments in parentheses after a pass's name, if any, and return a dict from option to value."""
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
            elif NESTED in values:
                self.at = column
                values[NESTED] += (self.call(),)
            elif not key:
                raise self.fault(column, f"expected an option, got '{self._text[column]}'")
            else:
                raise no_option(column, key)
            if self.next() not in (",", ")", ""):
                raise self.fault(self.at, f"expected ',' or ')', got '{self._text[self.at]}'")
        self.at += 1
        self._depth -= 1
        return values

    def _read(self, types: Sequence[type], raw: str) -> Any:
        """Return the value of an option's text, read as the first declared type for which this parser has a reader."""
        if raw == "none" and type(None) in types:
            return None
        for declared in types:
            for base, read in self._readers.items():
                if issubclass(declared, base):
                    return read(raw)
        return raw

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Consume and return the text at the current position that matches ``pattern``."""
        match = pattern.match(self._text, self.at)
        # Each pattern also matches an empty text.
        assert match is not None
        self.at = match.end()
        return match.group()

    def _value(self) -> str:
        """Consume the option's value at the current position of the text, and return the value without quotes."""
        if self.next() != '"':
            return self._match(_UNQUOTED).strip()
        try:
            value, self.at = json.JSONDecoder().raw_decode(self._text, self.at)
        except ValueError:
            raise self.fault(self.at, "this quotation is never closed") from None
        return str(value)


_UNQUOTED = re.compile(r'[^,()"]*')
_WORD = re.compile(r"[\w.-]*")


@functools.lru_cache(maxsize=1000)  # resolving annotations takes most of the parsing time
def _option_types(kind: Any) -> Mapping[str, list[type]]:
    """Return the declared types of each field of a pass or an analysis class."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError:
        # An annotation that exists for type checkers only; the types of the defaults are used.
        hints = {}
    types = {}
    for f in fields(kind):
        hint = hints.get(f.name, type(f.default))
        union = typing.get_origin(hint) in (typing.Union, UnionType)
        members = typing.get_args(hint) if union else (hint,)
        members = tuple(typing.get_origin(m) or m for m in members)
        types[f.name] = [m for m in members if isinstance(m, type)]
    return types


def _plain(expected: str, read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a function that parses a text with ``read``, and names ``expected`` in the error if ``read`` fails."""

    def read_or_say(text: str) -> T:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise ValueError(f"expected {expected}, got '{text[:40]}'") from None

    return read_or_say


#: Readers of the built-in types. bool stands before int, because bool is a subclass of int.
_PLAIN: Mapping[type, Callable[[str], Any]] = {
    bool: _plain("true or false", {"true": True, "false": False}.__getitem__),
    int: _plain("a whole number", int),
    float: _plain("a number", float),
    str: str,
}
