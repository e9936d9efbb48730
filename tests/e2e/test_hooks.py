"""Steps whose saved tensors pass through hooks: gradients, memory, and hooks that are active already."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks

import remat
from remat.errors import PlanError, ProblemError
from remat.passes.packing.eager import packed_count
from remat.passes.packing.pairs import HooksWarning
from remat.running.measure import measure_step
from tests.models import Outcome, build

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

CLONE = (lambda x: (x.clone(), x.shape, "text"), lambda p: p[0])
BITS = (
    lambda x: x.view(torch.int32) + 1 if x.dtype is torch.float32 else x,
    lambda p: (p - 1).view(torch.float32),
)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One step of a model of the zoo: what it left behind, its plan, and its peak."""

    outcome: Outcome
    plan: remat.Plan
    peak_bytes: int


@functools.cache
def ran(name: str, budget: float, hooks: Any = None) -> Ran:
    """A step compiled anew, the graphs run as they are.

    Priced for another device, so that plans count storages alone, as the measurement does.
    """
    torch._dynamo.reset()
    step = build(name)
    options = {"lower": "eager", "budget": budget, "hooks": hooks, "cost": "roofline:h100"}
    compiled: Any = torch.compile(step.model, backend="remat", options=options)
    outcome = step.train(compiled)
    peak = measure_step(compiled, step.args, step.kwargs).peak_bytes
    return Ran(outcome=outcome, plan=remat.plans()[-1], peak_bytes=peak)


# Gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["donated", "no_static", "all"])
@pytest.mark.parametrize("name", ["randn_like", "mutated_buffer", "checkpointed"])
def test_hooks_that_lose_nothing_change_nothing(name: str, keep: str) -> None:
    """Views of the same bits at every filter; what they pack takes no memory of its own."""
    hooks = remat.SavedTensorHooks(
        pack=lambda x: x.view(torch.int32) if x.dtype is torch.float32 else x,
        unpack=lambda p: p.view(torch.float32),
        filter=keep,
    )
    assert ran(name, 0.4, hooks).outcome.differs_from(ran(name, 0.4).outcome) == []


@pytest.mark.parametrize(
    ("name", "budget", "hooks"),
    [("llama", 1, BITS), ("checkpointed", 0.4, CLONE)],
    ids=["bits", "clone"],
)
def test_copies_that_lose_nothing_change_nothing(name: str, budget: float, hooks: Any) -> None:
    assert ran(name, budget, hooks).outcome.differs_from(ran(name, budget).outcome) == []


@pytest.mark.parametrize(("hooks", "error"), [("bf16", 0.01), ("int8", 0.02), ("float8", 0.08)])
def test_ready_made_pairs_stay_close(hooks: str, error: float) -> None:
    """Forward is not touched; gradients move by about as much as the pair loses."""
    outcome, reference = ran("llama", 1, hooks).outcome, ran("llama", 1).outcome
    for key, value in reference.outputs.items():
        assert torch.equal(outcome.outputs[key], value), key
    assert torch.equal(outcome.random_state, reference.random_state)
    assert 0 < outcome.gradient_distance(reference) < error


def test_symbolic_shapes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.layer(x)).exp().view(-1).square().mean()

    hooks = (
        lambda x: (x.reshape(-1).double(), x.shape[0], x.shape[1]),
        lambda p: p[0].float().view(p[1], p[2]),
    )
    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(
        model,
        backend="remat",
        dynamic=True,
        options={"budget": remat.Saved(10_000), "lower": "eager", "hooks": hooks},
    )
    for rows in (6, 9, 17):
        x = torch.randn(rows, 8)
        model.zero_grad(set_to_none=True)
        model(x).backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        compiled(x).backward()
        for p, g in zip(model.parameters(), expected, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("hooks", ["int8", "float8"])
def test_a_kink_stays_where_forward_has_it(hooks: str) -> None:
    """Small numbers beside a large one are packed as 0, and the gradient of a relu at 0 is 0."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    w = torch.eye(16, requires_grad=True)
    x = torch.rand(64, 16) * 1e-4
    x[:, 0] = 1000.0

    def step(w: torch.Tensor) -> torch.Tensor:
        return torch.sin((x @ w).relu())[:, 1:].sum()

    (expected,) = torch.autograd.grad(step(w), w)
    options = {"budget": 1, "lower": "eager", "hooks": hooks}
    compiled: Any = torch.compile(step, backend="remat", options=options)
    (found,) = torch.autograd.grad(compiled(w), w)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=1e-3)


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hooks", "share"), [("bf16", 0.52), ("int8", 0.35), ("float8", 0.3)])
def test_the_peak_falls_by_what_is_simulated(hooks: str, share: float) -> None:
    plain, packed = ran("llama", 1), ran("llama", 1, hooks)
    assert packed.plan.saved_bytes < share * plain.plan.saved_bytes
    assert packed.peak_bytes < plain.peak_bytes
    assert plain.plan.peak_bytes - packed.plan.peak_bytes == pytest.approx(
        plain.peak_bytes - packed.peak_bytes, rel=0.02
    )


# Hooks that run eagerly ---------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)) * torch.sigmoid(x))
        return x


Run = Callable[..., torch.Tensor]


@pytest.fixture
def gradients() -> Run:
    """Gradients of a step from the same seed, compiled with hooks or not, or with others active."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(32, 16)

    def run(hooks: Any = None, active: Any = None, lower: str = "eager") -> torch.Tensor:
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        options = {"budget": 1, "lower": lower, "hooks": hooks}
        if lower == "inductor":
            options["fallback_random"] = True
        compiled: Any = torch.compile(model, backend="remat", options=options)
        with saved_tensors_hooks(*active) if active else contextlib.nullcontext():
            loss = compiled(x).square().sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    return run


def to_numpy(x: torch.Tensor) -> Any:
    return x.numpy()  # no trace follows it, and no copy is made of it here


def from_numpy(packed: Any) -> torch.Tensor:
    return torch.from_numpy(packed)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_what_cannot_be_traced_runs_eagerly(gradients: Run, lower: str) -> None:
    """Also where what is kept is the memory of the tensor itself, out of sight."""
    expected = gradients(lower=lower)
    with pytest.warns(HooksWarning, match="run eagerly, outside of it"):
        found = gradients((to_numpy, from_numpy), lower=lower)
    torch.testing.assert_close(found, expected, rtol=1e-5 if lower == "inductor" else 0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::remat.passes.packing.pairs.HooksWarning")
def test_what_eager_hooks_keep_goes_with_the_step() -> None:
    """After backward, and where backward never comes."""
    torch._dynamo.reset()
    w = torch.randn(8, 8, requires_grad=True)
    options = {"budget": 1, "lower": "eager", "hooks": (to_numpy, from_numpy)}
    compiled: Any = torch.compile(
        lambda: (w @ w).sin().exp().sum(), backend="remat", options=options
    )
    gc.collect()
    before = packed_count()
    loss = compiled()
    assert packed_count() > before
    loss.backward()
    del loss
    assert packed_count() == before
    loss = compiled()
    assert packed_count() > before
    del loss
    gc.collect()
    assert packed_count() == before


@pytest.mark.filterwarnings("ignore::remat.passes.packing.pairs.HooksWarning")
def test_eager_hooks_that_break_their_word_are_named(gradients: Run) -> None:
    with pytest.raises(PlanError, match=r"unpack returned float64\[32, 16\] on cpu for a saved"):
        gradients((to_numpy, lambda p: torch.from_numpy(p).double()))


def test_hooks_may_keep_tensors_out_of_sight(gradients: Run) -> None:
    """A list beside the step holds what was packed; what was traced lies in it too, and is not used."""
    store: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> int:
        store.append(x)
        return len(store) - 1

    expected = gradients()
    with pytest.warns(HooksWarning, match="pack kept a tensor that was only traced"):
        found = gradients((pack, store.__getitem__))
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore::remat.passes.packing.pairs.HooksWarning")
@pytest.mark.parametrize("combine", [torch.add, lambda x, first: first], ids=["raises", "returns"])
def test_hooks_that_use_what_they_kept_when_they_were_traced_are_named(
    gradients: Run, combine: Callable[..., torch.Tensor]
) -> None:
    kept: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.zeros(x.shape))
        return combine(x, kept[0])

    says = r"hooks 'custom': pack (raised|returned) .*FakeTensor.*let pack return what unpack needs"
    with pytest.raises(PlanError, match=says):
        gradients((pack, lambda p: p))


@pytest.mark.filterwarnings("ignore::remat.passes.packing.pairs.HooksWarning")
@pytest.mark.parametrize("which", ["pack", "unpack"])
def test_what_eager_hooks_raise_is_told_with_their_name(gradients: Run, which: str) -> None:
    def fail(x: Any) -> Any:
        raise KeyError("scale")

    hooks = {"pack": to_numpy, "unpack": from_numpy, which: fail}
    with pytest.raises(
        PlanError, match=f"hooks 'custom': {which} raised KeyError: 'scale'"
    ) as raised:
        gradients((hooks["pack"], hooks["unpack"]))
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.filterwarnings("ignore::remat.passes.packing.pairs.HooksWarning")
def test_what_eager_hooks_keep_can_be_unpacked_again() -> None:
    torch._dynamo.reset()
    w = torch.randn(8, 8, requires_grad=True)
    options = {"budget": 1, "lower": "eager", "hooks": (to_numpy, from_numpy)}
    with functorch_config.patch(donated_buffer=False):
        compiled: Any = torch.compile(lambda: (w @ w).sin().sum(), backend="remat", options=options)
        loss = compiled()
        (once,) = torch.autograd.grad(loss, w, retain_graph=True)
        (again,) = torch.autograd.grad(loss, w)
    assert torch.equal(once, again)


# Inductor -----------------------------------------------------------------------------------------


def test_inductor_compiles_what_is_packed(gradients: Run) -> None:
    expected = gradients(lower="inductor")
    away = gradients("float8", lower="inductor") - expected
    assert 0 < away.norm() < 0.1 * expected.norm()


# Hooks that are active already --------------------------------------------------------------------


def to_half(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64)


def to_single(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32)


def test_hooks_around_the_step_work_as_without_us(gradients: Run) -> None:
    """PyTorch calls functions at run time, and inlines graph modules after we have split the graph."""
    expected = gradients()
    seen: list[torch.dtype] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    assert torch.equal(gradients(active=(watched, lambda x: x)), expected)
    assert torch.float32 in seen
    modules = (fx.symbolic_trace(to_half), fx.symbolic_trace(to_single))
    assert torch.equal(gradients(active=modules), expected)


def test_hooks_around_the_step_get_what_ours_packed(gradients: Run) -> None:
    expected = gradients("bf16")
    seen: list[torch.dtype] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    assert torch.equal(gradients("bf16", active=(watched, lambda x: x)), expected)
    assert torch.bfloat16 in seen


# Doors --------------------------------------------------------------------------------------------


def test_options_that_cannot_be_meant_are_refused_at_once() -> None:
    with pytest.raises(ProblemError, match="hooks is 'int4'"):
        remat.partitioner(hooks="int4")
    with pytest.raises(ProblemError, match="do not go together with a pipeline"):
        remat.partitioner(hooks="bf16", pipeline=str(remat.default_pipeline(1)))


def test_partitioners_are_told_apart_by_their_hooks() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    hooks = ("bf16", "float8", (double, double), (to_half, to_single))
    partitioners = [remat.partitioner(hooks=h) for h in hooks]
    assert len({p.uuid() for p in partitioners}) == len(hooks)
    assert [p.cacheable for p in partitioners] == [True, True, False, False]
    assert remat.partitioner(hooks="bf16").uuid() == partitioners[0].uuid()
