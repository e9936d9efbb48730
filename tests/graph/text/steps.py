"""Small training steps, one for each thing that a text must be able to say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from tests.graphs import joint_of, weight

Step = Callable[..., Any]
T = torch.Tensor
#: Every step and its arguments, by name.
STEPS: dict[str, tuple[Step, tuple[T, ...]]] = {}


def step(*args: T) -> Callable[[Step], Step]:
    """Registers a step with its arguments."""

    def register(f: Step) -> Step:
        STEPS[f.__name__] = f, args
        return f

    return register


@step(torch.randn(8, 4), weight(4, 4))
def mlp(x: T, w: T) -> T:
    return torch.mm(torch.mm(x, w).relu(), w).sum()


@step(torch.randn(8, 4), weight(4, 4))
def dropout(x: T, w: T) -> T:
    return F.dropout(torch.mm(x, w), 0.25).sum()


@step(weight(4, 4))
def views(x: T) -> Any:
    y = x * 2
    first, second = y.split(2)
    return y.t(), second[:, 1:], first.expand(3, 2, 4), x.view(-1)


@step(weight(4), torch.randn(4))
def mutation(x: T, buf: T) -> T:
    h = torch.sin(buf)
    with torch.no_grad():
        buf.add_(1)
    return (x * h).sum()


@step(torch.randn(8, 4), weight(4, 6))
def symbols(x: T, w: T) -> T:
    return (torch.mm(x, w)[: x.shape[0] // 2 + 1] * x.shape[0]).sum()


def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


@step(torch.randn(4, 4), weight(4, 4))
def checkpointed(x: T, w: T) -> T:
    def region(x: T, w: T) -> T:
        return torch.mm(x, w).sin().cos()

    contexts = partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(region, x, w, use_reentrant=False, context_fn=contexts).sum()


@step(weight(3, 5))
def several(x: T) -> T:
    var, mean = torch.var_mean(x, 1)
    return (x.sort(dim=1).values.sum(1) * var - mean).sum()


@step(torch.randn(3), weight(3))
def branches(x: T, w: T) -> T:
    return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a * 2, (w,)).sum()


@step(weight(3))
def constants(x: T) -> T:
    scale = torch.tensor([1.0, -2.5, float("inf")])
    return torch.where(x > 0, x, -0.0).fmod(float("-inf")).mul(scale).sum()


@step(weight(4, 2))
def complex_numbers(x: T) -> T:
    return torch.view_as_real(torch.view_as_complex(x) * (1 - 2j)).sum()


@torch.compiler.nested_compile_region
def region(x: T, w: T) -> T:
    return torch.mm(x, w).sin()


@step(torch.randn(4, 4), weight(4, 4))
def regions(x: T, w: T) -> T:
    return region(region(x, w), w).sum()


@step(torch.ones(4), weight(4, 4))
def unbacked(x: T, w: T) -> T:
    rows = x.nonzero().squeeze(-1)
    return w[rows].sin().sum()


@step(torch.ones(5), weight(4, 4))
def unbacked_views(x: T, w: T) -> Any:
    n = x.sum().int().item()
    torch._check(n >= 2)
    torch._check(n <= 100)
    y = w[:, :1].expand(w.shape[0], n) * 2
    last = y.narrow(1, n - 1, 1)
    return y[:, :2].sin().sum() + y[:, 2:].sum() + y.t().cos().sum() + last.sum()


@step(weight(4))
def effects(x: T) -> T:
    torch.ops.aten._print("hello")
    return x.sin().sum()


@step(weight(4, 4), weight(4, 4))
def views_of_outputs(x: T, w: T) -> Any:
    y = torch.mm(x, w)
    return y, y.t(), x, w.detach()


def captured(name: str) -> remat.JointGraph:
    """A copy of the joint graph of a step, without decompositions."""
    return _captured(name).copy()


@functools.cache
def _captured(name: str) -> remat.JointGraph:
    from torch._dynamo import config

    f, args = STEPS[name]
    with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        return joint_of(f, *args, **({"dynamic": True} if name == "symbols" else {}))
