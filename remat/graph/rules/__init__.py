"""Rules that the forward and backward graph of a step must keep, one function per rule.

A rule yields one `Fault` per violation. Nodes are identified by name. Nodes of the joint graph keep
their names, and nodes that a pass added have names that the joint graph lacks.
"""
