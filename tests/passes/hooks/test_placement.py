"""Saved tensors pass through hooks: where pack and unpack stand, and what is handed over."""

from __future__ import annotations

from typing import Any

import torch

from remat.graph.joint import JointGraph
from tests.graphs import calls, joint_of, weight
from tests.passes.hooks.hooked import CAST, names_handed, shown, through


def test_several_values_and_constants_are_handed_over(joint: JointGraph) -> None:
    hooks = (
        lambda x: {"q": (x * 2).half(), "more": [x.amax(), x.dtype, "text", x.shape[0]]},
        lambda p: p["q"].to(p["more"][1]) / 2 + 0 * p["more"][0] * p["more"][3],
    )
    result = through(joint, hooks)
    packed = ["mm_packed_0", "mm_packed_1", "exp_packed_0", "exp_packed_1"]
    assert names_handed(result) == ["primals_1", "primals_2", *packed]
    forward, backward = shown(result.forward), shown(result.backward)
    assert "mm_packed_0: float16[4, 8] = aten._to_copy.default(mm_pack_mul, " in forward
    assert "mm_packed_1: float32[] = aten.amax.default(mm)" in forward
    assert "exp_unpack__to_copy: float32[4, 8] = aten._to_copy.default(exp_packed_0, " in backward
    assert "exp_unpack_mul_1: float32[] = aten.mul.Tensor(exp_unpack_mul, 4)" in backward
    assert "detach: float32[4, 8] = aten.detach.default(exp_unpacked)" in backward


def test_sizes_that_are_handed_over_already_are_not_handed_twice(symbolic: JointGraph) -> None:
    hooks = (lambda x: (x.view(-1), x.shape[0], x.shape[1] * 3), lambda p: p[0].view(p[1], -1))
    result = through(symbolic, hooks)
    tensors = ["primals_3", "mm_packed_0", "exp_packed_0"]
    assert names_handed(result) == [*tensors, "primals_1", "primals_4", "primals_2", "mm_packed_2"]
    assert "mm_packed_2: 3*" in shown(result.forward)
    for name in ("mm", "exp"):
        line = f"aten.view.default({name}_packed_0, [primals_1, -1])"
        assert line in shown(result.backward)


def test_values_that_end_at_one_node_are_packed_one_after_the_other() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = x @ w, w @ x
        return (a * b).sum()

    result = through(joint_of(f, weight(6, 6), weight(6, 6)), CAST)
    assert result.forward is not None
    names = calls(result.forward)
    assert names == ["mm", "mm_1", "mul", "mm_packed", "mm_1_packed", "sum_1"]


def test_elements_of_a_tuple_stay_with_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.var_mean((x @ w).exp(), 1)

    result = through(joint_of(f, weight(6, 6), weight(6, 6)), CAST)
    assert result.forward is not None
    names = calls(result.forward)
    assert names[names.index("var_mean") + 1 :][:2] == ["getitem", "getitem_1"]
