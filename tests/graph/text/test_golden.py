"""What captured steps look like as text."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch.nn import functional as F

import remat
from remat.graph.text import print_graph, print_joint
from tests.graph.text.checks import without_sources
from tests.graph.text.steps import captured
from tests.graphs import joint_of, node, renumbered, weight


def text_of(name: str) -> str:
    return without_sources(print_joint(captured(name)))


def test_a_perceptron() -> None:
    assert_expected_inline(
        text_of("mlp"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

part("is_forward")
primals_1: f32[8, 4] = primal(PlainAOTInput(0))
primals_2: f32[4, 4] = primal(PlainAOTInput(1))
part("is_backward")
tangents_1: f32 = tangent(TangentAOTInput(PlainAOTOutput(0)))
part("is_forward")
mm: f32[8, 4] = aten.mm.default(primals_1, primals_2)
relu: f32[8, 4] = aten.relu.default(mm)
detach: f32[8, 4] = aten.detach.default(relu)
mm_1: f32[8, 4] = aten.mm.default(relu, primals_2)
sum_1: f32 = aten.sum.default(mm_1)
part("is_backward")
expand: f32[8, 4](0, 0) = aten.expand.default(tangents_1, [8, 4])
t: f32[4, 8](1, 4) = aten.t.default(relu)
mm_2: f32[4, 4] = aten.mm.default(t, expand)
t_1: f32[4, 4](1, 4) = aten.t.default(primals_2)
mm_3: f32[8, 4] = aten.mm.default(expand, t_1)
detach_1: f32[8, 4] = aten.detach.default(detach)
threshold_backward: f32[8, 4] = aten.threshold_backward.default(mm_3, detach_1, 0)
t_2: f32[4, 8](1, 4) = aten.t.default(primals_1)
mm_4: f32[4, 4] = aten.mm.default(t_2, threshold_backward)
add: f32[4, 4] = aten.add.Tensor(mm_2, mm_4)
return [
    forward(sum_1, PlainAOTOutput(0)),
    backward(None),
    backward(add, GradAOTOutput(PlainAOTInput(1))),
]
""",
    )


def test_dropout() -> None:
    assert_expected_inline(
        text_of("dropout"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

part("is_forward")
primals_1: f32[8, 4] = primal(PlainAOTInput(0))
primals_2: f32[4, 4] = primal(PlainAOTInput(1))
part("is_backward")
tangents_1: f32 = tangent(TangentAOTInput(PlainAOTOutput(0)))
part("is_forward")
mm: f32[8, 4] = aten.mm.default(primals_1, primals_2)
native_dropout: (f32[8, 4], b8[8, 4]) = aten.native_dropout.default(mm, 0.25, True)
getitem: f32[8, 4] = native_dropout[0]
getitem_1: b8[8, 4] = native_dropout[1]
sum_1: f32 = aten.sum.default(getitem)
part("is_backward")
expand: f32[8, 4](0, 0) = aten.expand.default(tangents_1, [8, 4])
native_dropout_backward: f32[8, 4] = aten.native_dropout_backward.default(expand, getitem_1, 1.3333333333333333)
t: f32[4, 8](1, 4) = aten.t.default(primals_1)
mm_1: f32[4, 4] = aten.mm.default(t, native_dropout_backward)
return [
    forward(sum_1, PlainAOTOutput(0)),
    backward(None),
    backward(mm_1, GradAOTOutput(PlainAOTInput(1))),
]
""",
    )


def test_views_lie_in_the_memory_of_what_they_look_at() -> None:
    assert_expected_inline(
        text_of("views"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=4)

part("is_forward")
primals_1: f32[4, 4] = primal(PlainAOTInput(0))
part("is_backward")
tangents_1: f32[4, 4](1, 4) = tangent(TangentAOTInput(PlainAOTOutput(0)))
tangents_2: f32[2, 3](4, 1, offset=9) @ tangents_1 = tangent(TangentAOTInput(PlainAOTOutput(1)))
tangents_3: f32[3, 2, 4] = tangent(TangentAOTInput(PlainAOTOutput(2)))
part("is_forward")
mul: f32[4, 4] = aten.mul.Tensor(primals_1, 2)
split: [f32[2, 4], f32[2, 4](offset=8)] = aten.split.Tensor(mul, 2)
getitem: f32[2, 4] = split[0]
getitem_1: f32[2, 4](offset=8) = split[1]
t: f32[4, 4](1, 4) = aten.t.default(mul)
slice_1: f32[2, 3](4, 1, offset=9) = aten.slice.Tensor(getitem_1, 1, 1, 9223372036854775807)
expand: f32[3, 2, 4](0, 4, 1) = aten.expand.default(getitem, [3, 2, 4])
view: f32[16] = aten.view.default(primals_1, [-1])
part("is_backward")
sum_1: f32[1, 2, 4] = aten.sum.dim_IntList(tangents_3, [0], True)
view_1: f32[2, 4] = aten.view.default(sum_1, [2, 4])
slice_backward: f32[2, 4] = aten.slice_backward.default(tangents_2, [2, 4], 1, 1, 9223372036854775807, 1)
t_1: f32[4, 4] = aten.t.default(tangents_1)
cat: f32[4, 4] = aten.cat.default([view_1, slice_backward])
add: f32[4, 4] = aten.add.Tensor(t_1, cat)
mul_1: f32[4, 4] = aten.mul.Tensor(add, 2)
return [
    forward(t, PlainAOTOutput(0)),
    forward(slice_1, PlainAOTOutput(1)),
    forward(expand, PlainAOTOutput(2)),
    forward(view, PlainAOTOutput(3)),
    backward(mul_1, GradAOTOutput(PlainAOTInput(0))),
]
""",
    )


def test_a_buffer_that_is_overwritten() -> None:
    assert_expected_inline(
        text_of("mutation"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

part("is_forward")
primals_1: f32[4] = primal(PlainAOTInput(0))
primals_2: f32[4] = primal(PlainAOTInput(1))
part("is_backward")
tangents_1: f32 = tangent(TangentAOTInput(PlainAOTOutput(0)))
part("is_forward")
sin: f32[4] = aten.sin.default(primals_1)
add: f32[4] = aten.add.Tensor(primals_1, 1)
mul: f32[4] = aten.mul.Tensor(primals_2, sin)
sum_1: f32 = aten.sum.default(mul)
part("is_backward")
expand: f32[4](0) = aten.expand.default(tangents_1, [4])
mul_1: f32[4] = aten.mul.Tensor(expand, sin)
part("must_be_in_forward")
copy_: f32[4] = aten.copy_.default(primals_1, add)
return [
    forward(sum_1, PlainAOTOutput(0)),
    backward(None),
    backward(mul_1, GradAOTOutput(PlainAOTInput(1))),
]
""",
    )


def test_symbolic_sizes() -> None:
    assert_expected_inline(
        renumbered(text_of("symbols"), "add", "mul"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=1)
symbols(s21=symbol(6, min=2), s27=symbol(4, min=2), s77=symbol(8, min=2))

part("is_forward")
primals_1: SymInt[s77] = primal(PlainAOTInput(0))
primals_2: SymInt[s27] = primal(PlainAOTInput(1))
primals_3: f32[s77, s27] = primal(PlainAOTInput(2))
primals_4: SymInt[s21] = primal(PlainAOTInput(3))
primals_5: f32[s27, s21] = primal(PlainAOTInput(4))
part("is_backward")
tangents_1: f32 = tangent(TangentAOTInput(PlainAOTOutput(0)))
part("is_forward")
mm: f32[s77, s21] = aten.mm.default(primals_3, primals_5)
floordiv: SymInt[s77//2] = operator.floordiv(primals_1, 2)
add: SymInt[(s77//2) + 1] = operator.add(floordiv, 1)
slice_1: f32[(s77//2) + 1, s21] = aten.slice.Tensor(mm, 0, 0, add)
mul: f32[(s77//2) + 1, s21] = aten.mul.Tensor(slice_1, primals_1)
sum_1: f32 = aten.sum.default(mul)
part("is_backward")
expand: f32[(s77//2) + 1, s21](0, 0) = aten.expand.default(tangents_1, [add, primals_4])
mul_1: f32[(s77//2) + 1, s21] = aten.mul.Tensor(expand, primals_1)
slice_backward: f32[s77, s21] = aten.slice_backward.default(mul_1, [primals_1, primals_4], 0, 0, add, 1)
t: f32[s27, s77](1, s27) = aten.t.default(primals_3)
mm_1: f32[s27, s21] = aten.mm.default(t, slice_backward)
return [
    forward(sum_1, PlainAOTOutput(0)),
    backward(None),
    backward(None),
    backward(None),
    backward(None),
    backward(mm_1, GradAOTOutput(PlainAOTInput(4))),
]
""",
    )


def test_tags_of_a_checkpointed_region() -> None:
    assert_expected_inline(
        text_of("checkpointed"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

part("is_forward")
primals_1: f32[4, 4] = primal(PlainAOTInput(0))
primals_2: f32[4, 4] = primal(PlainAOTInput(1))
part("is_backward")
tangents_1: f32 = tangent(TangentAOTInput(PlainAOTOutput(0)))
part("is_forward")
mm: f32[4, 4] = aten.mm.default(primals_1, primals_2), must_save, region(0)
sin: f32[4, 4] = aten.sin.default(mm), prefer_recompute, region(0)
cos: f32[4, 4] = aten.cos.default(sin), prefer_recompute, region(0)
sum_1: f32 = aten.sum.default(cos)
part("is_backward")
expand: f32[4, 4](0, 0) = aten.expand.default(tangents_1, [4, 4])
sin_1: f32[4, 4] = aten.sin.default(sin)
neg: f32[4, 4] = aten.neg.default(sin_1)
mul: f32[4, 4] = aten.mul.Tensor(expand, neg)
cos_1: f32[4, 4] = aten.cos.default(mm)
mul_1: f32[4, 4] = aten.mul.Tensor(mul, cos_1)
t: f32[4, 4](1, 4) = aten.t.default(primals_1)
mm_1: f32[4, 4] = aten.mm.default(t, mul_1)
return [
    forward(sum_1, PlainAOTOutput(0)),
    backward(None),
    backward(mm_1, GradAOTOutput(PlainAOTInput(1))),
]
""",
    )


def test_operators_with_several_results() -> None:
    assert_expected_inline(
        text_of("several"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

part("is_forward")
primals_1: f32[3, 5] = primal(PlainAOTInput(0))
part("is_backward")
tangents_1: f32 = tangent(TangentAOTInput(PlainAOTOutput(0)))
part("is_forward")
var_mean: (f32[3], f32[3]) = aten.var_mean.correction(primals_1, [1], correction=1)
getitem: f32[3] = var_mean[0]
getitem_1: f32[3] = var_mean[1]
sort: (f32[3, 5], i64[3, 5]) = aten.sort.default(primals_1, 1)
getitem_2: f32[3, 5] = sort[0]
getitem_3: i64[3, 5] = sort[1]
sum_1: f32[3] = aten.sum.dim_IntList(getitem_2, [1])
mul: f32[3] = aten.mul.Tensor(sum_1, getitem)
sub: f32[3] = aten.sub.Tensor(mul, getitem_1)
sum_2: f32 = aten.sum.default(sub)
part("is_backward")
expand: f32[3](0) = aten.expand.default(tangents_1, [3])
neg: f32[3] = aten.neg.default(expand)
mul_1: f32[3] = aten.mul.Tensor(expand, sum_1)
mul_2: f32[3] = aten.mul.Tensor(expand, getitem)
unsqueeze: f32[3, 1] = aten.unsqueeze.default(mul_2, 1)
expand_1: f32[3, 5](1, 0) = aten.expand.default(unsqueeze, [3, 5])
new_zeros: f32[3, 5] = aten.new_zeros.default(expand_1, [3, 5])
scatter: f32[3, 5] = aten.scatter.src(new_zeros, 1, getitem_3, expand_1)
unsqueeze_1: f32[3, 1] = aten.unsqueeze.default(mul_1, 1)
mean: f32[3, 1] = aten.mean.dim(primals_1, [1], True)
sub_1: f32[3, 5] = aten.sub.Tensor(primals_1, mean)
mul_3: f32[3, 1] = aten.mul.Scalar(unsqueeze_1, 0.5)
mul_4: f32[3, 5] = aten.mul.Tensor(mul_3, sub_1)
unsqueeze_2: f32[3, 1] = aten.unsqueeze.default(neg, 1)
expand_2: f32[3, 5](1, 0) = aten.expand.default(unsqueeze_2, [3, 5])
div: f32[3, 5] = aten.div.Scalar(expand_2, 5)
add: f32[3, 5] = aten.add.Tensor(mul_4, div)
add_1: f32[3, 5] = aten.add.Tensor(scatter, add)
return [
    forward(sum_2, PlainAOTOutput(0)),
    backward(add_1, GradAOTOutput(PlainAOTInput(0))),
]
""",
    )


def test_subgraphs_of_a_higher_order_operator() -> None:
    assert_expected_inline(
        text_of("branches"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

part("is_forward")
primals_1: f32[3] = primal(PlainAOTInput(0))
primals_2: f32[3] = primal(PlainAOTInput(1))
part("is_backward")
tangents_1: f32 = tangent(TangentAOTInput(PlainAOTOutput(0)))
part("is_forward")
sum_1: f32 = aten.sum.default(primals_1)
gt: b8 = aten.gt.Scalar(sum_1, 0)

with subgraph("true_graph_0"):
    arg0_1: f32[3] @ joint.primals_2 = placeholder()
    sin: f32[3] = aten.sin.default(arg0_1)
    return (sin,)

true_graph_0 = get_attr("true_graph_0")

with subgraph("false_graph_0"):
    arg0_1: f32[3] @ joint.primals_2 = placeholder()
    mul: f32[3] = aten.mul.Tensor(arg0_1, 2)
    return (mul,)

false_graph_0 = get_attr("false_graph_0")
cond: (f32[3],) = higher_order.cond(gt, true_graph_0, false_graph_0, (primals_2,))
getitem: f32[3] = cond[0]
sum_2: f32 = aten.sum.default(getitem)
part("is_backward")
expand: f32[3](0) = aten.expand.default(tangents_1, [3])

with subgraph("true_graph_1"):
    part("is_backward")
    arg0_1: f32[3] @ joint.primals_2 = placeholder()
    arg1_1: f32[3](0) @ joint.tangents_1 = placeholder()
    cos: f32[3] = aten.cos.default(arg0_1)
    mul: f32[3] = aten.mul.Tensor(arg1_1, cos)
    return [mul]

true_graph_1 = get_attr("true_graph_1")

with subgraph("false_graph_1"):
    part("is_backward")
    arg0_1: f32[3] @ joint.primals_2 = placeholder()
    arg1_1: f32[3](0) @ joint.tangents_1 = placeholder()
    mul_1: f32[3] = aten.mul.Tensor(arg1_1, 2)
    return [mul_1]

false_graph_1 = get_attr("false_graph_1")
cond_1: [f32[3]] = higher_order.cond(gt, true_graph_1, false_graph_1, (primals_2, expand))
getitem_1: f32[3] = cond_1[0]
return [
    forward(sum_2, PlainAOTOutput(0)),
    backward(None),
    backward(getitem_1, GradAOTOutput(PlainAOTInput(1))),
]
""",
    )


def test_constants() -> None:
    assert_expected_inline(
        text_of("constants"),
        """\
joint("f", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

part("is_forward")
primals_1: f32[3] = primal(PlainAOTInput(0))
part("is_backward")
tangents_1: f32 = tangent(TangentAOTInput(PlainAOTOutput(0)))
part("is_forward")
constant("_tensor_constant0", f32[3], [1.0, -2.5, inf])
_tensor_constant0: f32[3] = get_attr("_tensor_constant0")
lift_fresh_copy: f32[3] = aten.lift_fresh_copy.default(_tensor_constant0)
gt: b8[3] = aten.gt.Scalar(primals_1, 0)
scalar_tensor: f32 = aten.scalar_tensor.default(-0.0, dtype=torch.float32, layout=torch.strided, device=torch.device("cpu"))
where: f32[3] = aten.where.self(gt, primals_1, scalar_tensor)
fmod: f32[3] = aten.fmod.Scalar(where, -inf)
mul: f32[3] = aten.mul.Tensor(fmod, lift_fresh_copy)
sum_1: f32 = aten.sum.default(mul)
part("is_backward")
expand: f32[3](0) = aten.expand.default(tangents_1, [3])
mul_1: f32[3] = aten.mul.Tensor(expand, lift_fresh_copy)
scalar_tensor_1: f32 = aten.scalar_tensor.default(0, dtype=torch.float32, layout=torch.strided, device=torch.device("cpu"))
where_1: f32[3] = aten.where.self(gt, mul_1, scalar_tensor_1)
return [
    forward(sum_1, PlainAOTOutput(0)),
    backward(where_1, GradAOTOutput(PlainAOTInput(0))),
]
""",
    )


def test_lines_end_with_where_the_user_made_them() -> None:
    joint = captured("mlp")
    for made in joint.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack"):
            made.meta.pop(key, None)
    node(joint, "mm").meta["stack_trace"] = '  File "/home/me/model.py", line 12, in f\n    x @ w\n'
    stack = {"1": ("", "torch.nn.Sequential"), "2": ("0", "torch.nn.Linear")}
    node(joint, "mm_1").meta["nn_module_stack"] = stack
    lines = [line for line in print_joint(joint).splitlines() if "#" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
mm: f32[8, 4] = aten.mm.default(primals_1, primals_2)  # model.py:12 x @ w
mm_1: f32[8, 4] = aten.mm.default(relu, primals_2)  # Sequential / Linear""",
    )


def test_the_halves_of_a_plan_with_a_replayed_draw() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.mm(x, w), 0.25).sum()

    plan = remat.plan(joint_of(f, torch.randn(128, 4), weight(4, 64)), 0)
    assert_expected_inline(
        without_sources(
            print_graph(plan.forward, "forward") + print_graph(plan.backward, "backward")
        ),
        """\
graph("forward", version=1, device="cpu")

part("is_forward")
primals_1: f32[128, 4] = placeholder(PlainAOTInput(0))
primals_2: f32[4, 64] = placeholder(PlainAOTInput(1))
mm: f32[128, 64] = aten.mm.default(primals_1, primals_2)
native_dropout_drawn: (u8[5056], (f32[128, 64], b8[128, 64])) = higher_order.run_and_save_rng_state(aten.native_dropout.default, mm, 0.25, True)
native_dropout_state: u8[5056] = native_dropout_drawn[0]
native_dropout: (f32[128, 64], b8[128, 64]) = native_dropout_drawn[1]
getitem: f32[128, 64] = native_dropout[0]
sum_1: f32 = aten.sum.default(getitem)
return (
    output(sum_1, PlainAOTOutput(0)),
    output(primals_1, SavedForBackwardsAOTOutput(0)),
    output(primals_2, SavedForBackwardsAOTOutput(1)),
    output(native_dropout_state, SavedForBackwardsAOTOutput(2)),
)
graph("backward", version=1, device="cpu")

part("is_forward")
primals_1: f32[128, 4] = placeholder(PlainAOTInput(0))
primals_2: f32[4, 64] = placeholder(PlainAOTInput(1))
part(None)
native_dropout_state: u8[5056] = placeholder()
part("is_backward")
tangents_1: f32 = placeholder(TangentAOTInput(PlainAOTOutput(0)))
expand: f32[128, 64](0, 0) = aten.expand.default(tangents_1, [128, 64])
part("is_forward")
mm: f32[128, 64] = aten.mm.default(primals_1, primals_2)
native_dropout: (f32[128, 64], b8[128, 64]) = higher_order.run_with_rng_state(native_dropout_state, aten.native_dropout.default, mm, 0.25, True)
getitem_1: b8[128, 64] = native_dropout[1]
part("is_backward")
native_dropout_backward: f32[128, 64] = aten.native_dropout_backward.default(expand, getitem_1, 1.3333333333333333)
t: f32[4, 128](1, 4) = aten.t.default(primals_1)
mm_1: f32[4, 64] = aten.mm.default(t, native_dropout_backward)
return (
    output(None),
    output(mm_1, GradAOTOutput(PlainAOTInput(1))),
)
""",
    )
