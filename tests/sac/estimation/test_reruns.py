"""What running modules again takes, measured in steps that run them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.checkpointing import estimate
from remat.sac.estimation import reruns
from remat.sac.estimation.reruns import Rerun, time_reruns

MS = 1e-3


class Clock:
    """Time that passes when operators run: as many milliseconds as they are told to take."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A clock that stands still but for `Costly`; timing itself takes no time on it."""
    clock = Clock()
    monkeypatch.setattr(reruns, "time", clock)
    clear = (reruns.timing_ms.cache_clear, reruns.policy_ms.cache_clear)
    [forget() for forget in clear]
    yield clock
    [forget() for forget in clear]


@torch.library.custom_op("remat_tests::costly", mutates_args=())
def costly(x: torch.Tensor, ms: float) -> torch.Tensor:
    CLOCKS[-1].now += ms * MS
    return x.sin()


@costly.register_fake
def _(x: torch.Tensor, ms: float) -> torch.Tensor:
    return torch.empty_like(x)


costly.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[0].cos(), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)

remat.declare_pure(costly)  # what is not declared would be stored

CLOCKS: list[Clock] = []


class Costly(nn.Module):
    """Two operators that take some time, and some between them that no operator takes."""

    def __init__(
        self, clock: Clock, one: float, between: float, two: float, width: int = 4
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.clock, self.times = clock, (one, between, two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, between, two = self.times
        x = costly(self.linear(x), one)
        self.clock.now += between * MS
        return costly(x, two).exp()


def model(clock: Clock, *blocks: tuple[Any, ...]) -> nn.Sequential:
    CLOCKS.append(clock)
    torch.manual_seed(0)
    made = [Costly(clock, *given) for given in blocks]
    return nn.Sequential(*made, nn.Linear(made[-1].linear.out_features, 1))


def test_operators_and_what_is_between_them(clock: Clock) -> None:
    found = time_reruns(model(clock, (2, 1, 4), (2, 1, 4)), (torch.randn(3, 4),), names=["0", "1"])
    assert found is not None
    assert found.forward_ms == pytest.approx(12)
    assert [*found.modules] == ["1", "0"], "backward comes to the last one first"
    for rerun in found.modules.values():
        # Stored or not, Python between the two takes its time: that is no operator's.
        assert rerun.overhead_ms == pytest.approx(1)
        assert [ms for op, ms in rerun.ops if "costly" in op] == pytest.approx([2, 4])


def test_the_model_is_as_before(clock: Clock) -> None:
    made, x = model(clock, (1, 0, 1)), torch.randn(3, 4)
    made[-1].weight.grad = torch.ones(1, 4)
    state = torch.get_rng_state()
    assert time_reruns(made, (x,), names=["0"]) is not None
    assert "forward" not in made[0].__dict__
    assert torch.equal(made[-1].weight.grad, torch.ones(1, 4))
    assert made[0].linear.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_cannot_run_again_ends_it(clock: Clock) -> None:
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Fickle.calls += 1
            return x.sin().exp() if Fickle.calls % 2 else x.sin()

    made = nn.Sequential(nn.Linear(4, 4), Fickle(), nn.Linear(4, 1))
    assert time_reruns(made, (torch.randn(3, 4),), names=["1"]) is None
    assert "forward" not in made[1].__dict__


def test_runtimes_of_what_did_not_run_again_are_those_given() -> None:
    rerun = Rerun(ops=(("mm", 1.0), ("view", 2.0), ("sin", 3.0)), overhead_ms=0.0)
    assert rerun.runtimes(["mm", "sin", "sum"], [7.0, 8.0, 9.0]) == [1.0, 3.0, 9.0]


def test_the_benchmark_estimates_modules_so(clock: Clock) -> None:
    made = model(clock, (2, 1, 4), (2, 1, 4), (30, 2, 5, 8))
    tree = estimate(made, (torch.randn(3, 4),), mode="operator-level-benchmark")
    assert tree.step_ms == pytest.approx(3 * 47), "forward's operators, and twice that for backward"
    first, second, third = (tree[name] for name in "012")
    assert (first.overhead_ms, third.overhead_ms) == pytest.approx((1.0, 2.0))
    assert first.stats is not None
    assert second.stats is not None
    assert first.stats.runtimes == second.stats.runtimes, "they are alike"
    assert sum(first.stats.runtimes) == pytest.approx(6)


def test_fake_tensors_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a step ran")

    monkeypatch.setattr("remat.sac.estimation.modules.time_reruns", never)
    made = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    assert estimate(made, (torch.randn(3, 4),)).modules
