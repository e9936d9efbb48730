"""One call of a model, from the user's code or from `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One call of a model: the model and arguments for `remat.capture`, and a title to show to the user."""

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
