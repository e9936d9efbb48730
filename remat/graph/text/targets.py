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
        return _names().get(target)
    return name if _NAME.fullmatch(name) and is_target(name) else None


def write_call(name: str) -> str:
    """A target where it is called or handed over: as it is, unless Python reserves part of it."""
    return f'op("{name}")' if any(map(keyword.iskeyword, name.split("."))) else name


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    modules: dict[str, Any] = {
        "operator": operator,
        "math": math,
        "torch": torch,
        "builtins": builtins,
    }
    return {
        f"{where}.{name}": getattr(modules[where], name)
        for where, names in _FUNCTIONS.items()
        for name in names.split()
    }


@functools.cache
def _names() -> dict[Any, str]:
    return {function: name for name, function in reversed(_functions().items())}


def is_target(name: str) -> bool:
    """Whether there is such an operator or function, as far as is known in this process."""
    try:
        read_target(name)
    except LookupError:
        return False
    return True


def read_target(name: str) -> Any:
    """The operator or function with a dotted name.

    Raises:
        LookupError: there is none; the message says what was expected.
    """
    if not _NAME.fullmatch(name):
        raise LookupError("a name such as aten.mm.default")
    if name in _functions():
        return _functions()[name]
    parts = name.split(".")
    if parts[0] == "higher_order":
        if len(parts) != 2:
            raise LookupError("a higher-order operator as higher_order.name")
        found: Any = _registered(parts[0], lambda: torch_compat.higher_order_ops.get(parts[1]))
        if isinstance(found, torch_compat.HigherOrderOperator):
            return found
        raise LookupError(
            f"a higher-order operator that is registered in this process; '{parts[1]}' is none: "
            "import what defines it first"
        )
    if parts[0] in _FUNCTIONS:
        raise LookupError(f"one of {parts[0]}.{{{', '.join(_FUNCTIONS[parts[0]].split())}}}")
    if len(parts) != 3:
        raise LookupError("an operator as namespace.name.overload")
    found = _registered(parts[0], lambda: _overload(*parts))
    if isinstance(found, torch_compat.OpOverload):
        return found
    there = _overloads(parts[0], parts[1])
    if there:
        raise LookupError(f"one of {parts[0]}.{parts[1]}.{{{', '.join(there)}}}")
    raise LookupError(
        f"an operator that is registered in this process; library '{parts[0]}' has no "
        f"'{parts[1]}': import what defines it first"
    )


def _overloads(namespace: str, name: str) -> list[str]:
    schemas = torch_compat.jit_get_schemas_for_operator(f"{namespace}::{name}")
    return sorted(s.overload_name or "default" for s in schemas)


def _overload(namespace: str, name: str, overload: str) -> Any:
    """An operator, if the dispatcher knows its schema; torch.ops is not asked for anything else."""
    if overload not in _overloads(namespace, name):
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
