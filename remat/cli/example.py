"""One call of a model, wherever it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One call of a model: what `remat.capture` is given.

    Attributes:
        model: a module or a function.
        args: positional arguments.
        kwargs: keyword arguments.
        title: what it is, in one line, for people.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
