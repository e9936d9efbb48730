"""Passes that decide which values are saved and which are recomputed."""
