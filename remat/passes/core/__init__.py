"""What a pass is, what it may ask about a graph, and the manager that runs a pipeline of them."""
