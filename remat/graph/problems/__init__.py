"""Convert joint graphs to the optimisation problems in integers that solvers solve."""
