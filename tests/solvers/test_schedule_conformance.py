"""The kit of step problems, run on our own solvers."""

from remat.testing.test_schedule_solver import *  # noqa: F403
