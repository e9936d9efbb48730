"""Passes that tidy and mark the joint graph."""
