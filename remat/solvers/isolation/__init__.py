"""Run solvers in processes of their own."""
