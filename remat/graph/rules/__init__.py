"""The rules that the two graphs of a step must keep: one function each, which yields what breaks it.

Nodes of these graphs are told by their names, which are those of the joint graph; a node that a pass
has added has a name that the joint graph does not know.
"""
