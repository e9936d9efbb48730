"""The conformance suite of graph solvers on our own; ``pytest --solver=NAME`` picks one."""

from remat.testing.test_graph_solver import *  # noqa: F403
