"""How a model is called: positional arguments as a tuple, keyword arguments as a dict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from remat.errors import CaptureError


def read_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call, as they are given to ``remat.capture``.

    Raises:
        CaptureError: they are something else, such as a tensor without its tuple; the message says
            what to write.
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
    """Why a class is no model, and what to pass instead; empty for everything but classes."""
    if not isinstance(model, type):
        return ""
    return f"model '{model.__name__}' is a class; pass an instance: {model.__name__}()"


def why_not_callable(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Why a model does not take these arguments; empty where it does, or where that is not known."""
    try:
        signature = inspect.signature(
            model.forward if isinstance(model, torch.nn.Module) else model
        )
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f"it takes {signature}, but {error}"
    return ""
