"""Check a model, and the arguments to call the model with, before a capture."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from remat.errors import CaptureError


def read_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a user gave to ``remat.capture`` for a model, as a tuple and a dict.

    Raises:
        CaptureError: ``args`` is not a sequence (but a single tensor, for example), or ``kwargs``
            is neither None nor a dict with string keys. The message says what to write.
    """
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        write = "(x,), with a comma, for one argument x"
        if args is None:
            write = "() for none"
        elif isinstance(args, Mapping):
            write = "(), kwargs for keyword arguments alone"
        raise CaptureError(
            f"args is a {type(args).__name__}; expected a tuple of positional arguments: write {write}"
        )
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    ):
        raise CaptureError(
            f"kwargs is a {type(kwargs).__name__}; expected a dict of keyword arguments by name; "
            "positional ones belong into args: (x, y)"
        )
    return tuple(args), dict(kwargs or {})


def why_no_instance(model: object) -> str:
    """Return an error message if the model is a class; an empty text if it is an instance."""
    if not isinstance(model, type):
        return ""
    return f"model '{model.__name__}' is a class; pass an instance: {model.__name__}()"


def why_not_callable(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return why a model's signature refuses the arguments; empty if the signature accepts them or cannot be read."""
    try:
        signature = inspect.signature(
            # `Module.__call__` accepts any arguments; only `forward` has the model's signature.
            model.forward if isinstance(model, torch.nn.Module) else model
        )
    # Some builtin callables have no signature that Python can read.
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f"it takes {signature}, but {error}"
    return ""
