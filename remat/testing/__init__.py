"""The conformance suite (tests that every solver must pass), and the pytest plugin that runs the suite."""
