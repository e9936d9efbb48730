"""Steps whose saved tensors pass through hooks: gradients, memory, and hooks that are active already."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks

import remat
from remat.errors import PlanError
from remat.passes.packing.eager import PACKED
from remat.passes.packing.pairs import HooksWarning
from remat.running.measure import measure_step
from tests.e2e.doors import Mlp
from tests.models import Outcome, build

pytestmark = pytest.mark.filterwarnings("ignore::remat.passes.packing.pairs.HooksWarning")

CLONE = (lambda x: (x.clone(), x.shape, "text"), lambda p: p[0])
BITS = (
    lambda x: x.view(torch.int32) + 1 if x.dtype is torch.float32 else x,
    lambda p: (p - 1).view(torch.float32),
)


class Ran(NamedTuple):
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
    if name == "llama":
        inner: Any = step.model.get_submodule("model")
        inner.layers = inner.layers[:1]
        step = dataclasses.replace(step)
    options = {"lower": "eager", "budget": budget, "hooks": hooks, "cost": "roofline:h100"}
    compiled: Any = torch.compile(step.model, backend="remat", options=options)
    outcome = step.train(compiled)
    peak = measure_step(compiled, step.args, step.kwargs).peak_bytes
    return Ran(outcome=outcome, plan=remat.plans()[-1], peak_bytes=peak)


# Gradients ----------------------------------------------------------------------------------------


# Views of the same bits, which take no memory of their own.
VIEWS = remat.SavedTensorHooks(
    pack=lambda x: x.view(torch.int32) if x.dtype is torch.float32 else x,
    unpack=lambda p: p.view(torch.float32),
    filter="all",
)


@pytest.mark.parametrize(
    ("name", "hooks"),
    [
        ("randn_like", BITS),
        ("mutated_buffer", VIEWS),
        ("checkpointed", VIEWS),
        ("checkpointed", CLONE),
    ],
    ids=["bits", "all-mutated", "all-regions", "clone"],
)
def test_hooks_that_lose_nothing_change_nothing(name: str, hooks: Any) -> None:
    assert ran(name, 0.4, hooks).outcome.differs_from(ran(name, 0.4).outcome) == []


def test_a_ready_made_pair_stays_close_and_lowers_the_peak() -> None:
    """Forward is not touched; gradients move by about as much as the pair loses."""
    plain, packed = ran("llama", 1), ran("llama", 1, "float8")
    for key, value in plain.outcome.outputs.items():
        assert torch.equal(packed.outcome.outputs[key], value), key
    assert torch.equal(packed.outcome.random_state, plain.outcome.random_state)
    assert 0 < packed.outcome.gradient_distance(plain.outcome) < 0.08
    assert packed.plan.saved_bytes < 0.3 * plain.plan.saved_bytes
    assert packed.peak_bytes < plain.peak_bytes
    simulated, measured = (
        plain.plan.peak_bytes - packed.plan.peak_bytes,
        plain.peak_bytes - packed.peak_bytes,
    )
    assert simulated == pytest.approx(measured, rel=0.02)


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
    options = {"budget": remat.Saved(10_000), "lower": "eager", "hooks": hooks}
    compiled = torch.compile(model, backend="remat", dynamic=True, options=options)
    for rows in (6, 9, 17):
        x = torch.randn(rows, 8)
        found, expected = (
            torch.autograd.grad(f(x), [*model.parameters()]) for f in (compiled, model)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("hooks", ["int8", "float8"])
def test_a_kink_stays_where_forward_has_it(hooks: str) -> None:
    """Small numbers beside a large one are packed as 0, and the gradient of a relu at 0 is 0."""
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


# Hooks that run eagerly ---------------------------------------------------------------------------

Run = Callable[..., torch.Tensor]


@pytest.fixture
def gradients() -> Run:
    """Gradients of a step from the same seed, compiled with hooks or not, or with others active."""
    gc.freeze()  # tensors out of sight are looked for in all that was made since
    torch.manual_seed(0)
    model, x = Mlp(width=16, depth=1), torch.randn(32, 16)

    def run(hooks: Any = None, active: Any = None, lower: str = "eager") -> torch.Tensor:
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        options = {"budget": 1, "lower": lower, "hooks": hooks}
        options |= {"fallback_random": True} if lower == "inductor" else {}
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
    expected = gradients()
    with pytest.warns(HooksWarning, match="run eagerly, outside of it"):
        found = gradients((to_numpy, from_numpy), lower=lower)
    torch.testing.assert_close(found, expected, rtol=1e-5 if lower == "inductor" else 0, atol=1e-5)


W = torch.randn(8, 8, requires_grad=True)


@pytest.fixture
def hooked() -> Any:
    """A step whose hooks run eagerly."""
    options = {"budget": 1, "lower": "eager", "hooks": (to_numpy, from_numpy)}
    return torch.compile(lambda: (W @ W).sin().exp().sum(), backend="remat", options=options)


def test_what_eager_hooks_keep_goes_with_the_step(hooked: Any) -> None:
    """After backward, and where backward never comes."""
    gc.freeze()  # what earlier tests have left is not collected below
    before = len(PACKED)
    loss = hooked()
    assert len(PACKED) > before
    loss.backward()
    del loss
    assert len(PACKED) == before
    loss = hooked()
    assert len(PACKED) > before
    del loss
    gc.collect()
    assert len(PACKED) == before


def fail(x: Any) -> Any:
    raise KeyError("scale")


@pytest.mark.parametrize(
    ("pack", "unpack", "says"),
    [
        (fail, from_numpy, "hooks 'custom': pack raised KeyError: 'scale'"),
        (to_numpy, fail, "hooks 'custom': unpack raised KeyError: 'scale'"),
        (
            to_numpy,
            lambda p: torch.from_numpy(p).double(),
            r"unpack returned float64\[32, 16\] on cpu for a saved",
        ),
    ],
)
def test_eager_hooks_that_break_their_word_are_named(
    gradients: Run, pack: Any, unpack: Any, says: str
) -> None:
    with pytest.raises(PlanError, match=says) as raised:
        gradients((pack, unpack))
    assert "raised" not in says or isinstance(raised.value.__cause__, KeyError)


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


def test_what_eager_hooks_keep_can_be_unpacked_again(hooked: Any) -> None:
    with functorch_config.patch(donated_buffer=False):
        loss = hooked()
        (once,) = torch.autograd.grad(loss, W, retain_graph=True)
        (again,) = torch.autograd.grad(loss, W)
    assert torch.equal(once, again)


# Inductor -----------------------------------------------------------------------------------------


def test_inductor_compiles_what_is_packed(gradients: Run) -> None:
    expected = gradients()
    away = gradients("float8", lower="inductor") - expected
    assert 0 < away.norm() < 0.1 * expected.norm()


def test_what_is_packed_may_share_memory(gradients: Run) -> None:
    def pack(x: torch.Tensor) -> Any:
        rows = len(x) // 2
        return x[:rows], x[rows:]

    torch.testing.assert_close(gradients((pack, torch.cat)), gradients())


# Hooks that are active already --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hooks", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16)], ids=["plain", "packed"]
)
def test_hooks_around_the_step_get_what_is_saved(
    gradients: Run, hooks: Any, dtype: torch.dtype
) -> None:
    expected = gradients(hooks)
    seen: list[torch.dtype] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    assert torch.equal(gradients(hooks, active=(watched, lambda x: x)), expected)
    assert dtype in seen


def test_graph_modules_around_the_step_work_as_without_us(gradients: Run) -> None:
    """PyTorch inlines them after we have split the graph."""

    def cast(to: torch.dtype) -> fx.GraphModule:
        return fx.symbolic_trace(lambda x: x.to(to))

    active = cast(torch.float64), cast(torch.float32)
    assert torch.equal(gradients(active=active), gradients())
