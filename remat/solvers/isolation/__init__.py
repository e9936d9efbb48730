"""Solvers in processes of their own."""
