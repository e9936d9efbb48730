"""Saved-tensor hooks as users give them: pairs of functions, and the ready-made ones."""

from remat.passes.packing.pairs import HooksWarning as HooksWarning
from remat.passes.packing.pairs import SavedTensorHooks as SavedTensorHooks
