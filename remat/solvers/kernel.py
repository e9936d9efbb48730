"""The compiled kernel, if it was built."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType


@cache
def kernel() -> ModuleType | None:
    """The compiled module, None where remat was installed without a C++17 compiler."""
    try:
        return importlib.import_module("remat.solvers._kernel")
    except ImportError:
        return None


def missing() -> str | None:
    """Reason why there is no kernel, with a remedy; None if there is one."""
    if kernel() is not None:
        return None
    return (
        "its kernel was not compiled when remat was installed: install a C++17 compiler and the headers of Python (python3-dev), and "
        "reinstall remat (pip install --force-reinstall --no-deps remat)"
    )
