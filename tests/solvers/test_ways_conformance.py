"""The kit of problems with ways, run on our own solvers."""

from remat.testing.test_ways_solver import *  # noqa: F403
