"""Rules that the forward and backward graph of a step must obey, one function per rule.

A rule yields one `Fault` per violation. Rules find the joint-graph node of a forward or backward
node by name. A node that the partition copied from the joint graph keeps its name. A node that a
pass added has a name that the joint graph lacks.
"""
