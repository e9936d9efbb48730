"""A training step as text: two equal products of which one can go, and a node that nobody reads."""

from __future__ import annotations

import remat
from remat.graph.text import parse_joint

TEXT = '''joint("step", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

primals_1: f32[8, 8] = primal()
primals_2: f32[8, 8] = primal()
tangents_1: f32 = tangent()
mm: f32[8, 8] = aten.mm.default(primals_1, primals_2)  # model.py:3 a = x @ w
mm_1: f32[8, 8] = aten.mm.default(primals_1, primals_2)  # model.py:4 b = x @ w
sin: f32[8, 8] = aten.sin.default(mm)
sin_1: f32[8, 8] = aten.sin.default(mm_1)
unread: f32[8, 8] = aten.exp.default(sin)
mul: f32[8, 8] = aten.mul.Tensor(sin, sin_1)
sum_1: f32 = aten.sum.default(mul)
expand: f32[8, 8](0, 0) = aten.expand.default(tangents_1, [8, 8])
mul_1: f32[8, 8] = aten.mul.Tensor(expand, sin_1)
mul_2: f32[8, 8] = aten.mul.Tensor(expand, sin)
cos: f32[8, 8] = aten.cos.default(mm_1)
mul_3: f32[8, 8] = aten.mul.Tensor(mul_2, cos)
cos_1: f32[8, 8] = aten.cos.default(mm)
mul_4: f32[8, 8] = aten.mul.Tensor(mul_1, cos_1)
add: f32[8, 8] = aten.add.Tensor(mul_3, mul_4)
t: f32[8, 8](1, 8) = aten.t.default(primals_1)
mm_2: f32[8, 8] = aten.mm.default(t, add)
t_1: f32[8, 8](1, 8) = aten.t.default(primals_2)
mm_3: f32[8, 8] = aten.mm.default(add, t_1)
return [
    forward(sum_1),
    backward(mm_3),
    backward(mm_2),
]
'''  # fmt: skip

#: A dropout that backward has to draw again.
REPLAY = '''joint("replay", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

primals_1: f32[8, 8] = primal()
tangents_1: f32[8, 8] = tangent()
native_dropout: (f32[8, 8], b8[8, 8]) = aten.native_dropout.default(primals_1, 0.5, True), must_recompute
getitem: f32[8, 8] = native_dropout[0], must_recompute
getitem_1: b8[8, 8] = native_dropout[1], must_recompute
sin: f32[8, 8] = aten.sin.default(getitem)
cos: f32[8, 8] = aten.cos.default(getitem)
mul: f32[8, 8] = aten.mul.Tensor(tangents_1, cos)
native_dropout_backward: f32[8, 8] = aten.native_dropout_backward.default(mul, getitem_1, 2.0)
return [
    forward(sin),
    backward(native_dropout_backward),
]
'''  # fmt: skip

#: The default pipeline at the least budget, by a solver that needs no library.
WHOLE = (
    "dce,cse,cleanup-recompute-tags,min-cut,solve-graph(solver=lagrangian,budget=0,cost=flops),"
    "partition,functionalize-rng,reorder-backward,raise-getitems"
)


def step(text: str = TEXT) -> remat.JointGraph:
    """The joint graph that a text describes."""
    return parse_joint(text)
