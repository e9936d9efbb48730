"""`remat.sac.api.checkpointing`, by its public name."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("remat.sac.api.checkpointing")
