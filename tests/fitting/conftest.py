"""The process of the tests of experiments, for tests that plan in another process."""

from tests.experiments.conftest import pool

__all__ = ["pool"]
