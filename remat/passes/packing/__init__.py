"""Hooks that pack and unpack saved tensors: pairs of the user's functions, and ready-made pairs."""
