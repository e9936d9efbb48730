"""A small model, and its steps with and without us, for tests of the doors into torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import remat

Model = Callable[..., Any]
#: The plans made since a test started.
NewPlans = Callable[[], tuple[remat.Plan, ...]]


class Mlp(nn.Module):
    """Products, dropout and a pointwise tail, wide enough that budgets below 1 decide something."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)) * torch.sigmoid(x))
        return x


def compiled(model: Model, budget: float | int | str = 0.0, **options: Any) -> Model:
    asked = {} if "plan" in options else {"budget": budget}  # beside a plan, it is for other graphs
    options = {**asked, "lower": "eager", **options}
    return torch.compile(model, backend="remat", options=options)  # type: ignore[no-any-return]


def aot(partition: Any) -> Any:
    """A backend that runs the halves as a partition function has split them."""
    return aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module.forward), partition_fn=partition
    )


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def run(model: nn.Module, step: Callable[[], Any], seed: int = 3) -> list[Any]:
    """Runs a step from a seed; returns gradients, generator state, and what the step returned."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    returned = step()
    return [*gradients(model), torch.get_rng_state(), *torch.utils._pytree.tree_leaves(returned)]


def assert_same(mine: list[Any], theirs: list[Any]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
        else:
            assert a == b


def stepped(model: nn.Module, f: Model, x: torch.Tensor) -> list[Any]:
    return run(model, lambda: f(x).square().mean().backward())
