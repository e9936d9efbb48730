"""Checkpointing policies, and the region that follows them."""
