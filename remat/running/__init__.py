"""Run graphs and steps with real values: create random inputs, compare results, measure memory."""
