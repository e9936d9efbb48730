"""One search: proposers find candidates of a graph, measures compute their peaks, and a pool chooses among them."""
