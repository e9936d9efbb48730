"""Saved tensors pass through hooks: where pack and unpack stand, and what is handed over."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline

from remat.graph.joint import JointGraph
from remat.graph.liveness import saved_storages, simulate_peak
from remat.planning.pipelines import prepare, split
from tests.graphs import joint_of, renumbered, weight
from tests.passes.hooks.hooked import CAST, deep, product, shown, through


def test_pack_comes_after_the_last_use_and_unpack_before_the_first(joint: JointGraph) -> None:
    result = through(joint, (), CAST)
    assert_expected_inline(
        shown(result.forward),
        """\
primals_1: float32[4, 6]
primals_2: float32[6, 8]
mm: float32[4, 8] = aten.mm.default(primals_1, primals_2)
sin: float32[4, 8] = aten.sin.default(mm)
mm_packed: bfloat16[4, 8] = aten._to_copy.default(mm, dtype=torch.bfloat16)
exp: float32[4, 8] = aten.exp.default(sin)
sum_1: float32[] = aten.sum.default(exp)
exp_packed: bfloat16[4, 8] = aten._to_copy.default(exp, dtype=torch.bfloat16)
return sum_1, primals_1, primals_2, mm_packed, exp_packed""",
    )
    assert_expected_inline(
        shown(result.backward),
        """\
primals_1: float32[4, 6]
primals_2: float32[6, 8]
mm_packed: bfloat16[4, 8]
exp_packed: bfloat16[4, 8]
tangents_1: float32[]
expand: float32[4, 8] = aten.expand.default(tangents_1, [4, 8])
exp_unpacked: float32[4, 8] = aten._to_copy.default(exp_packed, dtype=torch.float32)
detach: float32[4, 8] = aten.detach.default(exp_unpacked)
detach_1: float32[4, 8] = aten.detach.default(detach)
mul: float32[4, 8] = aten.mul.Tensor(expand, detach_1)
mm_unpacked: float32[4, 8] = aten._to_copy.default(mm_packed, dtype=torch.float32)
cos: float32[4, 8] = aten.cos.default(mm_unpacked)
mul_1: float32[4, 8] = aten.mul.Tensor(mul, cos)
t: float32[6, 4] = aten.t.default(primals_1)
mm_1: float32[6, 8] = aten.mm.default(t, mul_1)
t_1: float32[8, 6] = aten.t.default(primals_2)
mm_2: float32[4, 6] = aten.mm.default(mul_1, t_1)
return mm_2, mm_1""",
    )


def test_several_values_and_constants_are_handed_over(joint: JointGraph) -> None:
    hooks = (
        lambda x: {"q": (x * 2).half(), "more": [x.amax(), x.dtype, "text", x.shape[0]]},
        lambda p: p["q"].to(p["more"][1]) / 2 + 0 * p["more"][0] * p["more"][3],
    )
    result = through(joint, (), hooks)
    assert_expected_inline(
        shown(result.forward),
        """\
primals_1: float32[4, 6]
primals_2: float32[6, 8]
mm: float32[4, 8] = aten.mm.default(primals_1, primals_2)
sin: float32[4, 8] = aten.sin.default(mm)
mm_pack_mul: float32[4, 8] = aten.mul.Tensor(mm, 2)
mm_packed_0: float16[4, 8] = aten._to_copy.default(mm_pack_mul, dtype=torch.float16)
mm_packed_1: float32[] = aten.amax.default(mm)
exp: float32[4, 8] = aten.exp.default(sin)
sum_1: float32[] = aten.sum.default(exp)
exp_pack_mul: float32[4, 8] = aten.mul.Tensor(exp, 2)
exp_packed_0: float16[4, 8] = aten._to_copy.default(exp_pack_mul, dtype=torch.float16)
exp_packed_1: float32[] = aten.amax.default(exp)
return sum_1, primals_1, primals_2, mm_packed_0, mm_packed_1, exp_packed_0, exp_packed_1""",
    )
    assert_expected_inline(
        shown(result.backward),
        """\
primals_1: float32[4, 6]
primals_2: float32[6, 8]
mm_packed_0: float16[4, 8]
mm_packed_1: float32[]
exp_packed_0: float16[4, 8]
exp_packed_1: float32[]
tangents_1: float32[]
expand: float32[4, 8] = aten.expand.default(tangents_1, [4, 8])
exp_unpack__to_copy: float32[4, 8] = aten._to_copy.default(exp_packed_0, dtype=torch.float32)
exp_unpack_div: float32[4, 8] = aten.div.Tensor(exp_unpack__to_copy, 2)
exp_unpack_mul: float32[] = aten.mul.Tensor(exp_packed_1, 0)
exp_unpack_mul_1: float32[] = aten.mul.Tensor(exp_unpack_mul, 4)
exp_unpacked: float32[4, 8] = aten.add.Tensor(exp_unpack_div, exp_unpack_mul_1)
detach: float32[4, 8] = aten.detach.default(exp_unpacked)
detach_1: float32[4, 8] = aten.detach.default(detach)
mul: float32[4, 8] = aten.mul.Tensor(expand, detach_1)
mm_unpack__to_copy: float32[4, 8] = aten._to_copy.default(mm_packed_0, dtype=torch.float32)
mm_unpack_div: float32[4, 8] = aten.div.Tensor(mm_unpack__to_copy, 2)
mm_unpack_mul: float32[] = aten.mul.Tensor(mm_packed_1, 0)
mm_unpack_mul_1: float32[] = aten.mul.Tensor(mm_unpack_mul, 4)
mm_unpacked: float32[4, 8] = aten.add.Tensor(mm_unpack_div, mm_unpack_mul_1)
cos: float32[4, 8] = aten.cos.default(mm_unpacked)
mul_1: float32[4, 8] = aten.mul.Tensor(mul, cos)
t: float32[6, 4] = aten.t.default(primals_1)
mm_1: float32[6, 8] = aten.mm.default(t, mul_1)
t_1: float32[8, 6] = aten.t.default(primals_2)
mm_2: float32[4, 6] = aten.mm.default(mul_1, t_1)
return mm_2, mm_1""",
    )


def test_sizes_that_are_handed_over_already_are_not_handed_twice() -> None:
    hooks = (lambda x: (x.view(-1), x.shape[0], x.shape[1] * 3), lambda p: p[0].view(p[1], -1))
    result = through(product, (torch.randn(5, 6), weight(6, 8)), hooks, dynamic=True)
    assert_expected_inline(
        shown(result.forward),
        """\
primals_1: z0
primals_2: z1
primals_3: float32[z0, z1]
primals_4: z2
primals_5: float32[z1, z2]
mm: float32[z0, z2] = aten.mm.default(primals_3, primals_5)
sin: float32[z0, z2] = aten.sin.default(mm)
mm_packed_0: float32[z2*z0] = aten.view.default(mm, [-1])
mm_pack_sym_size_int: z2 = aten.sym_size.int(mm, 1)
mm_packed_2: 3*z2 = <built-in function mul>(mm_pack_sym_size_int, 3)
exp: float32[z0, z2] = aten.exp.default(sin)
sum_1: float32[] = aten.sum.default(exp)
exp_packed_0: float32[z2*z0] = aten.view.default(exp, [-1])
return sum_1, primals_3, mm_packed_0, exp_packed_0, primals_1, primals_4, primals_2, mm_packed_2""",
    )
    assert_expected_inline(
        renumbered(shown(result.backward), "mul"),
        """\
primals_1: z0
primals_4: z1
primals_2: z2
mm_packed_2: 3*z1
primals_3: float32[z0, z2]
mm_packed_0: float32[z1*z0]
exp_packed_0: float32[z1*z0]
tangents_1: float32[]
expand: float32[z0, z1] = aten.expand.default(tangents_1, [primals_1, primals_4])
exp_unpacked: float32[z0, z1] = aten.view.default(exp_packed_0, [primals_1, -1])
detach: float32[z0, z1] = aten.detach.default(exp_unpacked)
detach_1: float32[z0, z1] = aten.detach.default(detach)
mul: float32[z0, z1] = aten.mul.Tensor(expand, detach_1)
mm_unpacked: float32[z0, z1] = aten.view.default(mm_packed_0, [primals_1, -1])
cos: float32[z0, z1] = aten.cos.default(mm_unpacked)
mul_1: float32[z0, z1] = aten.mul.Tensor(mul, cos)
t: float32[z2, z0] = aten.t.default(primals_3)
mm_1: float32[z2, z1] = aten.mm.default(t, mul_1)
return None, None, None, None, mm_1""",
    )


def test_packing_lowers_saved_bytes_and_the_peak() -> None:
    joint = joint_of(lambda x, w: deep(x, w), torch.randn(64, 64), weight(64, 64))
    before = split(prepare(joint))
    assert before.forward is not None
    assert before.backward is not None
    plain = simulate_peak(before.forward, before.backward, 1).nbytes
    saved = sum(saved_storages(before.forward, 1).values())
    assert saved == 31 * 64 * 64 * 4
    result = through(joint, (), "float8")
    assert result.forward is not None
    assert result.backward is not None
    assert sum(saved_storages(result.forward, 1).values()) == 31 * (64 * 64 + 4)
    assert simulate_peak(result.forward, result.backward, 1).nbytes < 0.6 * plain


def test_values_that_end_at_one_node_are_packed_one_after_the_other() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = x @ w, w @ x
        return (a * b).sum()

    result = through(f, (weight(6, 6), weight(6, 6)), CAST)
    assert result.forward is not None
    names = [n.name for n in result.forward.graph.nodes if n.op == "call_function"]
    assert names == ["mm", "mm_1", "mul", "mm_packed", "mm_1_packed", "sum_1"]


def test_elements_of_a_tuple_stay_with_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.var_mean((x @ w).exp(), 1)

    result = through(f, (weight(6, 6), weight(6, 6)), CAST)
    assert result.forward is not None
    names = [n.name for n in result.forward.graph.nodes if n.op == "call_function"]
    assert names[names.index("var_mean") + 1 :][:2] == ["getitem", "getitem_1"]
