"""Pipelines as text: names with options in parentheses, passes nested in passes.

    pipeline := call {"," call}
    call     := name ["(" [argument {"," argument}] ")"]
    argument := option "=" value | call

A value ends at the next comma or closing parenthesis outside of parentheses of its own; one that
would not survive that is written in double quotes, as in JSON.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from remat.errors import ProblemError, RematError
from remat.passes.analysis import Analysis
from remat.passes.base import Pass

#: Passes may be nested this deep in text.
DEEPEST = 50
#: Name of the field that holds the passes of a pass that is made of passes.
NESTED = "passes"


def write_pipeline(passes: Sequence[Pass]) -> str:
    """The text of a pipeline; `read_pipeline` reads it back."""
    return ",".join(map(str, passes))


def write_call(called: Pass | Analysis[Any]) -> str:
    """A pass or an analysis with those of its options that are not at their defaults."""
    written: list[str] = []
    for f in fields(called):  # type: ignore[arg-type]
        value = getattr(called, f.name)
        if f.name == NESTED:
            written += map(str, value)
        elif value != f.default:
            written.append(f"{_kebab(f.name)}={write_option(value)}")
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


def read_pipeline(
    text: str,
    *,
    passes: Mapping[str, type[Pass]],
    analyses: Mapping[str, type[Analysis[Any]]],
    read: Mapping[str, Callable[[str], Any]],
) -> tuple[Pass, ...]:
    """Reads a pipeline.

    Args:
        text: the text.
        passes: passes by name.
        analyses: analyses by name, for options that are one.
        read: how to read options that are neither numbers, booleans, text nor analyses, by name.

    Raises:
        ProblemError: the text cannot be read; the message points at the column.
    """
    if not isinstance(text, str):
        raise ProblemError(f"a pipeline is text, got {type(text).__name__}: {text!r}")
    reader = _Reader(text)
    calls = reader.calls(until_end=True)
    builder = _Builder(text, passes, analyses, read)
    return tuple(builder.make_pass(call) for call in calls)


@dataclass(frozen=True, slots=True)
class _Call:
    """``name(options, nested)`` with the columns where they stand."""

    column: int
    name: str
    options: tuple[tuple[int, str, str], ...] = ()
    nested: tuple[_Call, ...] = ()


class _Reader:
    """Splits text into calls; columns count from 0."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self._depth = text, 0, 0

    def calls(self, *, until_end: bool) -> list[_Call]:
        found = [self._call()]
        while self._next() == ",":
            self.at += 1
            found.append(self._call())
        if until_end and self.at < len(self.text):
            raise fault(self.text, self.at, f"expected ',' or the end, got '{self.text[self.at]}'")
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

    def _call(self) -> _Call:
        self._next()
        column, name = self.at, self._word()
        if not name:
            raise fault(self.text, column, "expected the name of a pass")
        if self._next() != "(":
            return _Call(column, name)
        opened = self.at
        self.at += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise fault(self.text, opened, f"nested more than {DEEPEST} deep")
        options: list[tuple[int, str, str]] = []
        nested: list[_Call] = []
        while True:
            following = self._next()
            if following == ",":
                self.at += 1
            elif following == ")":
                self.at += 1
                self._depth -= 1
                return _Call(column, name, tuple(options), tuple(nested))
            elif not following:
                raise fault(self.text, opened, "this parenthesis is never closed")
            else:
                self._argument(opened, options, nested)
                if self._next() not in (",", ")", ""):
                    got = self.text[self.at]
                    raise fault(self.text, self.at, f"expected ',' or ')', got '{got}'")

    def _argument(
        self, opened: int, options: list[tuple[int, str, str]], nested: list[_Call]
    ) -> None:
        column = self.at
        key = self._word()
        if self._next() == "=":
            self.at += 1
            options.append((column, key, self._value(opened)))
        else:
            self.at = column
            nested.append(self._call())

    def _value(self, opened: int) -> str:
        if self._next() == '"':
            try:
                value, length = json.JSONDecoder().raw_decode(self.text[self.at :])
            except ValueError:
                raise fault(self.text, self.at, "this quotation is never closed") from None
            self.at += length
            return str(value)
        start, depth = self.at, 0
        while self.at < len(self.text):
            c = self.text[self.at]
            if depth == 0 and c in ",)":
                return self.text[start : self.at].strip()
            depth += (c == "(") - (c == ")")
            self.at += 1
        raise fault(self.text, opened, "this parenthesis is never closed")


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes passes and analyses of calls."""

    text: str
    passes: Mapping[str, type[Pass]]
    analyses: Mapping[str, type[Analysis[Any]]]
    read: Mapping[str, Callable[[str], Any]]

    def make_pass(self, call: _Call) -> Pass:
        kind = self._look_up(call, self.passes, "pass")
        nests = any(f.name == NESTED for f in fields(kind))
        values = self._options(call, kind, "pass", nests=nests)
        if nests:
            values[NESTED] = tuple(self.make_pass(c) for c in call.nested)
        return self._make(call, kind, values)  # type: ignore[no-any-return]

    def make_analysis(self, text: str, column: int) -> Analysis[Any]:
        """Reads an option that is an analysis, such as the condition of ``when``."""
        reader = _Reader(text)
        call = reader.calls(until_end=True)[0]
        call = _Call(column, call.name, tuple((column, k, v) for _, k, v in call.options))
        kind = self._look_up(call, self.analyses, "analysis")
        values = self._options(call, kind, "analysis", nests=False)
        return self._make(call, kind, values)  # type: ignore[no-any-return]

    def _make(self, call: _Call, kind: Any, values: dict[str, Any]) -> Any:
        missing = [
            f.name
            for f in fields(kind)
            if f.default is MISSING and f.default_factory is MISSING and f.name not in values
        ]
        if missing:
            wanted = ", ".join(f"{_kebab(m)}=…" for m in missing)
            raise fault(self.text, call.column, f"'{call.name}' needs {wanted}")
        try:
            return kind(**values)
        except RematError as error:
            raise fault(self.text, call.column, str(error)) from None

    def _look_up(self, call: _Call, known: Mapping[str, Any], what: str) -> Any:
        kind = known.get(call.name)
        if kind is None:
            near = difflib.get_close_matches(call.name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise fault(
                self.text,
                call.column,
                f"no {what} is called '{call.name}'{hint} Known: {', '.join(known)}",
            )
        return kind

    def _options(self, call: _Call, kind: Any, what: str, *, nests: bool) -> dict[str, Any]:
        known = {f.name: f for f in fields(kind) if f.name != NESTED}
        takes = ", ".join(map(_kebab, known)) or "none"
        if call.nested and not nests:
            wrong = call.nested[0]
            message = f"{what} '{call.name}' has no option '{wrong.name}'; it takes: {takes}"
            raise fault(self.text, wrong.column, message)
        values: dict[str, Any] = {}
        for column, key, raw in call.options:
            name = key.replace("-", "_")
            if name not in known:
                message = f"{what} '{call.name}' has no option '{key}={raw}'; it takes: {takes}"
                raise fault(self.text, column, message)
            try:
                values[name] = self._value(name, raw, known[name].default, column)
            except RematError:
                raise
            except ValueError as error:
                message = f"option '{key}' of '{call.name}': {error}"
                raise fault(self.text, column, message) from None
        return values

    def _value(self, name: str, raw: str, default: Any, column: int) -> Any:
        if name == "condition":
            return self.make_analysis(raw, column)
        reader = self.read.get(name)
        return _literal(raw, default) if reader is None else reader(raw)


def fault(text: str, column: int, message: str) -> ProblemError:
    """An error that points at a column of pipeline text."""
    return ProblemError(f"pipeline, column {column + 1}: {message}\n  {text}\n  {' ' * column}^")


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _literal(text: str, default: Any) -> Any:
    """A value of the type of the option's default."""
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ValueError(f"expected true or false, got '{text}'")
        return text == "true"
    for kind, what in ((int, "a whole number"), (float, "a number")):
        if isinstance(default, kind):
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"expected {what}, got '{text[:40]}'") from None
    return text
