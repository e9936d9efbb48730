"""Checkpointing policies, and the context managers that apply policies in checkpointed code."""
