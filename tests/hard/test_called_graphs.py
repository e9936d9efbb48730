"""Graphs that a graph calls: conditions, loops, scans, and the scores and masks of flex attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops import associative_scan, while_loop
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import remat
from tests.graphs import joint_of
from tests.hard.steps import check, drawn, pair

T = torch.Tensor


def condition(x: T, w: T) -> T:
    y = torch.sin(x @ w)
    z = torch.cond(y.sum() > 0, lambda: (y @ w).exp().sin(), lambda: (y * 2).cos())
    return z.tanh().exp()


def dropping_condition(x: T, w: T) -> T:
    y = torch.sin(x @ w)
    z = torch.cond(y.sum() < 1e9, lambda y: F.dropout(y, 0.5), lambda y: y.cos(), (y,))
    return z.tanh().exp()


def condition_without_inputs(x: T, w: T) -> T:
    scale = torch.cond((x.sum() > 0).detach(), lambda: torch.tensor(2.0), lambda: torch.tensor(3.0))
    return ((x @ w).sin() * scale).exp()


def loop(x: T, w: T) -> T:
    def body(i: T, y: T) -> Any:
        return i + 1, torch.tanh(y @ w)

    return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x.sin()))[1].exp()


def scanned(x: T, w: T) -> Any:
    def combine(carry: T, row: T) -> Any:
        new = torch.tanh(carry @ w + row)
        return new, new.exp()

    carry, rows = scan(combine, w[0].sin(), x)
    return carry.cos(), rows.sin()


def mapping(x: T, w: T) -> T:
    return mapped(lambda row, w: torch.tanh(row[None] @ w)[0].exp(), x.sin(), w).cos()


def products(x: T, w: T) -> T:
    y = (x @ w).sin()
    return associative_scan(lambda a, b: a * b, y, 0, combine_mode="generic").exp()


PROGRAMS: list[Callable[..., Any]] = [
    condition,
    dropping_condition,
    condition_without_inputs,
    loop,
    scanned,
    mapping,
    products,
]


@pytest.mark.filterwarnings("ignore:backward runs 'cond_1'")  # wrong in eager mode too
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients(program: Callable[..., Any]) -> None:
    """Every call runs again at the least budget; budget 1 is checked for one program."""
    budgets = (0, 1) if program is condition else (0,)
    least, *_ = check(lambda: (program, pair()), budgets=budgets, captured=program is condition)
    if program is dropping_condition:
        assert not any(n.startswith("cond") for n in least.recomputed), "drawn once"
    else:
        assert least.recomputed


def test_under_inductor() -> None:
    def f(x: T, w: T) -> T:
        return torch.cond(x.sum() > 0, lambda: (x @ w).sin(), lambda: x.cos()).sin()

    (plan,) = check(lambda: (f, pair()), lower="inductor")
    assert any(n.startswith("cond") for n in plan.recomputed)


def test_a_condition_on_a_size() -> None:
    def f(x: T, w: T) -> T:
        z = torch.cond(x.shape[0] > 4, lambda x: x.exp().sin(), lambda x: x.cos(), (x,))
        return (z @ w).tanh()

    check(lambda: (f, pair()), budgets=(0,), dynamic=True)


def calls_once(joint: remat.JointGraph, name: str) -> int:
    """What running one operator once more costs, in floating-point operations."""
    plan = remat.plan(joint, 0, cost="flops")
    assert any(n.startswith(name) for n in plan.recomputed), plan.recomputed
    return plan.recompute_cost


def test_operators_cost_what_the_graphs_cost_that_they_call() -> None:
    row, product = 2 * 8 * 8, 2 * 6 * 8 * 8
    assert calls_once(joint_of(mapping, *pair()), "map_impl") >= 6 * row, "each of six rows"
    dearest = calls_once(joint_of(condition, *pair()), "cond")
    assert 2 * product <= dearest < 3 * product, "the dearest branch, after a product"


# Flex attention ---------------------------------------------------------------------------------------

# PyTorch refuses up front to differentiate it on a CPU, though its reference kernels can; without that check the graph is
# what it is elsewhere.


def heads() -> tuple[T, T, T]:
    return tuple(drawn(1, 2, 16, 16) * (k + 1) for k in range(3))  # type: ignore[return-value]


def plain(q: T, k: T, v: T) -> T:
    return flex_attention(q.sin(), k, v.cos()).exp()  # type: ignore[union-attr]


def causal_and_biased() -> Any:
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu", BLOCK_SIZE=16
    )

    aux = AuxRequest(lse=True)

    def f(q: T, k: T, v: T, bias: T) -> Any:
        def score(s: T, b: T, h: T, i: T, j: T) -> T:
            return s + bias[h] * (i - j)

        given = {"score_mod": score, "block_mask": mask, "return_aux": aux}
        return flex_attention(q.sin(), k, v.cos(), **given)  # type: ignore[arg-type]

    return f, (*heads(), drawn(2))


def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_validate_device", lambda q, k, v: None)
    check(causal_and_biased, budgets=(0,))
    joint = joint_of(plain, *heads())
    least = remat.plan(joint, 0, cost="flops")
    assert "flex_attention" in least.recomputed
    assert "flex_attention" not in remat.plan(joint, 1).recomputed
    assert least.recompute_cost >= 2 * 2 * (2 * 16 * 16 * 16), "two heads, two products each"
