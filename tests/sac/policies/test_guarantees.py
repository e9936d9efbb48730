"""Guarantees of PyTorch's selective checkpointing (torch/utils/checkpoint.py), which remat's contexts keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from remat.sac import context_fn, is_skipped
from tests.sac.planned import checkpointed, contexts_of, gradient, plan_of

aten = torch.ops.aten


def sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().sin()


#: The plan of `sines` that stores the result of `exp`.
EXP = plan_of("aten.sin.default", "aten.exp.default", "aten.sin.default", stored=(1,))


def leaf() -> torch.Tensor:
    return torch.randn(3, requires_grad=True)


class Watch:
    """Policy that saves some operators, and records the storages of results."""

    def __init__(self, *saved: Any) -> None:
        self.saved = saved
        self.asked: list[Any] = []
        self.made: dict[Any, StorageWeakRef] = {}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        assert not ctx.is_recompute
        self.asked.append(op)
        if isinstance(ctx.op_output, torch.Tensor):
            self.made[op] = StorageWeakRef(ctx.op_output.untyped_storage())
        save = op in self.saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_cached_value_is_freed_at_its_first_use() -> None:
    watch, x = Watch(), leaf()
    contexts = contexts_of(EXP, watch)()
    out = checkpointed(sines, x, contexts=lambda: contexts)
    kept = watch.made[aten.exp.default]
    assert not kept.expired()
    late: list[bool] = []
    # When the region's first gradient is computed, the whole region has been recomputed.
    cache = contexts[1].storage[aten.exp.default]
    # PyTorch before 2.13 removes the entry of a used value.
    x.register_hook(lambda _: late.append(any(hasattr(e, "val") for e in tree_leaves(cache))))
    out.sum().backward(retain_graph=True)
    assert late == [False]
    assert kept.expired(), "the graph is kept, and the value with it"
    with pytest.raises(RuntimeError, match="backward an extra time"):
        out.sum().backward()


def test_a_planned_write_is_no_change_and_another_one_is_unless_allowed() -> None:
    leaked: list[torch.Tensor] = []

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().mul_(2)
        leaked.append(y.detach())
        return y.exp()

    x = leaf()
    plan = plan_of("aten.sin.default", "aten.mul_.Tensor", "aten.exp.default", stored=(0, 1, 2))
    wanted = gradient(in_place, x)
    assert torch.equal(gradient(in_place, x, contexts_of(plan)), wanted)

    leaked.clear()
    out = checkpointed(in_place, x, contexts=contexts_of(plan))
    leaked[0].zero_()
    with pytest.raises(RuntimeError, match="has been mutated"):
        out.sum().backward()

    leaked.clear()
    out = checkpointed(in_place, x, contexts=contexts_of(plan, allow_cache_entry_mutation=True))
    leaked[0].zero_()
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, wanted), "only the stored exponential is read"


@pytest.mark.parametrize("subclass", [False, True])
def test_a_policy_is_asked_once_for_each_operator_of_forward_and_never_after(
    subclass: bool,
) -> None:
    watch, x = Watch(aten.exp.default), leaf()
    inputs = TwoTensor(x, x.clone()) if subclass else x
    out = checkpointed(sines, inputs, contexts=context_fn(watch))
    asked = [aten.sin.default, aten.exp.default, aten.sin.default]
    assert watch.asked == asked
    out.sum().backward()
    assert watch.asked == asked


def test_copies_and_constants_are_left_to_recomputation() -> None:
    def copying(x: torch.Tensor) -> torch.Tensor:
        return x.clone().mul_(torch.tensor([1.0, 2.0, 3.0])).sin()

    watch, x = Watch(), leaf()
    plan = plan_of("aten.mul_.Tensor", "aten.sin.default")
    assert torch.equal(gradient(copying, x, contexts_of(plan, watch)), gradient(copying, x))
    assert [op for op in watch.asked if is_skipped(op)] != []
