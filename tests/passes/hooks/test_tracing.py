"""Hooks as users write them: traced into the graphs, run eagerly outside of them, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from remat.errors import PlanError
from remat.graph.joint import JointGraph, outputs_of
from remat.graph.memory.host_copies import OFFLOAD, RELOAD, WAIT_COPIED, host_storages
from remat.graph.memory.storages import Sizes
from remat.passes.hooks.tracing import Traces
from remat.passes.packing.pairs import PAIRS, HooksWarning
from tests.passes.hooks.hooked import CAST, names_handed, shown, through


def test_a_tensor_that_comes_back_unchanged_is_left(joint: JointGraph) -> None:
    def pack(x: torch.Tensor) -> Any:
        return x.detach() if x.shape[0] == 4 else x.half()

    with pytest.warns(HooksWarning, match="pack returned every one of the 2 saved tensors"):
        result = through(joint, (pack, lambda p: p))
    assert not result.modified
    assert names_handed(result) == ["primals_1", "primals_2", "mm", "exp"]


def test_the_tensor_itself_may_be_part_of_what_is_kept(joint: JointGraph) -> None:
    result = through(joint, (lambda x: (x, x.sum()), lambda p: p[0] + 0 * p[1]))
    assert names_handed(result)[2:] == ["mm_packed_1", "mm", "exp_packed_1", "exp"]
    result = through(joint, (lambda x: [x.sum(), x.sum()], lambda p: (p[0] + p[1]).expand(4, 8)))
    assert result.statistics["packed"] == 2


def test_nothing_at_all_may_be_kept(joint: JointGraph) -> None:
    result = through(joint, (lambda x: list(x.shape), lambda p: torch.zeros(*p)))
    assert names_handed(result) == ["primals_1", "primals_2"]


def test_writes_in_place_are_taken_out_of_the_hooks(joint: JointGraph) -> None:
    result = through(joint, (lambda x: x.clone().mul_(2), lambda p: p.clone().div_(2)))
    for module in (result.forward, result.backward):
        assert "aten.mul_" not in shown(module)
        assert "aten.div_" not in shown(module)


def test_closures_become_constants(joint: JointGraph) -> None:
    table = torch.arange(8.0)
    result = through(joint, (lambda x: x + table, lambda p: p - torch.tensor(3.0) - table + 3))
    assert result.forward is not None
    (first, *_) = [n for n in result.forward.graph.nodes if n.op == "get_attr"]
    assert getattr(result.forward, first.target) is table
    assert result.statistics["eager"] == 0


def test_another_layout_is_put_right(joint: JointGraph) -> None:
    hooks = (lambda x: x.t().contiguous(), lambda p: p.t())
    result = through(joint, hooks)
    assert result.backward is not None
    nodes = {n.name: n for n in result.backward.graph.nodes}
    for name in ("mm_unpacked", "exp_unpacked"):
        assert nodes[name].meta["val"].stride() == (8, 1)


def test_graph_modules_are_hooks(joint: JointGraph) -> None:
    result = through(joint, (fx.symbolic_trace(CAST[0]), fx.symbolic_trace(CAST[1])))
    assert result.statistics["packed"] == 2


def test_hooks_are_decomposed_as_the_lowering_wants(joint: JointGraph) -> None:
    hooks = (lambda x: F.silu(x), lambda p: F.silu(p))
    for lower, present in (("eager", True), ("inductor", False)):
        forward = through(replace(joint, lower=lower), hooks).forward
        assert ("aten.silu.default" in shown(forward)) is present


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        (
            (lambda x: x.mul_(2), lambda p: p / 2),
            "pack of hooks 'custom' writes to what it is given",
        ),
        ((lambda x: x.half(), lambda p: p), r"returned float16\[4, 8\] on cpu for a saved float32"),
        ((lambda x: x.sum(), lambda p: p), r"returned float32\[\] on cpu"),
        ((lambda x: x + 1, lambda p: [p]), "expected a tensor"),
    ],
)
def test_hooks_that_break_their_word_are_refused(joint: JointGraph, hooks: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        through(joint, hooks)


def test_what_cannot_be_traced_stands_behind_operators(joint: JointGraph) -> None:
    hooks = (lambda x: x.numpy().copy(), lambda p: torch.from_numpy(p))
    with pytest.warns(
        HooksWarning, match=r"run eagerly, outside of it: pack raised RuntimeError: \.numpy\(\)"
    ):
        result = through(joint, hooks)
    assert result.statistics["eager"] == 2
    assert "mm_packed: int64[] = remat.pack_eagerly.default(mm, process-" in shown(result.forward)
    assert "mm_unpacked: float32[4, 8] = remat.unpack_eagerly.default(" in shown(result.backward)


def test_numbers_that_depend_on_data_cannot_be_traced(joint: JointGraph) -> None:
    hooks = (lambda x: (x, x.abs().max().item()), lambda p: p[0])
    with pytest.warns(HooksWarning, match="run eagerly"):
        through(joint, hooks)


def test_random_hooks_are_inlined_only_where_the_lowering_can_take_them(joint: JointGraph) -> None:
    hooks = (lambda x: (x + torch.rand_like(x)).half(), lambda p: p.float())
    assert "aten.rand_like.default" in shown(through(joint, hooks).forward)
    with pytest.warns(HooksWarning, match="draws random numbers"):
        through(replace(joint, lower="inductor"), hooks)


def test_what_cannot_be_traced_works_with_symbols(symbolic: JointGraph) -> None:
    hooks = (lambda x: x.numpy().copy(), lambda p: torch.from_numpy(p))
    with pytest.warns(HooksWarning, match="run eagerly"):
        result = through(symbolic, hooks)
    assert "[primals_1, primals_4], [primals_4, 1]" in shown(result.backward)


def test_offloading_waits_for_its_copies_which_take_none_of_the_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        value = torch.empty(4, 6, device="meta")
    traced = Traces(PAIRS["cpu-offload"], "eager").of(value)
    assert traced.unpack is not None
    for graph, begin in ((traced.pack.graph, OFFLOAD), (traced.unpack.graph, RELOAD)):
        calls = [n.target for n in graph.nodes if n.op == "call_function"]
        assert calls == [begin, WAIT_COPIED]
    (handed,) = outputs_of(traced.pack.graph)
    sizes = Sizes()
    assert {*sizes.keys(handed)} <= host_storages(traced.pack.graph.nodes, sizes)


def test_each_kind_of_tensor_is_traced_once(joint: JointGraph) -> None:
    seen: list[torch.Size] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return x.half()

    through(joint, (pack, lambda p: p.float()))
    assert seen == [torch.Size([4, 8])]


class Keeping:
    """Hooks that put tensors aside, each in a way of its own."""

    def __init__(self) -> None:
        self.store: list[torch.Tensor] = []
        self.table: torch.Tensor | None = None

    def append_in_place(self, x: torch.Tensor) -> torch.Tensor:
        packed = x.clone().mul_(2)
        self.store.append(packed)
        return packed

    def add_table(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(float(x.shape[-1]))
        return x + self.table

    def unpack_kept(self, packed: torch.Tensor) -> torch.Tensor:
        self.store.append(packed)
        return packed.float()


@pytest.mark.parametrize(
    ("pack", "unpack", "which", "graph"),
    [
        (Keeping.append_in_place, lambda _, p: p / 2, "pack", "joint"),
        (lambda _, x: x.half(), Keeping.unpack_kept, "unpack", "symbolic"),
    ],
)
def test_hooks_that_keep_what_is_only_traced_run_eagerly(
    pack: Any, unpack: Any, which: str, graph: str, request: pytest.FixtureRequest
) -> None:
    keeping = Keeping()
    hooks = (lambda x: pack(keeping, x), lambda p: unpack(keeping, p))
    says = rf"run eagerly, outside of it: {which} kept a tensor that was only traced \(float"
    with pytest.warns(HooksWarning, match=says):
        result = through(request.getfixturevalue(graph), hooks)
    assert result.statistics["eager"] == 2


def test_hooks_that_use_what_was_kept_from_an_earlier_trace_run_eagerly(joint: JointGraph) -> None:
    keeping = Keeping()
    with pytest.warns(HooksWarning, match="kept a tensor"):
        through(joint, (keeping.add_table, lambda p: p - keeping.table))
    with pytest.warns(HooksWarning, match="kept a tensor"):
        through(joint, (lambda x: x + keeping.table, lambda p: p - keeping.table))


def test_what_hooks_raise_while_they_are_traced_names_the_hook(joint: JointGraph) -> None:
    def unpack(packed: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such scale.\nIn two lines.")

    with pytest.warns(HooksWarning, match="hooks 'custom' .*: unpack raised ValueError: no such"):
        through(joint, (lambda x: x.half(), unpack))
