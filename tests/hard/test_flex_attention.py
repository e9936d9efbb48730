"""Flex attention: scores and masks as graphs, one of them with a gradient of its own.

PyTorch refuses up front to differentiate it on a CPU, though its reference kernels can; without that
check the graph is what it is elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import remat
from tests.graphs import joint_of
from tests.hard.steps import check, drawn

pytestmark = [
    # Dynamo looks at .grad of what a graph hands to the graphs it calls.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

T = torch.Tensor


@pytest.fixture
def differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_validate_device", lambda q, k, v: None)


def heads(*, grad: bool = True) -> tuple[T, T, T]:
    return tuple(drawn(1, 2, 16, 16, grad=grad) * (k + 1) for k in range(3))  # type: ignore[return-value]


def plain(q: T, k: T, v: T) -> T:
    return flex_attention(q.sin(), k, v.cos()).exp()  # type: ignore[union-attr]


def biased(q: T, k: T, v: T, bias: T) -> T:
    def score(s: T, b: T, h: T, i: T, j: T) -> T:
        return s + bias[h] * (i - j)

    return flex_attention(q.sin(), k, v.cos(), score_mod=score).exp()  # type: ignore[union-attr]


def causal() -> Any:
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu", BLOCK_SIZE=16
    )

    aux = AuxRequest(lse=True)

    def f(q: T, k: T, v: T) -> Any:
        return flex_attention(q.sin(), k, v.cos(), block_mask=mask, return_aux=aux)

    return f, heads()


@pytest.mark.usefixtures("differentiable")
def test_plain() -> None:
    least, _, full = check(lambda: (plain, heads()))
    assert "flex_attention" in least.recomputed
    assert "flex_attention" not in full.recomputed


@pytest.mark.usefixtures("differentiable")
def test_a_score_with_a_gradient() -> None:
    check(lambda: (biased, (*heads(), drawn(2))))


@pytest.mark.usefixtures("differentiable")
def test_a_block_mask_and_two_results() -> None:
    check(causal)


def test_nothing_differentiated() -> None:
    check(lambda: (plain, heads(grad=False)), plans=0)


def test_a_gradient_on_a_cpu_is_refused_by_pytorch() -> None:
    with pytest.raises(remat.RematError, match="does not support backward on CPU"):
        joint_of(plain, *heads())


@pytest.mark.usefixtures("differentiable")
def test_it_costs_what_attention_costs() -> None:
    plan = remat.plan(joint_of(plain, *heads()), 0, cost="flops")
    assert plan.recompute_cost >= 2 * 2 * (2 * 16 * 16 * 16), "two heads, two products each"
