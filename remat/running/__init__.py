"""Run graphs and training steps on real values: create random inputs, compare results, measure memory."""
