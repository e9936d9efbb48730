"""From a model to its joint graph, and what the graph knows of the user's code."""
