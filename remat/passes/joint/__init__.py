"""Passes on the joint graph, such as common subexpression elimination and chunks of the loss."""
