"""The compiled kernel, where it was built."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def kernel() -> ModuleType | None:
    """The compiled module, None where remat was installed without a C++17 compiler."""
    try:
        from remat.solvers import _kernel
    except ImportError:
        return None
    return _kernel
