"""Pipelines as text: names with options in parentheses, passes nested in passes.

What is a pipeline is in `remat.passes.core.pipeline_syntax`; here it becomes passes, and passes text.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from remat.errors import ProblemError, RematError
from remat.passes.core.base import Pass
from remat.passes.core.pipeline_syntax import NESTED, Call, Option, Reader, fault, kebab
from remat.passes.core.state import Analysis


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
    builder = _Builder(text, passes, analyses, read)
    return tuple(builder.make_pass(call) for call in Reader(text).calls())


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes passes and analyses of calls."""

    text: str
    passes: Mapping[str, type[Pass]]
    analyses: Mapping[str, type[Analysis[Any]]]
    read: Mapping[str, Callable[[str], Any]]

    def make_pass(self, call: Call) -> Pass:
        kind = self._look_up(call, self.passes, "pass")
        nests = any(f.name == NESTED for f in fields(kind))
        values = self._options(call, kind, "pass", nests=nests)
        if nests:
            values[NESTED] = tuple(self.make_pass(c) for c in call.nested)
        return self._make(call, kind, values)  # type: ignore[no-any-return]

    def make_analysis(self, option: Option) -> Analysis[Any]:
        """Reads an option that is an analysis, such as the condition of ``when``."""
        call, *more = Reader(option.raw, whole=self.text, before=option.start).calls()
        if more:
            raise fault(self.text, more[0].column, f"'{option.key}' is one analysis, not several")
        kind = self._look_up(call, self.analyses, "analysis")
        values = self._options(call, kind, "analysis", nests=False)
        return self._make(call, kind, values)  # type: ignore[no-any-return]

    def _make(self, call: Call, kind: Any, values: dict[str, Any]) -> Any:
        missing = [
            f.name
            for f in fields(kind)
            if f.default is MISSING and f.default_factory is MISSING and f.name not in values
        ]
        if missing:
            wanted = ", ".join(f"{kebab(m)}=…" for m in missing)
            raise fault(self.text, call.column, f"'{call.name}' needs {wanted}")
        try:
            return kind(**values)
        except RematError as error:
            raise fault(self.text, call.column, str(error)) from None

    def _look_up(self, call: Call, known: Mapping[str, Any], what: str) -> Any:
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

    def _options(self, call: Call, kind: Any, what: str, *, nests: bool) -> dict[str, Any]:
        known = {f.name: f for f in fields(kind) if f.name != NESTED}
        takes = ", ".join(map(kebab, known)) or "none"
        if call.nested and not nests:
            wrong = call.nested[0]
            message = f"{what} '{call.name}' has no option '{wrong.name}'; it takes: {takes}"
            raise fault(self.text, wrong.column, message)
        values: dict[str, Any] = {}
        for option in call.options:
            name, given = option.key.replace("-", "_"), f"{option.key}={option.raw[:40]}"
            if name not in known:
                message = f"{what} '{call.name}' has no option '{given}'; it takes: {takes}"
                raise fault(self.text, option.column, message)
            try:
                values[name] = self._value(name, option, known[name].default)
            except RematError:
                raise
            except ValueError as error:
                message = f"option '{option.key}' of '{call.name}': {error}"
                raise fault(self.text, option.column, message) from None
        return values

    def _value(self, name: str, option: Option, default: Any) -> Any:
        if name == "condition":
            return self.make_analysis(option)
        reader = self.read.get(name)
        return _literal(option.raw, default) if reader is None else reader(option.raw)


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
