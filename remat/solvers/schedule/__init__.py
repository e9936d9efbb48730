"""This package solves the schedule problem: which node runs when, and how often."""
