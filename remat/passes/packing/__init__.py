"""Saved-tensor hooks: pairs of user functions, and the ready-made pairs."""

from remat.passes.packing.pairs import HooksWarning as HooksWarning
from remat.passes.packing.pairs import SavedTensorHooks as SavedTensorHooks
