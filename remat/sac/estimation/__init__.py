"""Estimate, for each module of a model, the memory that checkpointing frees, and the recompute time."""
