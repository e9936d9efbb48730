"""The schedule problem: which node runs when, and how often."""
