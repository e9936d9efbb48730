"""Small models, and plans for them made from the estimator's statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from remat.sac import (
    ModulePlan,
    SACEstimator,
    SACPlan,
    SACStats,
    context_fn,
    get_optimal_checkpointing_policy_per_module,
    planned,
)


class Block(nn.Module):
    """Module with views, dropout, and in-place writes."""

    def __init__(self, width: int = 8, p: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = F.relu(self.up(self.norm(x)), inplace=True)
        y = self.down(self.drop(y)).mul_(scale)
        return x + self.drop(y)


class Stack(nn.Module):
    """Model of blocks, one after the other."""

    def __init__(self, blocks: int = 2, width: int = 8, p: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, p) for _ in range(blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ran(
    make: Callable[[], nn.Module],
    *shapes: tuple[int, ...],
    mode: str = "operator-level-cost-model",
) -> SACEstimator:
    """Return an estimator after a model has run on fake tensors of these shapes."""
    with FakeTensorMode():
        model, inputs = make(), [torch.randn(s) for s in shapes]
        with SACEstimator()(mode) as found:
            model(*inputs)
    return found


def example() -> SACStats:
    """Return the statistics of xFormers' example, which PyTorch's tests use as well."""
    return SACStats(
        func_names=["copy_", "add", "div", "mm", "native_dropout", "linear", "t", "relu_"],
        runtimes=[5, 5, 8, 15, 15, 9, 1, 5],
        memory=[0, 100, 100, 120, 0, 100, 0, 0],
        view_like_ops=[6],
        rand_ops=[4],
        saved_autograd_ops=[],
        inplace_ops=[(0, 0), (7, 5)],
        force_store_random=False,
    )


def plan_of(*ops: str, stored: tuple[int, ...] = (), name: str = "layers.3") -> ModulePlan:
    """Return the plan of a module of which only the operators matter."""
    return ModulePlan(
        name=name, ops=ops, stored=stored, stored_bytes=0, discarded_bytes=0, recompute_ms=0.0
    )


def contexts_of(plan: ModulePlan, *others: Any, strict: bool = True, **options: Any) -> Any:
    """Return the contexts of a module's plan, with further policies."""
    return context_fn(planned(plan, strict=strict), *others, module=plan.name, **options)


def module_plan(name: str, stats: SACStats, stored: Iterable[int]) -> ModulePlan:
    kept = tuple(sorted(stored))
    return ModulePlan(
        name=name,
        ops=tuple(stats.func_names),
        stored=kept,
        stored_bytes=sum(stats.memory[i] for i in kept),
        discarded_bytes=sum(m for i, m in enumerate(stats.memory) if i not in kept),
        recompute_ms=sum(t for i, t in enumerate(stats.runtimes) if i not in kept),
    )


def sac_plan(*modules: ModulePlan, **fields: Any) -> SACPlan:
    numbers = {"budget_bytes": 4096, "peak_bytes": 4000, "plain_peak_bytes": 8192}
    times = {"recompute_ms": 0.5, "step_ms": 10.0, "bound_ms": 0.5}
    return SACPlan(**{"modules": modules, **numbers, **times, **fields})


def plan_for(
    make: Callable[[], nn.Module],
    names: Sequence[str],
    *shapes: tuple[int, ...],
    share: float = 0.6,
) -> SACPlan:
    """Return a plan that stores the optimal results of each named module, within a ratio of its memory."""
    # The estimator's names begin with the model's class, and a plan's names do not.
    found = ran(make, *shapes).sac_mod_stats
    stats = {name.partition(".")[2]: s for name, s in found.items()}
    modules = []
    for name in names:
        decided = get_optimal_checkpointing_policy_per_module(stats[name], share)
        modules.append(module_plan(name, stats[name], [i for i, d in enumerate(decided) if d]))
    return sac_plan(*modules)


def checkpointed(run: Callable[..., Any], *inputs: Any, contexts: Callable[[], Any]) -> Any:
    """Run a function under checkpointing with the given contexts."""
    return checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts)


def gradient(
    run: Callable[..., Any], x: torch.Tensor, contexts: Callable[[], Any] | None = None
) -> torch.Tensor:
    """Return the gradient of the sum of a function's result, checkpointed if there are contexts."""
    out = run(x) if contexts is None else checkpointed(run, x, contexts=contexts)
    (found,) = torch.autograd.grad(out.sum(), x)
    return found


def gradients(model: nn.Module, *inputs: torch.Tensor, seed: int = 1) -> list[torch.Tensor]:
    """Return the gradients of one step, and the model's buffers after the step."""
    model.zero_grad()
    torch.manual_seed(seed)
    model(*inputs).sin().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, *(b.clone() for b in model.buffers())]


def all_equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal, bit by bit."""
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
