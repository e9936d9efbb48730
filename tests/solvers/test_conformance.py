"""The conformance suite on our own solvers; ``pytest --solver=NAME`` picks one."""

from remat.testing.test_solver import *  # noqa: F403
