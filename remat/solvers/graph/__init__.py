"""This package solves the graph problem: which values of a step to save, and which to recompute."""
