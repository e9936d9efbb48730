"""Alias of `remat.sac` under its older public name."""

import importlib
import sys

# Both names are one module object, so that a class imported under either name is one class.
sys.modules[__name__] = importlib.import_module("remat.sac")
