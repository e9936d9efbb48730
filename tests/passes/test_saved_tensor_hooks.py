"""Saved tensors pass through hooks: where pack and unpack stand, what is handed over, what is left."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.nn import functional as F

import remat
from remat.errors import BudgetError, PlanError, ProblemError
from remat.graph.joint import JointGraph, output_node
from remat.graph.liveness import saved_storages, simulate_peak
from remat.graph.lowering import Decision
from remat.graph.storages import storage_key
from remat.graph.verify import Split, verify
from remat.passes.base import PassResult
from remat.passes.packing import HooksWarning
from remat.passes.saved_tensor_hooks import PackSaved
from remat.pipelines import prepare, split
from tests.graphs import joint_of, placeholders, weight

Hooks = remat.SavedTensorHooks


def through(
    f: Callable[..., Any] | JointGraph, args: Iterable[torch.Tensor], hooks: Any, **capture: Any
) -> PassResult:
    """Both halves of a step with its saved tensors passed through hooks, checked in every way."""
    joint = f if isinstance(f, JointGraph) else joint_of(f, *args, **capture)
    hooks = hooks if isinstance(hooks, PackSaved) else PackSaved.of(Hooks.of(hooks))
    result = hooks.run(split(prepare(joint)))
    assert result.forward is not None
    assert result.backward is not None
    result.forward.graph.lint()
    result.backward.graph.lint()
    verify(Split(joint=joint, forward=result.forward, backward=result.backward))
    assert_handed_in_order(result)
    assert_views_look_at_their_base(result.backward)
    return result


def assert_handed_in_order(result: PassResult) -> None:
    """Forward ends in tensors, then sizes; backward begins with sizes, then tensors, by name."""
    assert result.forward is not None
    assert result.backward is not None
    own = result.joint.num_fwd_outputs
    out = output_node(result.forward.graph)
    handed: list[Any] = list(out.args[0])[own:]  # type: ignore[arg-type]
    tensors = [v.name for v in handed if isinstance(v.meta["val"], torch.Tensor)]
    sizes = [v.name for v in handed if not isinstance(v.meta["val"], torch.Tensor)]
    assert [v.name for v in handed] == tensors + sizes
    count = len(handed)
    assert placeholders(result.backward)[:count] == sizes + tensors
    assert [d.idx for d in out.meta["desc"][own:]] == list(range(count))
    assert len(out.meta["output_stack_traces"]) == own + count
    values = {n.name: n.meta["val"] for n in result.backward.graph.nodes if "val" in n.meta}
    for v in handed:
        assert storage_key(values[v.name]) == storage_key(v.meta["val"])


def assert_views_look_at_their_base(module: fx.GraphModule) -> None:
    for n in module.graph.nodes:
        if getattr(n.target, "overloadpacket", None) in VIEWS:
            assert storage_key(n.meta["val"]) == storage_key(n.args[0].meta["val"]), n.name


VIEWS = (torch.ops.aten.t, torch.ops.aten.detach, torch.ops.aten.view, torch.ops.aten.permute)


def shown(module: fx.GraphModule | None) -> str:
    """A module, a line for each node."""
    assert module is not None
    lines = []
    for n in module.graph.nodes:
        if n.op == "output":
            lines.append(f"return {', '.join(map(str, n.args[0]))}")
        elif n.op == "placeholder":
            lines.append(f"{n.name}: {kind(n.meta['val'])}")
        else:
            args = ", ".join(map(str, [*n.args, *(f"{k}={v}" for k, v in n.kwargs.items())]))
            lines.append(f"{n.name}: {kind(n.meta['val'])} = {n.target}({args})")
    text = "\n".join(lines)
    for k, symbol in enumerate(dict.fromkeys(re.findall(r"\bs\d+\b", text))):
        text = re.sub(rf"\b{symbol}\b", f"z{k}", text)
    return text


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin().exp().sum()


ARGS = (weight(4, 6), weight(6, 8))
CAST = (lambda x: x.to(torch.bfloat16), lambda p: p.to(torch.float32))


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    return joint_of(product, *ARGS)


# Where they stand ---------------------------------------------------------------------------------


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
        shown(result.backward),
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
mul_8: float32[z0, z1] = aten.mul.Tensor(expand, detach_1)
mm_unpacked: float32[z0, z1] = aten.view.default(mm_packed_0, [primals_1, -1])
cos: float32[z0, z1] = aten.cos.default(mm_unpacked)
mul_9: float32[z0, z1] = aten.mul.Tensor(mul_8, cos)
t: float32[z2, z0] = aten.t.default(primals_3)
mm_1: float32[z2, z1] = aten.mm.default(t, mul_9)
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


def deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(16):
        x = torch.sin(x @ w)
    return x.sum()


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


# Which ones ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "packed"),
    [
        ("donated", {"sin"}),
        ("no_static", {"input", "exp", "sin", "exp_1"}),
        ("all", {"input", "parameter", "exp", "sin", "exp_1"}),
    ],
)
def test_filters(keep: str, packed: set[str]) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(6, 6))

        def forward(self, x: torch.Tensor) -> Any:
            h = (x @ self.w).exp()
            return h, (h.sin() @ h).exp()

    result = through(Model(), (weight(6, 6),), Hooks(pack=CAST[0], unpack=CAST[1], filter=keep))
    inputs = dict(zip(placeholders(result.joint.graph), ("parameter", "input"), strict=False))
    handed = {n.removesuffix("_packed") for n in names_handed(result) if n.endswith("_packed")}
    assert {inputs.get(n, n) for n in handed} == packed, result.detail


def names_handed(result: PassResult) -> list[str]:
    assert result.forward is not None
    out: Any = output_node(result.forward.graph).args[0]
    return [v.name for v in out[result.joint.num_fwd_outputs :]]


def test_small_tensors_are_left(joint: JointGraph) -> None:
    result = through(joint, (), PackSaved(pair="bf16", min_bytes=4 * 8 * 4))
    assert (result.statistics["packed"], result.modified) == (2, True)
    result = through(joint, (), PackSaved(pair="bf16", min_bytes=4 * 8 * 4 + 1))
    assert (result.statistics["packed"], result.modified) == (0, False)
    assert "2 left: small" in result.detail


def normed(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x @ w, (8,))
    h = torch.where(mask, h, 0.5)
    return F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None]).sum()


def test_lossy_hooks_leave_what_must_be_exact() -> None:
    """Deviations and logsumexp rule whole rows; masks and indices are no numbers."""
    args = (weight(6, 8), weight(8, 8), torch.rand(6, 8) > 0.5)
    result = through(normed, args, "bf16")
    kept = {n for n in names_handed(result) if not n.startswith("primals") and "_packed" not in n}
    assert result.forward is not None
    nodes = {n.name: n for n in result.forward.graph.nodes}
    sources = sorted((str(nodes[n].args[0]), nodes[n].args[1]) for n in kept)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert sources == [
        (attention, 1),
        ("native_layer_norm", 1),
        ("native_layer_norm", 2),
    ], result.detail
    assert "mm_packed" in nodes, "what they are about is packed all the same"


def test_backward_does_not_choose_anew_by_what_lost_something() -> None:
    """Indices that backward computes again must be those of forward."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scores = (x @ w).sin()
        return (scores * x.gather(1, scores.argsort(1))).sum()

    state = prepare(joint_of(f, weight(6, 6), weight(6, 6)))
    decided = replace(state, decision=Decision(saved=("primals_1", "primals_2", "mm")))
    exact = PackSaved(pair="bf16").run(split(decided))
    assert "1 left: backward chooses by it" in exact.detail
    lossless = PackSaved(pair=Hooks.of(CAST)).run(split(decided))
    assert lossless.backward is not None
    chosen = next(n for n in lossless.backward.graph.nodes if n.name == "sort")
    assert "mm_unpacked" in ancestors(chosen), "without the rule, it would have chosen anew"


def ancestors(node: fx.Node) -> set[str]:
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        for n in stack.pop().all_input_nodes:
            if n not in found:
                found[n] = None
                stack.append(n)
    return {n.name for n in found}


def test_a_memory_that_two_saved_tensors_share_is_left() -> None:
    """Packed twice it would take more room, and what is one would become two."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return (h.t() @ x).sin().sum() + h.sin().sum()

    state = prepare(joint_of(f, weight(6, 6), weight(6, 6)))
    twice = replace(state, decision=Decision(saved=("primals_1", "primals_2", "mm", "t", "mm_1")))
    result = PackSaved(pair=Hooks.of(CAST)).run(split(twice))
    assert "2 left: shares its memory" in result.detail
    assert {n for n in names_handed(result) if n.endswith("_packed")} == {"mm_1_packed"}


def test_a_view_that_shows_all_of_a_memory_is_as_good_as_its_base() -> None:
    state = prepare(joint_of(lambda x, w: ((x @ w).t() @ x).sum(), weight(6, 6), weight(6, 6)))
    decided = replace(state, decision=Decision(saved=("primals_1", "primals_2", "t")))
    result = PackSaved(pair=Hooks.of(CAST)).run(split(decided))
    assert "t_packed" in names_handed(result)
    assert result.backward is not None
    assert_views_look_at_their_base(result.backward)


def test_a_part_of_a_memory_is_left() -> None:
    state = prepare(joint_of(lambda x, w: (x @ w)[:3].sin().sum(), weight(6, 6), weight(6, 6)))
    part = next(n.name for n in state.joint.graph.nodes if n.name.startswith("slice"))
    decided = replace(state, decision=Decision(saved=("primals_1", "primals_2", part)))
    result = PackSaved(pair=Hooks.of(CAST)).run(split(decided))
    assert "1 left: part of a memory" in result.detail


def test_states_of_generators_are_left() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(x @ w, 0.5, training=True).sin().sum()

    joint = joint_of(f, weight(64, 64), weight(64, 64))
    plan = remat.plan(joint, 0, hooks=(lambda x: x.clone(), lambda p: p))
    out: Any = output_node(plan.forward.graph).args[0]
    assert [str(v) for v in out[1:]] == ["primals_1", "primals_2", "native_dropout_state"]
    mixed = remat.plan(joint, 0.5, hooks="bf16")
    out = output_node(mixed.forward.graph).args[0]
    names = [str(v) for v in out]
    assert any(n.endswith("_packed") for n in names) or "native_dropout_state" in names


# Hooks as they come -------------------------------------------------------------------------------


def test_a_tensor_that_comes_back_unchanged_is_left(joint: JointGraph) -> None:
    def pack(x: torch.Tensor) -> Any:
        return x.detach() if x.shape[0] == 4 else x.half()

    with pytest.warns(HooksWarning, match="pack returned every one of the 2 saved tensors"):
        result = through(joint, (), (pack, lambda p: p))
    assert not result.modified
    assert names_handed(result) == ["primals_1", "primals_2", "mm", "exp"]


def test_the_tensor_itself_may_be_part_of_what_is_kept(joint: JointGraph) -> None:
    result = through(joint, (), (lambda x: (x, x.sum()), lambda p: p[0] + 0 * p[1]))
    assert names_handed(result)[2:] == ["mm_packed_1", "mm", "exp_packed_1", "exp"]
    result = through(
        joint, (), (lambda x: [x.sum(), x.sum()], lambda p: (p[0] + p[1]).expand(4, 8))
    )
    assert result.statistics["packed"] == 2


def test_nothing_at_all_may_be_kept(joint: JointGraph) -> None:
    result = through(joint, (), (lambda x: list(x.shape), lambda p: torch.zeros(*p)))
    assert names_handed(result) == ["primals_1", "primals_2"]


def test_writes_in_place_are_taken_out_of_the_hooks(joint: JointGraph) -> None:
    result = through(joint, (), (lambda x: x.clone().mul_(2), lambda p: p.clone().div_(2)))
    for module in (result.forward, result.backward):
        assert "aten.mul_" not in shown(module)
        assert "aten.div_" not in shown(module)


def test_closures_become_constants(joint: JointGraph) -> None:
    table = torch.arange(8.0)
    result = through(joint, (), (lambda x: x + table, lambda p: p - torch.tensor(3.0) - table + 3))
    assert result.forward is not None
    (first, *_) = [n for n in result.forward.graph.nodes if n.op == "get_attr"]
    assert getattr(result.forward, first.target) is table


def test_another_layout_is_put_right(joint: JointGraph) -> None:
    hooks = (lambda x: x.t().contiguous(), lambda p: p.t())
    result = through(joint, (), hooks)
    assert result.backward is not None
    nodes = {n.name: n for n in result.backward.graph.nodes}
    for name in ("mm_unpacked", "exp_unpacked"):
        assert nodes[name].meta["val"].stride() == (8, 1)


def test_graph_modules_are_hooks(joint: JointGraph) -> None:
    result = through(joint, (), (fx.symbolic_trace(CAST[0]), fx.symbolic_trace(CAST[1])))
    assert result.statistics["packed"] == 2


def test_hooks_are_decomposed_as_the_lowering_wants() -> None:
    hooks = (lambda x: F.silu(x), lambda p: F.silu(p))
    for lower, present in (("eager", True), ("inductor", False)):
        joint = replace(joint_of(product, *ARGS), lower=lower)
        assert ("aten.silu.default" in shown(through(joint, (), hooks).forward)) is present


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
        through(joint, (), hooks)


def test_what_cannot_be_traced_stands_behind_operators(joint: JointGraph) -> None:
    hooks = (lambda x: x.numpy().copy(), lambda p: torch.from_numpy(p))
    with pytest.warns(HooksWarning, match=r"run eagerly, outside of it: RuntimeError: \.numpy\(\)"):
        result = through(joint, (), hooks)
    assert result.statistics["eager"] == 2
    assert "mm_packed: int64[] = remat.pack_eagerly.default(mm, process-" in shown(result.forward)
    assert "mm_unpacked: float32[4, 8] = remat.unpack_eagerly.default(" in shown(result.backward)


def test_numbers_that_depend_on_data_cannot_be_traced(joint: JointGraph) -> None:
    hooks = (lambda x: (x, x.abs().max().item()), lambda p: p[0])
    with pytest.warns(HooksWarning, match="run eagerly"):
        through(joint, (), hooks)


def test_random_hooks_are_inlined_only_where_the_lowering_can_take_them(joint: JointGraph) -> None:
    hooks = (lambda x: (x + torch.rand_like(x)).half(), lambda p: p.float())
    assert "aten.rand_like.default" in shown(through(joint, (), hooks).forward)
    with pytest.warns(HooksWarning, match="draws random numbers"):
        through(replace(joint, lower="inductor"), (), hooks)


def test_what_cannot_be_traced_works_with_symbols() -> None:
    hooks = (lambda x: x.numpy().copy(), lambda p: torch.from_numpy(p))
    with pytest.warns(HooksWarning, match="run eagerly"):
        result = through(product, (torch.randn(5, 6), weight(6, 8)), hooks, dynamic=True)
    assert "[primals_1, primals_4], [primals_4, 1]" in shown(result.backward)


# Plans and pipelines ------------------------------------------------------------------------------


def test_plans_count_what_is_really_handed_over(joint: JointGraph) -> None:
    plain, packed = remat.plan(joint, 1), remat.plan(joint, 1, hooks="float8")
    assert (plain.saved_bytes, packed.saved_bytes) == (128, 32 + 4)
    assert packed.saved == plain.saved
    assert "36 B" in packed.explain()
    again = remat.plan(joint, plan=remat.Plan.from_json(packed.to_json()), hooks="float8")
    assert again.saved_bytes == packed.saved_bytes


def test_a_budget_on_the_peak_is_held_by_the_packed_step() -> None:
    joint = joint_of(deep, torch.randn(64, 64), weight(64, 64))
    plain = remat.plan(joint, 1)
    packed = remat.plan(joint, 1, hooks="bf16")
    between = (plain.peak_bytes + packed.peak_bytes) // 2
    held = remat.plan(joint, remat.Peak(between), hooks="bf16")
    assert held.peak_bytes <= between
    assert held.recompute_cost <= packed.recompute_cost
    assert remat.plan(joint, remat.Peak(between)).recompute_cost > held.recompute_cost


def test_hooks_that_break_the_budget_are_refused(joint: JointGraph) -> None:
    grows = Hooks(pack=lambda x: (x.clone(), x.clone()), unpack=lambda p: p[0])
    with pytest.raises(BudgetError, match="forward hands over 256 bytes, 128 are allowed"):
        remat.plan(joint, 1, hooks=grows)
    alive = Hooks(pack=CAST[0], unpack=CAST[1], filter="all")
    with pytest.raises(BudgetError, match="was alive anyway"):
        remat.plan(joint, 0, hooks=alive)


def test_hooks_and_a_pipeline_do_not_go_together(joint: JointGraph) -> None:
    pipeline = f"{remat.default_pipeline(1)},saved-tensor-hooks(pair=bf16,min-bytes=64)"
    assert remat.plan(joint, pipeline=pipeline).saved_bytes == 64
    with pytest.raises(ProblemError, match="end the pipeline with the pass"):
        remat.plan(joint, pipeline=pipeline, hooks="bf16")


def test_the_pass_is_written_as_text() -> None:
    text = "partition,saved-tensor-hooks(pair=int8,filter=no_static,min-bytes=4096)"
    manager = remat.PassManager.parse(text)
    assert str(manager) == text
    assert remat.PassManager.parse(str(manager)) == manager
    with pytest.raises(ProblemError, match="filter is 'none'"):
        remat.PassManager.parse("partition,saved-tensor-hooks(filter=none)")
    with pytest.raises(ProblemError, match="ready-made pair"):
        remat.PassManager.parse("partition,saved-tensor-hooks(pair=int4)")


def test_a_graph_that_is_not_split_is_left(joint: JointGraph) -> None:
    result = PackSaved().run(prepare(joint))
    assert not result.modified
    assert result.detail == "not partitioned"


def test_each_kind_of_tensor_is_traced_once() -> None:
    seen: list[torch.Size] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return x.half()

    with warnings.catch_warnings():
        through(deep, (weight(8, 8), weight(8, 8)), (pack, lambda p: p.float()))
    assert seen == [torch.Size([8, 8])]
