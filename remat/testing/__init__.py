"""Conformance suite for solvers, and the pytest plugin that runs it."""
