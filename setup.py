"""Builds the compiled kernel where a C++17 compiler exists; remat works without it."""

from __future__ import annotations

import glob
import os
import sys

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # an offline build without isolation: everything but the kernel
    print("pybind11 is missing: remat is installed without its compiled kernel", file=sys.stderr)
    extensions = []
else:
    options = [] if sys.platform == "win32" else ["-O3", "-pthread"]
    links = [] if sys.platform == "win32" else ["-pthread"]
    # Set by `make sanitize`: any finding of a sanitizer ends the process. Python's own -fwrapv would hide
    # overflows.
    sanitized = bool(os.environ.get("REMAT_SANITIZE"))
    if sanitized:
        checks = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
        options += [*checks, "-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer"]
        options.append("-D_GLIBCXX_ASSERTIONS")
        links += checks
    extensions = [
        Pybind11Extension(
            "remat.solvers._kernel",
            ["remat/solvers/_native/module.cpp"],
            depends=sorted(glob.glob("remat/solvers/_native/*.hpp")),
            cxx_std=17,
            extra_compile_args=options,
            extra_link_args=links,
            # Without a compiler the build goes on, with a warning, and the solver says why it is missing.
            optional=not sanitized,
        )
    ]

setup(ext_modules=extensions)
