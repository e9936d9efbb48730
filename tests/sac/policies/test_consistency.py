"""Policies with inconsistent verdicts: adjusted, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat.errors import PolicyError
from remat.sac import compose, context_fn
from tests.sac import planned
from tests.sac.planned import checkpointed

MUST_SAVE, PREFER_SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
PREFER_RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE


class Table:
    """Policy that answers by the name of the operator and the number of its call: ``{"rand": [a, b]}``."""

    def __init__(self, **answers: list[CheckpointPolicy]) -> None:
        self.answers = answers

    def fresh(self) -> Table:
        return Table(**{k: list(v) for k, v in self.answers.items()})

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        left = self.answers.get(op.overloadpacket.__name__)
        return left.pop(0) if left else PREFER_RECOMPUTE


def two_draws(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.rand_like(x)).sin() * torch.rand_like(x)


def gradient(run: Any, contexts: Any = None) -> torch.Tensor:
    torch.manual_seed(3)
    return planned.gradient(run, torch.linspace(0.1, 2, 6, requires_grad=True), contexts)


def plain(policy: Any) -> Any:
    """Return PyTorch's contexts, without remat's."""
    return lambda: create_selective_checkpoint_contexts(policy.fresh())


def test_a_draw_after_a_saved_one_is_saved_too() -> None:
    split = Table(rand_like=[MUST_SAVE, PREFER_RECOMPUTE])
    wanted = gradient(two_draws)
    assert not torch.allclose(gradient(two_draws, plain(split)), wanted), (
        "PyTorch does it by itself"
    )
    assert torch.equal(gradient(two_draws, context_fn(split)), wanted)


def test_a_draw_after_a_saved_one_that_must_be_recomputed_is_refused() -> None:
    split = Table(rand_like=[PREFER_SAVE, MUST_RECOMPUTE])
    with pytest.raises(PolicyError) as caught:
        gradient(two_draws, context_fn(split, module="noisy"))
    message = str(caught.value)
    assert message.startswith(
        "module 'noisy': random operator aten.rand_like.default cannot be MUST_RECOMPUTE: "
        "aten.rand_like.default before it is saved"
    )


SPLIT = [PREFER_SAVE, PREFER_RECOMPUTE]


@pytest.mark.parametrize(
    "contexts",
    [
        context_fn(Table(rand_like=SPLIT), Table()),
        context_fn(Table(), compose(Table(), Table(rand_like=SPLIT))),
        planned.contexts_of(
            planned.plan_of(
                *(f"aten.{op}" for op in ("rand_like.default", "mul.Tensor", "sin.default")),
                stored=(0,),
            ),
            strict=False,
        ),
    ],
    ids=["composed", "composed twice", "plan"],
)
def test_draws_of_any_policy_and_of_regions_within_are_decided_alike(contexts: Any) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpointed(two_draws, x, contexts=contexts) + torch.rand_like(x).exp() * x.cos()

    def eager(x: torch.Tensor) -> torch.Tensor:
        return two_draws(x) + torch.rand_like(x).exp() * x.cos()

    assert torch.equal(gradient(two_draws, contexts), gradient(two_draws))
    outer = context_fn(Table(rand_like=SPLIT))
    for around in (None, outer, contexts):
        assert torch.equal(gradient(run, around), gradient(eager))


def test_a_firm_plan_that_splits_the_draws_is_refused() -> None:
    ops = "rand_like.default", "mul.Tensor", "sin.default", "rand_like.default", "mul.Tensor"
    plan = planned.plan_of(*(f"aten.{op}" for op in ops), stored=(0,))
    with pytest.raises(PolicyError, match=r"aten.rand_like.default cannot be MUST_RECOMPUTE"):
        gradient(two_draws, planned.contexts_of(plan))


def test_draws_before_a_saved_one_may_be_recomputed() -> None:
    split = Table(rand_like=[MUST_RECOMPUTE, MUST_SAVE])
    assert torch.equal(gradient(two_draws, context_fn(split)), gradient(two_draws))


def test_a_generator_of_its_own() -> None:
    generator = torch.Generator()

    def run(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand(6, generator=generator)).sin()

    def seeded(contexts: Any = None) -> torch.Tensor:
        generator.manual_seed(5)
        return gradient(run, contexts)

    nothing = Table()
    wanted = seeded()
    assert not torch.allclose(seeded(plain(nothing)), wanted), "PyTorch does it by itself"
    assert torch.equal(seeded(context_fn(nothing)), wanted)
    with pytest.raises(PolicyError, match="a generator of its own, whose state is not restored"):
        seeded(context_fn(Table(rand=[MUST_RECOMPUTE])))


def test_attention_without_dropout_is_not_random() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        q = (x * torch.rand(6)).view(1, 1, 3, 2)
        return F.scaled_dot_product_attention(q, q, q)

    refused = Table(rand=[MUST_SAVE], _scaled_dot_product_flash_attention_for_cpu=[MUST_RECOMPUTE])
    assert torch.equal(gradient(run, context_fn(refused)), gradient(run))


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that a missing write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("table", [Table(), Table(mul=[MUST_SAVE], rrelu_with_noise=[PREFER_SAVE])])
def test_noise_that_is_written_after_it_is_saved_is_written_again(table: Table) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return F.rrelu((x - 1) * 2, training=True)

    wanted = gradient(run)
    assert not torch.allclose(gradient(run, plain(Table())), wanted), "PyTorch does it by itself"
    assert torch.equal(gradient(run, context_fn(table)), wanted)


@pytest.mark.usefixtures("filled_memory")
def test_noise_of_a_region_within_a_region_is_written_again() -> None:
    inner, outer = context_fn(Table()), context_fn(Table(sin=[MUST_SAVE]))

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(x - 1, training=True)

    def run(x: torch.Tensor, *contexts: Any) -> torch.Tensor:
        y = x.sin()
        return (checkpointed(noisy, y, contexts=inner) if contexts else noisy(y)).exp()

    def checkpointed_run(x: torch.Tensor) -> torch.Tensor:
        return run(x, inner)

    assert torch.equal(gradient(checkpointed_run, outer), gradient(run))


def test_noise_is_written_again_under_a_fake_mode() -> None:
    with FakeTensorMode():
        x = torch.ones(6, requires_grad=True)
        found = planned.gradient(lambda x: F.rrelu(x, training=True), x, context_fn(Table()))
    assert found.shape == (6,)


@pytest.mark.parametrize(("noise", "count"), [(False, 1), (True, 2)])
def test_only_noise_makes_the_last_operators_run_again(noise: bool, count: int) -> None:
    runs: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        y = (F.rrelu(x, training=True) if noise else x).sin()
        runs.append(1)
        return y + 1

    gradient(run, context_fn(Table()))
    assert len(runs) == count


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.sin().mul_(2).exp()


def test_a_write_to_what_is_recomputed_is_recomputed_too() -> None:
    wish = Table(mul_=[PREFER_SAVE])
    assert torch.equal(gradient(in_place, context_fn(wish)), gradient(in_place))


def test_a_draw_into_what_is_recomputed_after_a_saved_draw_is_refused() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand_like(x)).sin() * torch.empty_like(x).bernoulli_(0.5)

    for verdict in (PREFER_SAVE, PREFER_RECOMPUTE):
        split = Table(rand_like=[MUST_SAVE], bernoulli_=[verdict])
        with pytest.raises(PolicyError, match=r"writes to the result of aten.empty_like.default"):
            gradient(run, context_fn(split))


def test_a_write_to_a_saved_tensor_is_saved_too() -> None:
    saved = Table(sin=[MUST_SAVE])
    with pytest.raises(RuntimeError, match="has been mutated"):
        gradient(in_place, plain(saved))
    assert torch.equal(gradient(in_place, context_fn(saved)), gradient(in_place))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (Table(sin=[MUST_SAVE], mul_=[MUST_RECOMPUTE]), "writes to the result of aten.sin.default"),
        (Table(mul_=[MUST_SAVE]), "aten.mul_.Tensor cannot be saved: it writes to the result of"),
    ],
)
def test_writes_decided_unlike_what_they_write_to_are_refused(table: Table, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        gradient(in_place, context_fn(table))


def read_before(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    z = (y.view(2, 3) * 3).view(6).exp()
    return y.mul_(2).exp() * z


def test_what_was_read_before_a_saved_write_must_be_saved_too() -> None:
    split = Table(sin=[MUST_SAVE], mul_=[MUST_SAVE])
    allowed = context_fn(split, allow_cache_entry_mutation=True)
    assert not torch.allclose(gradient(read_before, allowed), gradient(read_before))
    says = r"aten.mul_.Tensor cannot be saved: aten.mul.Tensor is recomputed, and would find"
    with pytest.raises(PolicyError, match=says):
        gradient(read_before, context_fn(split))
    together = context_fn(Table(sin=[MUST_SAVE], mul_=[MUST_SAVE], mul=[PREFER_SAVE]))
    assert torch.equal(gradient(read_before, together), gradient(read_before))


def test_a_saved_counter_of_the_caller_goes_on_counting() -> None:
    count = torch.zeros(6)

    def run(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x.sin().exp()

    x = torch.ones(6, requires_grad=True)
    contexts = context_fn(Table(add_=[MUST_SAVE]))
    outs = [checkpointed(run, x, contexts=contexts) for _ in range(3)]
    torch.autograd.grad(sum(o.sum() for o in outs), x)
    assert count.tolist() == [3.0] * 6


def test_memory_that_is_used_again_is_another_tensor() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(20):  # each tensor may reuse the memory of the one before
                x.cos().add_(1)
        return in_place(x)

    contexts = context_fn(Table(sin=[PREFER_SAVE]))
    assert torch.equal(gradient(run, contexts), gradient(run))


def test_a_saved_write_to_a_constant_is_refused() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(
            [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        )  # recomputation makes the constant anew
        scale.add_(1)
        return (x * scale).sin()

    with pytest.raises(PolicyError, match=r"writes to the result of aten.lift_fresh.default"):
        gradient(run, context_fn(Table(add_=[MUST_SAVE])))
    assert torch.equal(gradient(run, context_fn(Table())), gradient(run))


class Decaying(torch.nn.Module):
    """Module that scales by a buffer, which each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.5)
        return (x * self.scale.clone()).sin()


def test_a_buffer_is_written_to_once() -> None:
    eager, ours, x = Decaying(), Decaying(), torch.linspace(0.1, 2, 6, requires_grad=True)
    wanted = planned.gradient(eager, x)
    assert torch.equal(planned.gradient(ours, x, context_fn(Table())), wanted)
    assert torch.equal(ours.scale, eager.scale)


def calls(module: torch.nn.Module, again: bool) -> list[torch.Tensor]:
    """Return the gradient of each of two calls before backward."""
    x = torch.linspace(0.1, 2, 6, requires_grad=True)
    nothing = context_fn(Table())
    outs = [checkpointed(module, x, contexts=nothing) if again else module(x) for _ in range(2)]
    return [torch.autograd.grad(out.sum(), x)[0] for out in outs]


def test_what_another_call_wrote_to_is_not_read_again() -> None:
    says = r"aten.clone.default would be recomputed from other numbers .* tensor of shape \(6,\)"
    with pytest.raises(PolicyError, match=says):
        calls(Decaying(), True)


def test_a_write_to_what_a_region_closes_over_is_noticed() -> None:
    x, scale = torch.linspace(0.1, 2, 6, requires_grad=True), torch.ones(6)
    out = checkpointed(lambda x: (x * scale[None]).exp(), x, contexts=context_fn(Table()))
    scale.mul_(2)
    with pytest.raises(PolicyError, match=r"aten\.mul\.Tensor would be recomputed from other"):
        out.sum().backward()


def test_statistics_that_nobody_reads_may_change() -> None:
    def norm() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Unflatten(0, (3, 2)), torch.nn.BatchNorm1d(2))

    eager, ours = (calls(norm(), again) for again in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(eager, ours, strict=True))


def test_tensors_that_count_no_writes_are_read_again() -> None:
    with torch.inference_mode():
        table = torch.ones(6)
    x = torch.linspace(0.1, 2, 6, requires_grad=True)
    found = planned.gradient(lambda x: (x + table).exp(), x, context_fn(Table()))
    assert torch.equal(found, (x + 1).exp())
