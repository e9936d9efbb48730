"""Planning: compute plans for a joint graph, frontiers of plans over all budgets, and comparisons of solvers."""

from remat.planning.plan import Plan as Plan
