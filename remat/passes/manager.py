"""The pass manager: a sequence of passes, run as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from remat.errors import PassError, ProblemError, RematError
from remat.graph.joint import JointGraph
from remat.passes.base import Pass, PassResult, Stage, State


@dataclass(frozen=True, slots=True)
class PassManager:
    """A pipeline.

    Attributes:
        passes: the passes, in order.
    """

    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))
        reached: Pass | None = None
        for p in self.passes:
            if not isinstance(p, Pass):
                raise ProblemError(f"a pipeline is made of Pass instances, got {p!r}")
            if p.stage is Stage.ANY:
                continue
            if reached is not None and p.stage < reached.stage:
                raise ProblemError(
                    f"pass '{p.name}' ({p.stage.name.lower()} stage) stands after '{reached.name}' "
                    f"({reached.stage.name.lower()} stage), whose work it would undo; put it before"
                )
            reached = p

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    def run(
        self,
        joint: JointGraph | State,
        *,
        in_place: bool = False,
        on_pass: Callable[[Pass, PassResult, float], None] | None = None,
    ) -> PassResult:
        """Runs the passes in order.

        Args:
            joint: a joint graph, or the state that another pipeline ended in.
            in_place: work on the caller's graph instead of on a copy of it.
            on_pass: called after each pass with the pass, its result and the seconds it took.

        Raises:
            PassError: a pass failed; the error names it and those that ran before. The caller's
                graph is as it was unless ``in_place``.
        """
        state = joint if isinstance(joint, State) else State(joint=joint)
        if not in_place:
            state = state.changed(joint=state.joint.copy()) if state.forward is None else state
        modified = False
        done: list[str] = []
        for p in self.passes:
            start = time.perf_counter()
            try:
                result = p.run(state)
            except PassError:
                raise
            except RematError as error:
                # Which pass it was matters less here than what is wrong; the class is kept.
                error.add_note(f"while running pass '{p.name}' after: {', '.join(done) or 'none'}")
                raise
            except Exception as error:
                raise PassError(p.name, f"{type(error).__name__}: {error}", done) from error
            if not isinstance(result, PassResult):
                raise PassError(
                    p.name,
                    f"run() returned {type(result).__name__}, expected PassResult; "
                    "end it with `return PassResult(state=..., modified=...)`",
                    done,
                )
            state, modified = result.state, modified or result.modified
            done.append(p.name)
            if on_pass is not None:
                on_pass(p, result, time.perf_counter() - start)
        return PassResult(state=state, modified=modified, detail=", ".join(done))

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        passes: Mapping[str, type[Pass]] | None = None,
        read: Mapping[str, Callable[[str], Any]] | None = None,
    ) -> PassManager:
        """Reads a pipeline: names separated by commas, options in parentheses.

        Args:
            text: for example ``"dce,cse,min-cut(ban-reductions=false),partition"``.
            passes: the passes that may be named; our own where None.
            read: how to read options that are neither numbers, booleans nor text, by option name.

        Raises:
            ProblemError: the text cannot be read; the message points at the column.
        """
        if passes is None:
            from remat.passes import builtin_passes

            passes = {p.name: p for p in builtin_passes()}
        return cls(tuple(_build(call, text, passes, read or {}) for call in _calls(text)))


def _fail(text: str, column: int, message: str) -> ProblemError:
    return ProblemError(f"pipeline, column {column + 1}: {message}\n  {text}\n  {' ' * column}^")


def _calls(text: str) -> list[tuple[int, str, list[tuple[int, str]]]]:
    """Splits pipeline text into (column, name, [(column, option)])."""
    calls: list[tuple[int, str, list[tuple[int, str]]]] = []
    i, n = 0, len(text)
    while True:
        while i < n and text[i].isspace():
            i += 1
        start = i
        while i < n and (text[i].isalnum() or text[i] in "-_."):
            i += 1
        name = text[start:i]
        if not name:
            raise _fail(text, min(start, n), "expected the name of a pass")
        options: list[tuple[int, str]] = []
        if i < n and text[i] == "(":
            open_at = i
            close = text.find(")", i)
            if close < 0:
                raise _fail(text, open_at, "this parenthesis is never closed")
            column = i + 1
            for part in text[i + 1 : close].split(","):
                if part.strip():
                    options.append((column + len(part) - len(part.lstrip()), part.strip()))
                column += len(part) + 1
            i = close + 1
        calls.append((start, name, options))
        while i < n and text[i].isspace():
            i += 1
        if i == n:
            return calls
        if text[i] != ",":
            raise _fail(text, i, f"expected ',' or the end, got '{text[i]}'")
        i += 1


def _build(
    call: tuple[int, str, list[tuple[int, str]]],
    text: str,
    passes: Mapping[str, type[Pass]],
    read: Mapping[str, Callable[[str], Any]],
) -> Pass:
    import difflib

    column, name, options = call
    kind = passes.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, passes, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise _fail(text, column, f"no pass is called '{name}'{hint} Known: {', '.join(passes)}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for at, option in options:
        key, equals, raw = option.partition("=")
        field_name = key.strip().replace("-", "_")
        if not equals or field_name not in known:
            takes = ", ".join(f.replace("_", "-") for f in known) or "none"
            raise _fail(text, at, f"pass '{name}' has no option '{option}'; it takes: {takes}")
        try:
            reader = read.get(field_name)
            value = raw.strip()
            values[field_name] = (
                reader(value) if reader is not None else _literal(value, known[field_name].default)
            )
        except RematError:
            raise
        except ValueError as error:
            raise _fail(text, at, f"option '{key.strip()}' of '{name}': {error}") from None
    return kind(**values)


def _literal(text: str, default: Any) -> Any:
    """A value of the type of the option's default."""
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ValueError(f"expected true or false, got '{text}'")
        return text == "true"
    if isinstance(default, int):
        return int(text)
    if isinstance(default, float):
        return float(text)
    return text
