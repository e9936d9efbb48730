"""Plan many training steps with several solvers and budgets, and compare the plans in tables."""
