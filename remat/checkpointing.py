"""The older public name of `remat.sac`."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("remat.sac")
