"""Capture, analyse and verify joint graphs, which hold forward and backward of a training step.

The analyses find the roles of placeholders, properties of operators, storages, costs and lifetimes.
"""
