"""Plans as policies: planned results are saved, and gradients are those of eager PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from remat.errors import PolicyError, ProblemError
from remat.sac import SACStats, compose, context_fn, is_skipped, planned
from remat.sac.estimation.stats import Item, group
from remat.sac.run.operators import tensors_in
from tests.sac.planned import (
    Block,
    all_equal,
    checkpointed,
    contexts_of,
    module_plan,
    plan_of,
    ran,
)

Run = Callable[..., torch.Tensor]


class Region(nn.Module):
    """Module that runs a function; `plans` makes its plan."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def stats_of(make: Callable[[], nn.Module]) -> SACStats:
    (stats,) = ran(make, (4, 8)).sac_mod_stats.values()
    return stats


def gradients(
    module: nn.Module, *inputs: torch.Tensor, contexts: Any = None, seed: int = 1
) -> list[torch.Tensor]:
    """Return the gradients of two forwards before one backward, as with accumulated gradients."""
    module.zero_grad()
    torch.manual_seed(seed)
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    loss = torch.zeros(())
    for x in inputs:
        out = module(x) if contexts is None else checkpointed(module, x, contexts=contexts)
        loss = loss + out.sin().sum()
    loss.backward()
    kept = [*inputs, *module.parameters()]
    return [t.grad.clone() for t in kept if t.grad is not None] + [
        b.clone() for b in module.buffers()
    ]


def draws(self: Region, x: torch.Tensor) -> torch.Tensor:
    x = F.dropout(self.lin(x), 0.4)
    return (F.dropout(x.sin(), 0.2) + torch.rand_like(x)).exp()


def writes(self: Region, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    z = y.sigmoid()
    y.add_(z.sum(0))
    y[:, 0] = 0.5
    y.relu_()
    return (y.view(-1).mul(2) * z.reshape(-1)).cos()


def copies(self: Region, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.mul_(self.lin(x).tanh())
    return y.exp() + F.dropout(y, 0.5).cos()


class Norms(nn.Module):
    """Module that writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.norm(self.lin(x)).relu(), 0.3).sin()


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "draws": lambda: Region(draws),
    "writes": lambda: Region(writes),
    "copies": lambda: Region(copies),
    "norms": Norms,
    "block": Block,
}


@pytest.fixture(scope="module")
def estimated() -> dict[str, SACStats]:
    return {name: stats_of(make) for name, make in MAKERS.items()}


def chosen(stats: SACStats, items: list[Item]) -> list[int]:
    stored = group(stats).stored
    return sorted(i for item in (*stored, *items) for i in item.ops)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_eager_and_what_is_kept_is_what_was_planned(
    name: str, seed: int, estimated: dict[str, SACStats]
) -> None:
    stats = estimated[name]
    drawn = random.Random(seed)
    # A plan with other operators than the module's would be refused.
    stored = chosen(stats, [i for i in group(stats).free if drawn.random() < 0.5])
    plan = module_plan("inner", stats, stored)
    torch.manual_seed(seed)
    module, inputs = MAKERS[name](), [torch.randn(4, 8), torch.randn(4, 8)]
    state = {k: v.clone() for k, v in module.state_dict().items()}
    wanted = gradients(module, *inputs)
    module.load_state_dict(state)
    assert all_equal(gradients(module, *inputs, contexts=contexts_of(plan)), wanted)

    alive: list[tuple[int, StorageWeakRef]] = []
    count = 0

    def watch(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal count
        if not is_skipped(op):
            made = tensors_in(ctx.op_output)
            alive.extend((count, StorageWeakRef(t.untyped_storage())) for t in made)
            count += 1
        return CheckpointPolicy.PREFER_RECOMPUTE

    out = checkpointed(module, inputs[0], contexts=contexts_of(plan, watch))
    assert count == len(stats)
    own = [inputs[0], out, *module.parameters(), *module.buffers()]
    mine = [t.untyped_storage()._cdata for t in own]
    kept = {ref.cdata for _, ref in alive if not ref.expired() and ref.cdata not in mine}
    assert kept == {ref.cdata for i, ref in alive if i in stored and ref.cdata not in mine}


@pytest.mark.parametrize(
    ("ops", "says"),
    [
        (("sin", "cos"), "operator 1 is aten.exp.default, and the plan has aten.cos.default"),
        (("sin",), "operator 1 is aten.exp.default, and the plan has the end"),
        (("sin", "exp", "cos"), "it ends after 2 operators, and the plan has 3"),
    ],
)
def test_other_operators_than_planned_are_refused(ops: tuple[str, ...], says: str) -> None:
    contexts = contexts_of(plan_of(*(f"aten.{o}.default" for o in ops)))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(PolicyError) as caught:
        checkpointed(lambda t: t.sin().exp(), x, contexts=contexts)
    assert str(caught.value).startswith("module 'layers.3': the module runs other operators")
    assert says in str(caught.value)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**16), name=st.sampled_from(sorted(MAKERS)))
def test_gradients_are_right_with_a_plan_for_other_operators(
    estimated: dict[str, SACStats], seed: int, name: str
) -> None:
    drawn = random.Random(seed)
    stats = estimated["draws"]
    lost = [name for i, name in enumerate(stats.func_names) if drawn.random() < 0.7]
    stored = tuple(i for i in range(len(lost)) if drawn.random() < 0.3)
    plan = replace(module_plan("inner", stats, []), ops=tuple(lost), stored=stored)
    torch.manual_seed(seed)
    module, x = MAKERS[name](), torch.randn(4, 8)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    wanted = gradients(module, x)
    module.load_state_dict(state)
    try:
        found = gradients(module, x, contexts=contexts_of(plan, strict=False))
    except PolicyError:
        return  # a plan matched by name may be refused, but gives no wrong gradients
    # A recomputed operator writes twice to a tensor of the caller, such as the statistics of a norm.
    weights = len([x, *module.parameters()])
    assert all_equal(found[:weights], wanted[:weights])


def test_a_plan_that_is_not_strict_goes_by_names() -> None:
    ops = ("aten.cos.default", "aten.exp.default", "aten.sin.default", "aten.exp.default")
    loose = planned(plan_of(*ops, stored=(1,)), strict=False)
    assert verdicts(loose) == [CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_SAVE]


def test_an_error_of_the_module_is_its_own() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError(x.sin().sum() > 10)

    contexts = contexts_of(
        plan_of("aten.sin.default", "aten.sum.default", "aten.gt.Scalar", "aten.exp")
    )
    with pytest.raises(KeyError):
        checkpointed(fails, torch.ones(3, requires_grad=True), contexts=contexts)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ProblemError, match="expected the plan of a module"):
        planned("layers.3")  # type: ignore[arg-type]


def save_exp(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    exp = op is torch.ops.aten.exp.default
    return CheckpointPolicy.MUST_SAVE if exp else CheckpointPolicy.PREFER_RECOMPUTE


def verdicts(made: Any) -> list[CheckpointPolicy]:
    said: list[CheckpointPolicy] = []

    def listens(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        said.append(made(ctx, op, *args, **kwargs))
        return said[-1]

    x = torch.ones(3, requires_grad=True)
    contexts = context_fn(listens, module="m")
    checkpointed(lambda t: t.sin().exp(), x, contexts=contexts)
    return said


def test_a_plan_with_another_policy() -> None:
    plan = plan_of("aten.sin.default", "aten.exp.default", stored=(0,))
    firm = planned(plan)
    assert verdicts(firm) == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE]
    says = (
        "module 'm': aten.exp.default: policy 'plan of layers.3' says MUST_RECOMPUTE.* 'save_exp'"
    )
    with pytest.raises(PolicyError, match=says):
        verdicts(compose(planned(plan), save_exp))
    wishes = compose(planned(plan, firm=False), save_exp)
    assert verdicts(wishes) == [CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_SAVE]
