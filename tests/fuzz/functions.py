"""What the lines of random programs may call besides PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

import remat


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


class Updating(torch.autograd.Function):
    """Saves a clone of a buffer, and then updates the buffer without ``mark_dirty``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        before = buffer.clone()
        ctx.save_for_backward(before)
        buffer.mul_(0.5).add_(x.mean())
        return x * before + buffer

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (before,) = ctx.saved_tensors
        return g * before, None


def without_grad(x: torch.Tensor) -> torch.Tensor:
    """A section that is not differentiated."""
    with torch.no_grad():
        return torch.sigmoid(x) * 2


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As many elements as the mask has set."""
    return torch.masked_select(x, mask)


def chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As many rows as the mask has set."""
    return x[mask.nonzero().squeeze(1)]


def _checked(x: torch.Tensor, n: torch.Tensor) -> int:
    k = int((n % (x.shape[0] + 1)).item())
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return k


def counted(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """As many rows as a number says."""
    k = _checked(x, n)
    return x[:k] * k


def split_at(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two parts, divided where a number says."""
    k = _checked(x, n)
    return x.split([k, x.shape[0] - k])


FUNCTIONS = (
    *("Scaled", "Gated", "NoisyBackward", "Updating", "without_grad"),
    *("masked", "chosen", "counted", "split_at"),
)

# Custom operators -------------------------------------------------------------------------------

OPERATORS = ("noisy", "counter", "tagged", "stir", "bent")

#: Calls of custom operators since the run began.
_CALLS = 0


def begin_run() -> None:
    """Makes operators that count their calls begin anew."""
    global _CALLS
    _CALLS = 0


def calls() -> torch.Tensor:
    """How often custom operators were called that nobody has declared pure."""
    return torch.tensor(_CALLS)


def _counted() -> int:
    global _CALLS
    _CALLS += 1
    return _CALLS


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _like(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("remat_fuzz::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws at random, and does not say so."""
    _counted()
    return _dense(x) + torch.rand(x.shape, dtype=x.dtype)


@torch.library.custom_op("remat_fuzz::counter", mutates_args=())
def counter(x: torch.Tensor) -> torch.Tensor:
    """Gives something else each time."""
    return _dense(x) * (1 + _counted() % 3) / 2


@torch.library.custom_op(
    "remat_fuzz::tagged", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def tagged(x: torch.Tensor) -> torch.Tensor:
    """Draws at random, and says so."""
    return _dense(x) + torch.rand(x.shape, dtype=x.dtype)


@torch.library.custom_op("remat_fuzz::stir", mutates_args=("into",))
def stir(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Draws at random, counts, and writes to what it is given."""
    into.mul_(0.5).add_(torch.rand(into.shape).to(into.dtype))
    return _dense(x) * (1 + _counted() % 3) / 2


@torch.library.custom_op("remat_fuzz::bent", mutates_args=())
def bent(x: torch.Tensor) -> torch.Tensor:
    """A function of its input, and declared to be one."""
    return _dense(x).tanh()


remat.declare_pure(bent)
for _operator in (noisy, counter, tagged, stir, bent):
    _operator.register_fake(_like)
for _operator in (noisy, tagged):
    _operator.register_autograd(lambda ctx, g: g * 1.0)
counter.register_autograd(lambda ctx, g: counter(g))
bent.register_autograd(
    lambda ctx, g: g * (1 - bent(ctx.saved_tensors[0]) ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


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
