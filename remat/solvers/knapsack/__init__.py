"""Knapsacks: which items to save within a capacity."""
