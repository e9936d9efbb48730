"""Estimates, for each module, of the memory that checkpointing frees and of the recompute time."""
