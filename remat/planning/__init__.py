"""Planning: compute plans, frontiers and comparisons of solvers for a joint graph."""

from remat.planning.plan import Plan as Plan
