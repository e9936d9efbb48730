"""The syntax of pipelines: text taken apart into calls, each with the column where it stands.

    pipeline := call {"," call}
    call     := name ["(" [argument {"," argument}] ")"]
    argument := option "=" value | call

A value ends at the next comma or closing parenthesis outside of parentheses of its own; one that
would not survive that is written in double quotes, as in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from remat.errors import ProblemError
from remat.passes.core.state import Analysis

#: Passes may be nested this deep in text.
DEEPEST = 50
#: Characters that an error shows on either side of the column that it points at.
SHOWN = 80


@dataclass(frozen=True, slots=True)
class Call:
    """``name(options, nested)`` with the columns where they stand."""

    column: int
    name: str
    options: tuple[Option, ...] = ()
    nested: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """``key=value``, the value without its quotes; it begins at the column ``start``."""

    column: int
    key: str
    raw: str
    start: int


class Reader:
    """Splits text into calls; columns count from 0, and from ``before`` where it is a part."""

    def __init__(self, text: str, *, whole: str | None = None, before: int = 0) -> None:
        self.text, self.at, self._depth = text, 0, 0
        self._whole, self._before = text if whole is None else whole, before

    def fault(self, column: int, message: str) -> ProblemError:
        return fault(self._whole, self._before + column, message)

    def calls(self) -> list[Call]:
        """The calls of the whole text.

        Raises:
            ProblemError: it is no pipeline.
        """
        found = [self._call()]
        while self._next() == ",":
            self.at += 1
            found.append(self._call())
        if self.at < len(self.text):
            raise self.fault(self.at, f"expected ',' or the end, got '{self.text[self.at]}'")
        return found

    def _next(self) -> str:
        """The next character that is no blank; empty at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _word(self) -> str:
        start = self.at
        while self.at < len(self.text) and (
            self.text[self.at].isalnum() or self.text[self.at] in "-_."
        ):
            self.at += 1
        return self.text[start : self.at]

    def _call(self) -> Call:
        self._next()
        column, name = self.at, self._word()
        if not name:
            raise self.fault(column, "expected the name of a pass")
        begin = self._before + column
        if self._next() != "(":
            return Call(begin, name)
        opened = self.at
        self.at += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise self.fault(opened, f"nested more than {DEEPEST} deep")
        options: list[Option] = []
        nested: list[Call] = []
        while True:
            following = self._next()
            if following == ",":
                self.at += 1
            elif following == ")":
                self.at += 1
                self._depth -= 1
                return Call(begin, name, tuple(options), tuple(nested))
            elif not following:
                raise self.fault(opened, "this parenthesis is never closed")
            else:
                self._argument(opened, options, nested)
                if self._next() not in (",", ")", ""):
                    got = self.text[self.at]
                    raise self.fault(self.at, f"expected ',' or ')', got '{got}'")

    def _argument(self, opened: int, options: list[Option], nested: list[Call]) -> None:
        column = self.at
        key = self._word()
        if self._next() == "=":
            self.at += 1
            quoted = self._next() == '"'
            start = self._before + self.at + quoted
            options.append(Option(self._before + column, key, self._value(opened), start))
        else:
            self.at = column
            nested.append(self._call())

    def _value(self, opened: int) -> str:
        if self._next() == '"':
            return self._quoted()
        start, depth = self.at, 0
        while self.at < len(self.text):
            c = self.text[self.at]
            if depth == 0 and c in ",)":
                return self.text[start : self.at].strip()
            if c == '"':  # of a value inside of the value
                self._quoted()
                continue
            depth += (c == "(") - (c == ")")
            self.at += 1
        raise self.fault(opened, "this parenthesis is never closed")

    def _quoted(self) -> str:
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        except ValueError:
            raise self.fault(self.at, "this quotation is never closed") from None
        return str(value)


def fault(text: str, column: int, message: str) -> ProblemError:
    """An error that points at a column of pipeline text, of which it shows the part around."""
    start, end = max(0, column - SHOWN), column + SHOWN
    before, after = "…" * (start > 0), "…" * (end < len(text))
    shown = before + "".join(c if c.isprintable() else " " for c in text[start:end]) + after
    caret = " " * (len(before) + column - start)
    return ProblemError(f"pipeline, column {column + 1}: {message}\n  {shown}\n  {caret}^")


#: Name of the field that holds the passes of a pass that is made of passes.
NESTED = "passes"


def write_pipeline(passes: Sequence[object]) -> str:
    """The text of a pipeline; `read_pipeline` reads it back."""
    return ",".join(map(str, passes))


def write_call(called: Any) -> str:
    """A pass or an analysis with those of its options that are not at their defaults."""
    written: list[str] = []
    for f in fields(called):
        value = getattr(called, f.name)
        if f.name == NESTED:
            written += map(str, value)
        elif value != f.default:
            written.append(f"{kebab(f.name)}={write_option(value)}")
    return f"{called.name}({','.join(written)})" if written else called.name


def write_option(value: Any) -> str:
    """The value of an option as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Analysis):
        return write_call(value)
    text = value if isinstance(value, str) else _named(value)
    return text if _stands_bare(text) else json.dumps(text)


def _named(value: Any) -> str:
    """Cost models print with their device; solvers are called by their names."""
    shown = str(value)
    name = getattr(value, "name", None)
    return name if isinstance(name, str) and not shown.startswith(name) else shown


def _stands_bare(text: str) -> bool:
    """Whether a value can be written without quotes."""
    depth = 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if depth < 0 or c == '"' or (c == "," and depth == 0):
            return False
    return depth == 0 and text == text.strip()


def kebab(name: str) -> str:
    return name.replace("_", "-")
