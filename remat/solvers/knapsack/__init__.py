"""This package solves knapsacks: which items to save within a capacity."""
