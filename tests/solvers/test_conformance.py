"""The conformance suite on our own solvers; ``pytest --solver=NAME`` picks one."""

from remat.testing.test_solver import *  # noqa: F403
from remat.testing.test_solver import _knapsacks_only as _knapsacks_only
