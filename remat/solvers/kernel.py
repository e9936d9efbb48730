"""Import the *kernel*: the solvers' optional C++ extension module `remat.solvers._kernel`."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

from remat.errors import SolverError


@cache
def kernel() -> ModuleType | None:
    """Return the compiled C++ module; None if remat was installed without a C++17 compiler."""
    try:
        return importlib.import_module("remat.solvers._kernel")
    except ImportError:
        return None


def required() -> ModuleType:
    """Return the compiled C++ module; raise `SolverError` if it is missing."""
    module = kernel()
    if module is None:
        raise SolverError("native", f"solver 'native': {missing()}")
    return module


def missing() -> str | None:
    """Return why the compiled kernel is missing, with a remedy; None if it exists."""
    if kernel() is not None:
        return None
    return (
        "its kernel was not compiled when remat was installed: install a C++17 compiler and the headers of Python (python3-dev), and "
        "reinstall remat (pip install --force-reinstall --no-deps remat)"
    )
