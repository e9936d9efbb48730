"""Proposers: each finds candidates of one graph in its own way."""
