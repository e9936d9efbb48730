"""Capture a model's joint graphs, and find the lines of the user's code that their nodes come from."""
