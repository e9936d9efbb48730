"""Conformance suite that every solver must pass, and the pytest plugin that runs it."""
