"""Write joint graphs as readable text, and parse the text without executing it.

The text has Python's syntax, with one line per node::

    joint("Block", version=1, device="cpu", lower="eager", num_fwd_outputs=1, static_inputs=[1])
    symbols(s0=symbol(8, min=2, max=64))

    part("is_forward")
    primals_1: f32[s0, 4] = primal(PlainAOTInput(0))
    primals_2: f32[4, 4] = primal(ParamAOTInput("w"))
    mm: f32[s0, 4] = aten.mm.default(primals_1, primals_2), must_save  # model.py:12 y = x @ w
    t: f32[4, s0](1, 4) = aten.t.default(mm)
    sort: (f32[s0, 4], i64[s0, 4]) = aten.sort.default(mm)
    getitem: f32[s0, 4] = sort[0]
    return [
        forward(getitem, PlainAOTOutput(0)),
        backward(None),
    ]

A type states dtype and sizes of a value. Parentheses add properties that do not follow from dtype and sizes: strides,
offset, bytes of the storage, device, layout. By default, a view uses the storage of its base, and ``sort[0]`` uses
the storage of the first result of ``sort``. ``@ x`` places a tensor in the storage of ``x``; ``@ None`` places a
tensor in a storage of its own.

``part`` states whether the nodes below, up to the next ``part``, are tagged as forward or backward by AOTAutograd.
Marks after a call, such as ``must_save``, are instructions to passes. An attribute that a ``get_attr`` node fetches
by name is declared before the node. The declaration is ``constant`` for a tensor, ``with subgraph("name"):`` for a
graph, and ``attribute`` for any other object.
"""

from remat.graph.text.parsing import parse_graph, parse_joint, read_joint
from remat.graph.text.printing import SUFFIX, print_graph, print_joint, write_joint

__all__ = [
    "SUFFIX",
    "parse_graph",
    "parse_joint",
    "print_graph",
    "print_joint",
    "read_joint",
    "write_joint",
]
