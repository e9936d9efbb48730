"""A joint graph as problems in integers."""
