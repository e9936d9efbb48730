"""Run graphs and steps with real values: random inputs, comparison of results, and memory."""
