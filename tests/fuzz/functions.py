"""What the lines of random programs may call besides PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy


class Scaled(torch.autograd.Function):
    """Saves a result, and a number that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, c: float) -> torch.Tensor:
        y = torch.tanh(x) * c
        ctx.save_for_backward(y)
        ctx.c = c
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return g * (ctx.c - y * y / ctx.c), None


class Gated(torch.autograd.Function):
    """Returns a second value that is not differentiable, and saves what it computed on the way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        gate = torch.sigmoid(y)
        open_ = gate > 0.5
        ctx.save_for_backward(x, gate)
        ctx.mark_non_differentiable(open_)
        return x * gate, open_

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
        x, gate = ctx.saved_tensors
        return g * gate, g * x * gate * (1 - gate)


class NoisyBackward(torch.autograd.Function):
    """Draws at random in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * x.sin() + 0.1 * torch.randn_like(g)


def without_grad(x: torch.Tensor) -> torch.Tensor:
    """A section that is not differentiated."""
    with torch.no_grad():
        return torch.sigmoid(x) * 2


# Checkpointed regions -----------------------------------------------------------------------------

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)


def _policy(
    products: CheckpointPolicy,
    others: CheckpointPolicy,
    ctx: Any,
    op: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    return products if op in _PRODUCTS else others


#: What a region does with products, and with everything else.
POLICIES = {
    "save-products": (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE),
    "prefer-products": (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_RECOMPUTE),
    "save-others": (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE),
}


def checkpoint(region: Callable[..., Any], *args: Any, policy: str | None = None) -> Any:
    """Runs a region whose values are computed again in backward."""
    if policy is None:
        return torch_checkpoint.checkpoint(region, *args, use_reentrant=False)
    contexts = functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts,
        functools.partial(_policy, *POLICIES[policy]),
    )
    return torch_checkpoint.checkpoint(region, *args, use_reentrant=False, context_fn=contexts)


def plainly(region: Callable[..., Any], *args: Any, policy: str | None = None) -> Any:
    """Runs a region as if it were not one: what `checkpoint` must not differ from."""
    return region(*args)
