"""Builds the compiled kernel where a C++17 compiler exists; remat works without it."""

from __future__ import annotations

import glob
import sys

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # an offline build without isolation: everything but the kernel
    print("pybind11 is missing: remat is installed without its compiled kernel", file=sys.stderr)
    extensions = []
else:
    extensions = [
        Pybind11Extension(
            "remat.solvers._kernel",
            ["remat/solvers/_native/module.cpp"],
            depends=sorted(glob.glob("remat/solvers/_native/*.hpp")),
            cxx_std=17,
            extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-pthread"],
            extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
            # Without a compiler the build goes on, with a warning, and the solver says why it is missing.
            optional=True,
        )
    ]

setup(ext_modules=extensions)
