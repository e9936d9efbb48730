"""What PyTorch's selective checkpointing promises (torch/utils/checkpoint.py), held by the contexts that remat makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from remat.sac import context_fn, is_skipped, policy
from tests.sac.planned import checkpointed, gradient, plan_of

aten = torch.ops.aten


def sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().sin()


#: The plan of `sines` that stores what `exp` makes.
EXP = plan_of("aten.sin.default", "aten.exp.default", "aten.sin.default", stored=(1,))


def leaf() -> torch.Tensor:
    return torch.randn(3, requires_grad=True)


class Watch:
    """Saves some operators, and remembers what was made."""

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
    contexts = policy(EXP, watch)()
    out = checkpointed(sines, x, contexts=lambda: contexts)
    kept = watch.made[aten.exp.default]
    assert not kept.expired()
    late: list[bool] = []
    # By the time that the first of the region's gradients is there, all has been recomputed.
    cache = contexts[1].storage[aten.exp.default]
    x.register_hook(lambda _: late.append(hasattr(cache[0], "val")))
    out.sum().backward(retain_graph=True)
    assert late == [False]
    assert kept.expired(), "the graph is kept, and the value with it"
    with pytest.raises(RuntimeError, match="backward an extra time"):
        out.sum().backward()


class Leaky:
    """`sines`, and a hold on what `exp` made."""

    leaked: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        if not hasattr(self, "leaked"):
            self.leaked = y.detach()
        return y.sin()


def test_a_change_to_a_cached_value_is_refused_or_allowed_on_request() -> None:
    x, leaky = leaf(), Leaky()
    out = checkpointed(leaky, x, contexts=policy(EXP))
    leaky.leaked.mul_(2)
    with pytest.raises(RuntimeError, match="has been mutated"):
        out.sum().backward()

    x, leaky = leaf(), Leaky()
    out = checkpointed(leaky, x, contexts=policy(EXP, allow_cache_entry_mutation=True))
    leaky.leaked.mul_(2)
    out.sum().backward()
    y = x.detach().sin().exp()
    # The last sine takes the changed value, exp multiplies with it.
    torch.testing.assert_close(x.grad, (2 * y).cos() * (2 * y) * x.detach().cos())


def test_a_planned_write_is_no_change_and_another_one_is() -> None:
    leaked: list[torch.Tensor] = []

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().mul_(2)
        leaked.append(y.detach())
        return y.exp()

    x = leaf()
    plan = plan_of("aten.sin.default", "aten.mul_.Tensor", "aten.exp.default", stored=(0, 1, 2))
    assert torch.equal(gradient(in_place, x, policy(plan)), gradient(in_place, x))

    leaked.clear()
    out = checkpointed(in_place, x, contexts=policy(plan))
    leaked[0].zero_()
    with pytest.raises(RuntimeError, match="has been mutated"):
        out.sum().backward()


def test_a_saved_tensor_comes_back_as_the_same_object() -> None:
    seen: list[torch.Tensor] = []

    def masked(x: torch.Tensor) -> torch.Tensor:
        mask = x > 0  # has no gradient, and is no view
        seen.append(mask)
        return (x.sin() * mask).sin()

    contexts = context_fn([aten.gt.Scalar])()
    out = checkpointed(masked, leaf(), contexts=lambda: contexts)
    cached = contexts[1].storage[aten.gt.Scalar][0].val
    out.sum().backward()
    forward, again = seen
    assert again is cached
    assert again.data_ptr() == forward.data_ptr()


@pytest.mark.parametrize("subclass", [False, True])
def test_metadata_operators_are_not_asked_about(subclass: bool) -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        assert y.detach().size() == y.shape
        assert y.is_contiguous()
        assert y.stride(), y.storage_offset()
        assert y.device.type == "cpu"
        return y.numel() * y.dim() * y.exp()

    watch, x = Watch(aten.exp.default), torch.randn(2, 3, requires_grad=True)
    inputs = TwoTensor(x, x.clone()) if subclass else x
    checkpointed(asks, inputs, contexts=context_fn(watch)).sum().backward()
    assert not SAC_IGNORED_OPS.intersection(watch.asked)
    assert aten.exp.default in watch.asked


def test_a_policy_is_asked_once_for_each_operator_of_forward_and_never_after() -> None:
    watch = Watch(aten.exp.default)
    out = checkpointed(sines, leaf(), contexts=context_fn(watch))
    asked = [aten.sin.default, aten.exp.default, aten.sin.default]
    assert watch.asked == asked
    out.sum().backward()
    assert watch.asked == asked


def test_a_region_that_was_recomputed_is_refused_with_other_operators() -> None:
    runs: list[int] = []

    def fickle(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return sines(x if len(runs) == 1 else x.cos())

    out = checkpointed(fickle, leaf(), contexts=policy(EXP))
    with pytest.raises(RuntimeError, match=r"cos.*not found in storage"):
        out.sum().backward()


def test_copies_and_constants_are_left_to_recomputation() -> None:
    def copying(x: torch.Tensor) -> torch.Tensor:
        return x.clone().mul_(torch.tensor([1.0, 2.0, 3.0])).sin()

    watch, x = Watch(), leaf()
    plan = plan_of("aten.mul_.Tensor", "aten.sin.default")
    assert torch.equal(gradient(copying, x, policy(plan, watch)), gradient(copying, x))
    assert [op for op in watch.asked if is_skipped(op)] != []
