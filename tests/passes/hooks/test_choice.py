"""Which saved tensors pass through hooks, and which are left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import remat
from remat.graph.joint import JointGraph, output_node
from remat.graph.problems.lowering import Decision
from remat.passes.core.state import State
from remat.passes.hooks.saved_tensor_hooks import PackSaved
from remat.planning.pipelines import prepare, split
from tests.graphs import joint_of, placeholders, weight
from tests.passes.hooks.hooked import (
    CAST,
    Hooks,
    assert_views_look_at_their_base,
    names_handed,
    through,
)


@pytest.fixture(scope="module")
def with_parameter() -> JointGraph:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(6, 6))

        def forward(self, x: torch.Tensor) -> Any:
            h = (x @ self.w).exp()
            return h, (h.sin() @ h).exp()

    return joint_of(Model(), weight(6, 6))


@pytest.mark.parametrize(
    ("keep", "packed"),
    [
        ("donated", {"sin"}),
        ("no_static", {"input", "exp", "sin", "exp_1"}),
        ("all", {"input", "parameter", "exp", "sin", "exp_1"}),
    ],
)
def test_filters(with_parameter: JointGraph, keep: str, packed: set[str]) -> None:
    result = through(with_parameter, Hooks(pack=CAST[0], unpack=CAST[1], filter=keep))
    inputs = dict(zip(placeholders(result.joint.graph), ("parameter", "input"), strict=False))
    handed = {n.removesuffix("_packed") for n in names_handed(result) if n.endswith("_packed")}
    assert {inputs.get(n, n) for n in handed} == packed, result.detail


def test_small_tensors_are_left(joint: JointGraph) -> None:
    result = through(joint, PackSaved(pair="bf16", min_bytes=4 * 8 * 4))
    assert (result.statistics["packed"], result.modified) == (2, True)
    result = through(joint, PackSaved(pair="bf16", min_bytes=4 * 8 * 4 + 1))
    assert (result.statistics["packed"], result.modified) == (0, False)
    assert "2 left: small" in result.detail


def test_what_would_grow_is_left(joint: JointGraph) -> None:
    wider = Hooks(pack=lambda x: x.to(torch.float64), unpack=lambda p: p.to(torch.float32))
    assert through(joint, wider).statistics["packed"] == 2, "nothing is lost: as PyTorch does"
    result = through(joint, replace(wider, lossy=True))
    assert result.statistics["packed"] == 0
    assert "2 left: would not get smaller" in result.detail


def normed(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x @ w, (8,))
    h = torch.where(mask, h, 0.5)
    return F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None]).sum()


def test_lossy_hooks_leave_what_must_be_exact() -> None:
    """Deviations and logsumexp rule whole rows; masks and indices are no numbers."""
    args = (weight(6, 8), weight(8, 8), torch.rand(6, 8) > 0.5)
    result = through(joint_of(normed, *args), "bf16")
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


def saving(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *saved: str) -> State:
    """The halves of a step that saves its inputs and these values."""
    state = prepare(joint_of(f, weight(6, 6), weight(6, 6)))
    decision = Decision(saved=("primals_1", "primals_2", *saved))
    return split(replace(state, decision=decision))


#: What backward reads from a saved tensor to choose a branch, a step or an index.
NOTHING, SIGNS, NUMBERS = range(3)


@pytest.mark.parametrize(
    ("f", "asked"),
    [
        (lambda h: h.softmax(1).exp(), NOTHING),
        (lambda h: h.exp() * (torch.zeros_like(h) > 1), NOTHING),
        (lambda h: F.dropout(h.sin(), 0.5, training=True).exp(), NOTHING),
        (lambda h: torch.where(h.sin() == float("inf"), 0.0, h.exp()), NOTHING),
        (lambda h: F.gelu(h.sin()) * torch.arange(h.shape[0]), NOTHING),
        (lambda h: F.leaky_relu(h).exp(), SIGNS),
        (lambda h: torch.where(h > 0, h.exp(), h).exp(), SIGNS),
        (lambda h: torch.where(h > 0.5, h.exp(), h).exp(), NUMBERS),
        (lambda h: torch.where(h.sin() > 0, h.exp(), h).exp(), NUMBERS),
        (lambda h: F.threshold(h, 0.5, 0.0).exp(), NUMBERS),
        (lambda h: torch.logit(h, eps=0.4).exp(), NUMBERS),
        (lambda h: torch.pdist(h).exp(), NUMBERS),
        (lambda h: h.sin() * h.gather(1, h.sin().argsort(1)), NUMBERS),
        (lambda h: h * h.round(), NUMBERS),
        (lambda h: h * torch.div(h, 2, rounding_mode="floor"), NUMBERS),
        (lambda h: h.sin().abs(), NUMBERS),
        (lambda h: F.leaky_relu(h.sin()), NUMBERS),
        (lambda h: F.hardtanh(h.sin()).exp(), NUMBERS),
        (lambda h: h.sin().max(1)[0].exp(), NUMBERS),
        (lambda h: h.exp() * h.bool(), NUMBERS),
    ],
)
def test_backward_does_not_compare_anew_what_lost_something(f: Any, asked: int) -> None:
    """Which branch, step, index or side of a kink it was is what forward says."""
    halves = saving(lambda x, w: f(x @ w).sum(), "mm")
    # The first pair keeps no signs, the second keeps signs, and the third counts as keeping all numbers.
    pairs: list[Any] = ["int8", "bf16", Hooks.of(CAST)]
    for pair in pairs[:asked]:
        assert "1 left: backward chooses by it" in PackSaved(pair=pair).run(halves).detail
    result = PackSaved(pair=pairs[asked]).run(halves)
    assert {"mm_packed", "mm_packed_0"} & {*names_handed(result)}, result.detail


def test_what_a_gradient_goes_through_on_its_way_to_a_kink_is_packed() -> None:
    """A derivative of a kink scales the gradient that it is given, and compares the other number."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).relu() @ w).sin().sum()

    joint = joint_of(f, weight(6, 6), weight(6, 6))
    result = through(joint, "int8")
    assert "mm_1_packed_0" in names_handed(result), result.detail
    assert "1 left: backward chooses by it" in result.detail
    kept = through(joint, "bf16")  # which keeps signs
    assert "relu_packed" in names_handed(kept), kept.detail


def test_a_memory_that_two_saved_tensors_share_is_left() -> None:
    """Packed twice it would take more room, and what is one would become two."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return (h.t() @ x).sin().sum() + h.sin().sum()

    result = PackSaved(pair=Hooks.of(CAST)).run(saving(f, "mm", "t", "mm_1"))
    assert "2 left: shares its memory" in result.detail
    assert {n for n in names_handed(result) if n.endswith("_packed")} == {"mm_1_packed"}


def test_a_view_that_shows_all_of_a_memory_is_as_good_as_its_base() -> None:
    halves = saving(lambda x, w: ((x @ w).t() @ x).sum(), "t")
    result = PackSaved(pair=Hooks.of(CAST)).run(halves)
    assert "t_packed" in names_handed(result)
    assert result.backward is not None
    assert_views_look_at_their_base(result.backward)


def test_a_part_of_a_memory_is_left() -> None:
    halves = saving(lambda x, w: (x @ w)[:3].sin().sum(), "slice_1")
    result = PackSaved(pair=Hooks.of(CAST)).run(halves)
    assert "1 left: part of a memory" in result.detail


def test_states_of_generators_are_left() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(x @ w, 0.5, training=True).sin().sum()

    joint = joint_of(f, weight(64, 64), weight(64, 64))
    plan = remat.plan(joint, 0, hooks=(lambda x: x.clone(), lambda p: p))
    out: Any = output_node(plan.forward.graph).args[0]
    assert [str(v) for v in out[1:]] == ["primals_1", "primals_2", "native_dropout_state"]
