"""The step problem: which node runs when, and how often."""
