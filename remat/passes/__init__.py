"""Passes over joint graphs, and the pipelines that run passes."""
