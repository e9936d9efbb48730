"""Solvers and budgets compared over many steps."""
