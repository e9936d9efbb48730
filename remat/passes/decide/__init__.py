"""Passes that decide what is kept and what is recomputed."""
