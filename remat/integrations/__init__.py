"""Entry points into PyTorch: the backend, the partitioner, and the knapsack solver."""
