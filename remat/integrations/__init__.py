"""Entry points into PyTorch: the backend, the partitioner, saved plans, its knapsack solver."""
