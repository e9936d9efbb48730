"""Storages behind the values of graphs: owners, lifetimes, and the bytes alive at each program point."""
