"""Checkpointing policies, and the contexts that apply them to a checkpointed region."""
