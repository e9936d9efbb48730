"""Saved-tensor hooks: pairs of user functions, and the ready-made pairs."""
