"""Operators and functions by name, from tables and PyTorch's registries: nothing else is looked up."""

from __future__ import annotations

import builtins
import functools
import importlib
import keyword
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.purity import overload_names

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)

#: Arithmetic on sizes, and elements of tuples.
_FUNCTIONS: dict[str, str] = {
    "operator": "abs add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ "
    "pos pow rshift sub truediv xor",
    "math": "ceil floor trunc sqrt cos cosh sin sinh tan tanh asin acos atan exp log log2",
    "torch": "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_sqrt _sym_cos "
    "_sym_cosh _sym_sin _sym_sinh _sym_tan _sym_tanh _sym_asin _sym_acos _sym_atan _sym_log2",
    "builtins": "abs max min pow round",
}


def write_target(target: Any) -> str:
    """The dotted name of an operator or function.

    Raises:
        ProblemError: it is none that could be looked up again.
    """
    name = _name(target)
    if name is None:
        raise ProblemError(
            f"{target!r} has no text form: expected an operator of torch.ops, or a function of "
            "operator, math or torch.sym_*"
        )
    return name


@functools.cache
def _name(target: Any) -> str | None:
    if isinstance(target, torch_compat.OpOverload):
        name = str(target)
    elif isinstance(target, torch_compat.HigherOrderOperator):
        name = f"higher_order.{target.name()}"  # type: ignore[no-untyped-call]
    else:
        return next((name for name, known in _functions().items() if known is target), None)
    try:
        read_target(name)
    except LookupError:
        return None
    return name


def write_call(name: str) -> str:
    """A target where it is called or handed over: as it is, unless Python reserves part of it."""
    return f'op("{name}")' if any(map(keyword.iskeyword, name.split("."))) else name


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    modules: dict[str, Any] = {m.__name__: m for m in (operator, math, torch, builtins)}
    return {
        f"{where}.{name}": getattr(modules[where], name)
        for where, names in _FUNCTIONS.items()
        for name in names.split()
    }


def read_target(name: str) -> Any:
    """The operator or function with a dotted name.

    Raises:
        LookupError: there is none; the message says what was expected.
    """
    if not _NAME.fullmatch(name):
        raise LookupError("a name such as aten.mm.default")
    if name in _functions():
        return _functions()[name]
    library, *rest = name.split(".")
    if library == "higher_order":
        if len(rest) != 1:
            raise LookupError("a higher-order operator as higher_order.name")
        found: Any = _registered(library, lambda: torch_compat.higher_order_ops.get(rest[0]))
        if isinstance(found, torch_compat.HigherOrderOperator):
            return found
        raise LookupError(
            f"a higher-order operator that is registered in this process; '{rest[0]}' is none: "
            "import what defines it first"
        )
    if library in _FUNCTIONS:
        raise LookupError(f"one of {library}.{{{', '.join(_FUNCTIONS[library].split())}}}")
    if len(rest) != 2:
        raise LookupError("an operator as namespace.name.overload")
    found = _registered(library, lambda: _overload(library, *rest))
    if isinstance(found, torch_compat.OpOverload):
        return found
    there = overload_names(library, rest[0])
    if there:
        raise LookupError(f"one of {library}.{rest[0]}.{{{', '.join(there)}}}")
    raise LookupError(
        f"an operator that is registered in this process; library '{library}' has no "
        f"'{rest[0]}': import what defines it first"
    )


def _overload(namespace: str, name: str, overload: str) -> Any:
    """An operator, if the dispatcher knows its schema; torch.ops is not asked for anything else."""
    if overload not in overload_names(namespace, name):
        return None
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _registered(namespace: str, find: Callable[[], Any]) -> Any:
    """What is found at once, or after parts of PyTorch that register such operators were imported."""
    found = find()
    for module in torch_compat.REGISTERED_BY.get(namespace, ()):
        if found is not None:
            break
        importlib.import_module(module)
        found = find()
    return found
