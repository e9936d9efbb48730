"""This package contains the conformance suite (tests that every solver must pass), and a pytest plugin that runs it."""
