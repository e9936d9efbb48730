"""Passes that partition the joint graph, and passes on the forward and backward graphs."""
