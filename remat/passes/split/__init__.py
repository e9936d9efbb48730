"""Passes that cut the joint graph into forward and backward, and order what they hold."""
