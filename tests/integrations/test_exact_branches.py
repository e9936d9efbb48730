"""Compiled steps that branch on rounded numbers: backward goes where forward went, at every budget.

The router has nearly equal rows, so that many tokens are near a tie. Each token adds 1 to one element of the gradient
of a table with a row for each expert, so this gradient says where backward sent the token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import torch_compat
from remat.errors import ProblemError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning",
    "ignore::remat.errors.PeakWarning",
    "ignore::remat.errors.BudgetWarning",
)

Tensor = torch.Tensor
TOKENS, WIDTH, EXPERTS = 512, 32, 16
#: Whether Inductor's ``emulate_precision_casts`` also rounds numbers in the code, such as 0.37. Eager PyTorch does not.
ROUNDS_NUMBERS = not torch_compat.is_before("2.15")
MAXIMA: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda z: z.amax(-1),
    "mask of the maximum": lambda z: z * (z == z.amax(-1, keepdim=True)),
    "share of the maximum": lambda z: (z / z.amax(-1, keepdim=True)).square(),
}


class Router(nn.Module):
    """Send each token to the expert with the largest score."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        rows = torch.randn(1, WIDTH) * 0.2 + torch.randn(EXPERTS, WIDTH) * 2e-3
        self.router = nn.Parameter(rows)
        self.table = nn.Parameter(torch.zeros(EXPERTS, TOKENS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm
        a, b = self.up(h).chunk(2, -1)
        h = nn.functional.silu(a) * b * 0.37
        scores = (h @ self.router.t()).softmax(-1)
        expert = scores.argmax(-1)
        sent = self.table[expert, torch.arange(TOKENS)].sum()
        return x + self.down(h) * scores.gather(-1, expert[:, None]), sent, expert


class Routers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sent, experts = torch.zeros(()), []
        for layer in self.layers:
            x, one, expert = layer(x)
            sent, experts = sent + one, [*experts, expert]
        return x, sent, torch.stack(experts)


def routed(**options: Any) -> tuple[Tensor, Tensor]:
    """The experts to which forward sends the tokens, and those to which backward does."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Routers()
    for name, p in model.named_parameters():
        p.data = p.data if name.endswith("table") else p.data.bfloat16()
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    y, sent, experts = torch.compile(model, backend="remat", options=options)(x)
    (y.float().square().mean() + sent).backward()
    tables = [layer.table.grad for layer in model.layers]
    assert all(int(t.sum()) == TOKENS for t in tables)  # type: ignore[union-attr]
    return experts, torch.stack([t.argmax(0) for t in tables])  # type: ignore[union-attr]


def test_tokens_go_where_forward_sent_them_at_every_budget() -> None:
    first, _ = routed(budget=1)
    if not ROUNDS_NUMBERS:
        assert torch.equal(first, routed(budget=1, lower="eager")[0])
    for budget in (1, 0.8, 0.5, 0, "peak:0"):
        forward, backward = routed(budget=budget)
        assert torch.equal(forward, backward)
        assert torch.equal(forward, first)


def test_numbers_in_the_code_are_rounded_to_16_bits_since_2_15() -> None:
    """Plain Inductor. If this fails, PyTorch multiplies by 0.37 again, as eager code does: change `ROUNDS_NUMBERS`."""
    torch.compiler.reset()
    x = torch.randn(64, 64).bfloat16()
    with torch_compat.inductor_config.patch(emulate_precision_casts=True):
        found = torch.compile(lambda x: x * 0.37)(x)
    assert torch.equal(found, x * (torch.tensor(0.37).bfloat16() if ROUNDS_NUMBERS else 0.37))


@pytest.mark.parametrize("off", [{"exact_branches": False}, {"emulate_precision_casts": False}])
def test_without_exact_rounding_backward_still_follows_forward(off: dict[str, Any]) -> None:
    for budget in (0.8, 0.5):
        forward, backward = routed(budget=budget, **off)
        assert torch.equal(forward, backward)


@pytest.mark.parametrize("form", MAXIMA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_maxima_are_those_of_budget_1(form: str, dtype: torch.dtype) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return MAXIMA[form](((x @ w) * 0.37).softmax(-1)).sum()

    found = []
    for budget in (1, 0.5, 0, "peak:0.5"):
        torch.compiler.reset()
        torch.manual_seed(0)
        x, w = (torch.randn(64, 64).mul(c).to(dtype).requires_grad_() for c in (1, 0.1))
        torch.compile(step, backend="remat", options={"budget": budget})(x, w).backward()
        found.append(torch.cat([x.grad, w.grad]).float())  # type: ignore[list-item]
    assert found[0].isfinite().all()
    assert found[0].any()
    assert all(torch.equal(found[0], other) for other in found[1:])


@torch_compat.functorch_config.patch(enable_autograd_cache=False)
def test_one_line_says_that_results_are_rounded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "remat"):
        routed(budget=1)
    (line,) = (r.message for r in caplog.records if "exact_branches" in r.message)
    assert "argmax" in line
    caplog.clear()
    with caplog.at_level(logging.INFO, "remat"):
        routed(budget=1, exact_branches=False)
    assert not any("exact_branches" in r.message for r in caplog.records)


def test_the_option_is_a_bool() -> None:
    with pytest.raises(ProblemError, match="exact_branches is 'no'; expected True"):
        remat.backend(exact_branches="no")  # type: ignore[arg-type]
