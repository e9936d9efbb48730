"""One search: proposers find candidates of a graph, measures tell their bytes, and a pool chooses among them."""
