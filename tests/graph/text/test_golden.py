"""What captured steps look like as text."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from remat.graph.text import print_joint
from tests.graph.text.checks import without_sources
from tests.graph.text.steps import captured
from tests.graphs import node


def text_of(name: str) -> str:
    return without_sources(print_joint(captured(name)))


def test_tags_of_a_checkpointed_region() -> None:
    assert_expected_inline(
        text_of("checkpointed"),
        """\
joint("checkpointed", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

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


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (  # views lie in the memory of what they look at
            "views",
            """
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
""",
        ),
        (
            "branches",
            """
with subgraph("false_graph_1"):
    part("is_backward")
    arg0_1: f32[3] @ joint.primals_2 = placeholder()
    arg1_1: f32[3](0) @ joint.tangents_1 = placeholder()
    mul_1: f32[3] = aten.mul.Tensor(arg1_1, 2)
    return [mul_1]

false_graph_1 = get_attr("false_graph_1")
cond_1: [f32[3]] = higher_order.cond(gt, true_graph_1, false_graph_1, (primals_2, expand))
""",
        ),
    ],
)
def test_lines_of_a_step(name: str, lines: str) -> None:
    assert lines in text_of(name)


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
