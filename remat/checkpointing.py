"""Alias of `remat.sac` under its older public name."""

import importlib
import sys

# Importing ``remat.checkpointing`` then returns the module `remat.sac` itself, not a copy of its names.
sys.modules[__name__] = importlib.import_module("remat.sac")
