"""Instances: problems in files."""
