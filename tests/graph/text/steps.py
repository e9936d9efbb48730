"""Small training steps, one for each thing that a text must be able to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

Step = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def mlp() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, w).relu(), w).sum()

    return f, (torch.randn(8, 4), weight(4, 4))


def dropout() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.mm(x, w), 0.25).sum()

    return f, (torch.randn(8, 4), weight(4, 4))


def views() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        first, second = y.split(2)
        return y.t(), second[:, 1:], first.expand(3, 2, 4), x.view(-1)

    return f, (weight(4, 4),)


def mutation() -> Any:
    def f(x: torch.Tensor, buf: torch.Tensor) -> torch.Tensor:
        h = torch.sin(buf)
        with torch.no_grad():
            buf.add_(1)
        return (x * h).sum()

    return f, (weight(4), torch.randn(4))


def symbols() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.mm(x, w)[: x.shape[0] // 2 + 1] * x.shape[0]).sum()

    return f, (torch.randn(8, 4), weight(4, 6))


def checkpointed() -> Any:
    def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w).sin().cos()

    contexts = partial(create_selective_checkpoint_contexts, save_products)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(region, x, w, use_reentrant=False, context_fn=contexts).sum()

    return f, (torch.randn(4, 4), weight(4, 4))


def several() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(x, 1)
        return (x.sort(dim=1).values.sum(1) * var - mean).sum()

    return f, (weight(3, 5),)


def branches() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a * 2, (w,)).sum()

    return f, (torch.randn(3), weight(3))


def constants() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, -2.5, float("inf")])
        return torch.where(x > 0, x, -0.0).fmod(float("-inf")).mul(scale).sum()

    return f, (weight(3),)


def complex_numbers() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * (1 - 2j)).sum()

    return f, (weight(4, 2),)


def regions() -> Any:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w).sin()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return region(region(x, w), w).sum()

    return f, (torch.randn(4, 4), weight(4, 4))


def unbacked() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = x.nonzero().squeeze(-1)
        return w[rows].sin().sum()

    return f, (torch.ones(4), weight(4, 4))


def unbacked_views() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        n = x.sum().int().item()
        torch._check(n >= 2)
        torch._check(n <= 100)
        y = w[:, :1].expand(w.shape[0], n) * 2
        last = y.narrow(1, n - 1, 1)
        return y[:, :2].sin().sum() + y[:, 2:].sum() + y.t().cos().sum() + last.sum()

    return f, (torch.ones(5), weight(4, 4))


def effects() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._print("hello")
        return x.sin().sum()

    return f, (weight(4),)


def views_of_outputs() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = torch.mm(x, w)
        return y, y.t(), x, w.detach()

    return f, (weight(4, 4), weight(4, 4))


STEPS: Mapping[str, Step] = {
    f.__name__: f
    for f in (
        mlp,
        dropout,
        views,
        mutation,
        symbols,
        checkpointed,
        several,
        branches,
        constants,
        complex_numbers,
        regions,
        unbacked,
        unbacked_views,
        effects,
        views_of_outputs,
    )
}


def captured(name: str) -> remat.JointGraph:
    """The joint graph of a step, without decompositions."""
    from torch._dynamo import config

    f, args = STEPS[name]()
    with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        return joint_of(f, *args, **({"dynamic": True} if name == "symbols" else {}))
