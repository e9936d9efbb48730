"""What PyTorch's selective checkpointing promises (torch/utils/checkpoint.py), held by the contexts that remat makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint

from remat.errors import PolicyError
from remat.sac import ModulePlan, context_fn, is_skipped, policy

aten = torch.ops.aten


def a_plan(*ops: str, stored: tuple[int, ...]) -> ModulePlan:
    return ModulePlan(
        name="layer", ops=ops, stored=stored, stored_bytes=0, discarded_bytes=0, recompute_ms=0.0
    )


def sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().sin()


#: The plan of `sines` that stores what `exp` makes.
EXP = a_plan("aten.sin.default", "aten.exp.default", "aten.sin.default", stored=(1,))


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
    watch, x = Watch(), torch.randn(3, requires_grad=True)
    contexts = policy(EXP, watch)()
    out = checkpoint(sines, x, use_reentrant=False, context_fn=lambda: contexts)
    kept = watch.made[aten.exp.default]
    assert not kept.expired()
    late: list[bool] = []
    # By the time that the first of the region's gradients is there, all has been recomputed.
    cache = contexts[1].storage[aten.exp.default]
    x.register_hook(lambda _: late.append(hasattr(cache[0], "val")))
    out.sum().backward(retain_graph=True)
    assert late == [False]
    assert kept.expired(), "the graph is kept, and the value with it"


def test_a_second_backward_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    out = checkpoint(sines, x, use_reentrant=False, context_fn=policy(EXP)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        out.backward()


class Leaky:
    """`sines`, and a hold on what `exp` made."""

    leaked: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        if not hasattr(self, "leaked"):
            self.leaked = y.detach()
        return y.sin()


def test_a_change_to_a_cached_value_is_refused() -> None:
    x, leaky = torch.randn(3, requires_grad=True), Leaky()
    out = checkpoint(leaky, x, use_reentrant=False, context_fn=policy(EXP))
    leaky.leaked.mul_(2)
    with pytest.raises(RuntimeError, match="has been mutated"):
        out.sum().backward()


def test_a_change_to_a_cached_value_is_allowed_on_request() -> None:
    x, leaky = torch.randn(3, requires_grad=True), Leaky()
    contexts = policy(EXP, allow_cache_entry_mutation=True)
    out = checkpoint(leaky, x, use_reentrant=False, context_fn=contexts)
    leaky.leaked.mul_(2)
    out.sum().backward()
    y = x.detach().sin().exp()
    # The last sine takes the changed value, exp multiplies with it.
    wanted = (2 * y).cos() * (2 * y) * x.detach().cos()
    torch.testing.assert_close(x.grad, wanted)


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.sin().mul_(2).exp()


IN_PLACE = ("aten.sin.default", "aten.mul_.Tensor", "aten.exp.default")


def test_a_planned_write_is_no_change_and_another_one_is() -> None:
    x = torch.randn(3, requires_grad=True)
    (wanted,) = torch.autograd.grad(in_place(x).sum(), x)
    plan = a_plan(*IN_PLACE, stored=(0, 1, 2))
    out = checkpoint(in_place, x, use_reentrant=False, context_fn=policy(plan))
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, wanted)

    leaked: list[torch.Tensor] = []

    def leaks(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().mul_(2)
        leaked.append(y.detach())
        return y.exp()

    out = checkpoint(leaks, x, use_reentrant=False, context_fn=policy(plan))
    leaked[0].zero_()
    with pytest.raises(RuntimeError, match="has been mutated"):
        out.sum().backward()


def test_a_saved_tensor_comes_back_as_the_same_object() -> None:
    seen: list[torch.Tensor] = []

    def masked(x: torch.Tensor) -> torch.Tensor:
        mask = x > 0  # has no gradient, and is no view
        seen.append(mask)
        return (x.sin() * mask).sin()

    x = torch.randn(8, requires_grad=True)
    contexts = context_fn([aten.gt.Scalar])()
    out = checkpoint(masked, x, use_reentrant=False, context_fn=lambda: contexts)
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
    checkpoint(asks, inputs, use_reentrant=False, context_fn=context_fn(watch)).sum().backward()
    assert not SAC_IGNORED_OPS.intersection(watch.asked)
    assert aten.exp.default in watch.asked


def test_a_policy_is_asked_once_for_each_operator_of_forward_and_never_after() -> None:
    watch, x = Watch(aten.exp.default), torch.randn(3, requires_grad=True)
    out = checkpoint(sines, x, use_reentrant=False, context_fn=context_fn(watch))
    asked = [aten.sin.default, aten.exp.default, aten.sin.default]
    assert watch.asked == asked
    out.sum().backward()
    assert watch.asked == asked


def test_a_policy_that_renews_itself_counts_each_region_by_itself() -> None:
    class First:
        """Saves the first operator."""

        def __init__(self) -> None:
            self.count = 0

        def fresh(self) -> First:
            return First()

        def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            self.count += 1
            first = self.count == 1
            return CheckpointPolicy.MUST_SAVE if first else CheckpointPolicy.PREFER_RECOMPUTE

    contexts, x = context_fn(First()), torch.randn(3, requires_grad=True)
    for _ in range(2):
        pair = contexts()
        checkpoint(sines, x, use_reentrant=False, context_fn=lambda p=pair: p)
        entries = pair[1].storage[aten.sin.default]
        assert [hasattr(entries[i], "val") for i in range(2)] == [True, False]


def test_several_forwards_before_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    contexts = policy(EXP)
    outs = [checkpoint(sines, x * k, use_reentrant=False, context_fn=contexts) for k in (1, 2, 3)]
    (found,) = torch.autograd.grad(sum(o.sum() for o in outs), x)
    (wanted,) = torch.autograd.grad(sum(sines(x * k).sum() for k in (1, 2, 3)), x)
    assert torch.equal(found, wanted)


def test_a_region_that_was_recomputed_is_refused_with_other_operators() -> None:
    runs: list[int] = []

    def fickle(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return sines(x if len(runs) == 1 else x.cos())

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(fickle, x, use_reentrant=False, context_fn=policy(EXP))
    with pytest.raises(RuntimeError, match=r"cos.*not found in storage"):
        out.sum().backward()


def test_copies_and_constants_are_left_to_recomputation() -> None:
    def copying(x: torch.Tensor) -> torch.Tensor:
        return x.clone().mul_(torch.tensor([1.0, 2.0, 3.0])).sin()

    watch, x = Watch(), torch.randn(3, requires_grad=True)
    plan = a_plan("aten.mul_.Tensor", "aten.sin.default", stored=())
    out = checkpoint(copying, x, use_reentrant=False, context_fn=policy(plan, watch))
    assert [op for op in watch.asked if is_skipped(op)] != []
    (found,) = torch.autograd.grad(out.sum(), x)
    (wanted,) = torch.autograd.grad(copying(x).sum(), x)
    assert torch.equal(found, wanted)


def test_half_of_an_in_place_group_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    for stored, says in [((0,), "cannot be MUST_RECOMPUTE"), ((1,), "cannot be saved")]:
        plan = a_plan(*IN_PLACE, stored=stored)
        with pytest.raises(PolicyError, match=f"module 'layer': aten.mul_.Tensor {says}"):
            checkpoint(in_place, x, use_reentrant=False, context_fn=policy(plan))
