"""Rules that the forward and backward graph of a step must obey, one function per rule.

A rule yields one `Fault` per violation. Rules find a node's counterpart in the joint graph by name:
a node copied from the joint graph keeps its name there. Nodes that a pass added have names that the
joint graph lacks.
"""
