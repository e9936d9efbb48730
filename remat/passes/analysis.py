"""Analyses: what is known about a graph, computed on demand and dropped when the graph changes.

An analysis is a frozen dataclass whose fields are its parameters, so that an instance is its own
key: ``state.get(Classification())``, ``state.get(GraphProblemOf(cost=Flops()))``. What it returns is
typed by the key. Nobody stores a result by hand: results live with the graphs that they are about
(`Known`), are dropped when those are edited, and cannot be asked for while an edit is under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from remat.errors import ProblemError

if TYPE_CHECKING:
    from remat.passes.base import State

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: Who is told that an analysis is about to be computed (True), or was (False); see `watching`.
_WATCHERS: ContextVar[tuple[Callable[[Analysis[Any], bool], None], ...]] = ContextVar(
    "_WATCHERS", default=()
)


class Analysis(ABC, Generic[T_co]):
    """Base of analyses: subclass it as a frozen dataclass and implement `compute`.

    An analysis that yields a truth value can be the condition of ``when`` and ``unless``.

    Attributes:
        name: kebab-case name, in pipelines and tables.
        summary: one line for ``remat passes``.
        of_halves: whether it is about forward and backward after partitioning rather than about the
            joint graph.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    of_halves: ClassVar[bool] = False

    @abstractmethod
    def compute(self, state: State) -> T_co:
        """Computes the analysis; it may ask the state for others, and changes nothing."""


@dataclass(slots=True)
class _Entry:
    value: Any
    asked: set[Analysis[Any]]


@dataclass(slots=True, eq=False)
class Known:
    """What is known about one graph, or one pair of halves.

    Attributes:
        owner: what the results are about; who holds another one needs another `Known`.
        edits: how often the graphs were changed inside of an edit.
    """

    owner: tuple[Any, ...]
    edits: int = 0
    _entries: dict[Analysis[Any], _Entry] = field(default_factory=dict)
    _computing: list[set[Analysis[Any]]] = field(default_factory=list)
    _editor: str | None = None

    def get(self, key: Analysis[T], state: State) -> T:
        """The result of an analysis, computed where it is not known yet.

        Raises:
            ProblemError: the graph is being edited, so that any answer would soon be stale.
        """
        if self._editor is not None:
            raise ProblemError(
                f"analysis '{key.name}' was asked for inside `with state.edit()`, where the graph is "
                "changing; ask before the edit begins, or after it has ended"
            )
        if self._computing:
            self._computing[-1].add(key)
        entry = self._entries.get(key)
        if entry is None:
            watchers = _WATCHERS.get()
            for watch in watchers:
                watch(key, True)
            self._computing.append(set())
            try:
                value = key.compute(state)
            finally:
                asked = self._computing.pop()
                for watch in watchers:
                    watch(key, False)
            entry = self._entries[key] = _Entry(value, asked)
        return cast(T, entry.value)

    def begin_edit(self) -> None:
        if self._editor is not None:
            raise ProblemError("this graph is being edited already: `state.edit()` does not nest")
        self._editor = "edit"

    def end_edit(self, *, modified: bool, preserves: Sequence[type[Analysis[Any]]]) -> None:
        """Ends an edit; what is not preserved, or was computed from what is not, is dropped."""
        self._editor = None
        if not modified:
            return
        self.edits += 1
        kept = {k: e for k, e in self._entries.items() if isinstance(k, tuple(preserves))}
        while True:
            sound = {k: e for k, e in kept.items() if all(a in kept for a in e.asked)}
            if len(sound) == len(kept):
                break
            kept = sound
        self._entries = kept

    def names(self) -> tuple[str, ...]:
        """Names of what is known now, in the order in which it was computed."""
        return tuple(key.name for key in self._entries)

    def results(self) -> tuple[tuple[Analysis[Any], Any], ...]:
        """What is known now: each analysis with its result, in the order they were computed in."""
        return tuple((key, entry.value) for key, entry in self._entries.items())


@contextmanager
def watching(watch: Callable[[Analysis[Any], bool], None]) -> Iterator[None]:
    """Calls ``watch`` right before (True) and after (False) each analysis that is computed."""
    token = _WATCHERS.set((*_WATCHERS.get(), watch))
    try:
        yield
    finally:
        _WATCHERS.reset(token)
