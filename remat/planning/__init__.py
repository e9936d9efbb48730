"""Planning: compute plans for a joint graph, frontiers of plans over all budgets, and comparisons of solvers."""
