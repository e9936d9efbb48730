"""Estimates of the memory that checkpointing each module frees, and of the time it takes."""
