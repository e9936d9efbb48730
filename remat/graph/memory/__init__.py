"""Find the storages behind the values of graphs, their lifetimes, and the bytes alive at each program point."""
