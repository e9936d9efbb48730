"""Statistics of small modules compared with PyTorch's estimator, and refusals."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from remat.errors import ProblemError
from remat.graph.costs import Flops, Roofline
from remat.sac import SACEstimator, SACStats, get_optimal_checkpointing_policy_per_module
from remat.sac.estimation.stats import group
from tests.sac import planned
from tests.sac.planned import ran

MODEL = "operator-level-cost-model"


class Net(nn.Module):
    """Module that runs a function; its children make it no leaf."""

    def __init__(self, run: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        self.run = run
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def estimated(run: Callable[..., Any], *shapes: tuple[int, ...], **children: Any) -> SACStats:
    """Return the statistics of a `Net` on float32 tensors of these shapes."""

    def make() -> Net:
        return Net(run, **{name: child() for name, child in children.items()})

    return ran(make, *shapes).sac_mod_stats["Net"]


def named(stats: SACStats) -> list[str]:
    return [name.split(".")[1] for name in stats.func_names]


def test_views_outputs_and_what_autograd_saves() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).exp().view(-1).sin()

    stats = estimated(run, (2, 4))
    assert stats.func_names[:2] == ["aten.t.default", "aten.mm.default"]
    assert named(stats) == ["t", "mm", "exp", "view", "sin"]
    assert stats.view_like_ops == [0, 3]
    # The module returns the last result, which stays alive in any case.
    assert stats.memory == [0, 32, 32, 0, 0]
    # exp saves its result, and sin saves a view of this result.
    assert stats.saved_autograd_ops == [2, 3]
    assert stats.inplace_ops == []
    assert not stats.force_store_random
    assert stats.runtimes[0] == stats.runtimes[3] == 0 < stats.runtimes[1]


def test_outputs_are_those_that_are_returned() -> None:
    def run(self: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = x.exp()
        values, _ = self.lin(x).max(dim=1)
        last = first.sin()
        return {"early": first.t(), "max": values, "number": last.sum()}

    stats = estimated(run, (2, 4))
    assert named(stats) == ["exp", "t", "mm", "max", "sin", "t", "sum"]
    # max keeps its indices: 2 int64.
    assert stats.memory == [0, 0, 32, 16, 32, 0, 0]


def test_in_place_chains() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        y.relu_().view(-1).add_(1)
        x.mul_(2)
        x.add_(1)
        return y + x

    stats = estimated(run, (2, 4))
    assert named(stats) == ["t", "mm", "relu_", "view", "add_", "mul_", "add_", "add"]
    # mul_ writes to an argument, so it is paired with itself. mm reads x before this write.
    assert stats.inplace_ops == [(1, 5), (2, 1), (4, 1), (5, 5), (6, 5)]
    assert stats.memory == [0, 32, 0, 0, 0, 0, 0, 0]
    grouping = group(stats)
    assert [item.ops for item in grouping.stored] == [(1, 2, 4, 5, 6)]
    assert [item.ops for item in grouping.free] == [(7,)]


def test_what_read_memory_before_it_was_overwritten_is_decided_with_that() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        mask = y > 0
        y.mul_(2)
        return (y * mask).sin()

    stats = estimated(run, (2, 4))
    assert named(stats) == ["t", "mm", "gt", "mul_", "mul", "sin"]
    assert [item.ops for item in group(stats).free] == [(1, 2, 3), (4,), (5,)]


def test_writing_to_a_copy_is_repeated_with_the_copy() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.mul_(2)
        return self.lin(y)

    stats = estimated(run, (2, 4))
    assert named(stats) == ["mul_", "t", "mm"]
    assert (stats.view_like_ops, stats.inplace_ops) == ([0, 1], [])


def test_a_draw_into_a_copy_makes_all_draws_repeated() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        y = x.clone().bernoulli_(0.5)
        return self.lin(y) + torch.rand(4) + torch.empty(4).normal_()

    stats = estimated(run, (2, 4))
    assert named(stats) == ["bernoulli_", "t", "mm", "rand", "add", "empty", "normal_", "add"]
    assert stats.rand_ops == [0, 3, 6]
    assert stats.view_like_ops == [0, 1, 3, 5, 6]
    assert [item.ops for item in group(stats).free] == [(2,), (4,), (7,)]


def test_random_operators_are_one_group() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.lin(x), 0.5)
        return F.dropout(x, 0.5).sin()

    stats = estimated(run, (2, 4))
    once = ["empty_like", "bernoulli_", "div_", "mul"]
    assert named(stats) == ["t", "mm", *once, *once, "sin"]
    assert stats.rand_ops == [3, 7]
    assert [i.ops for i in group(stats).free] == [(1,), (2, 3, 4, 6, 7, 8), (5,), (9,), (10,)]


@pytest.mark.parametrize("by_name", [True, False])
def test_without_a_tensor_random_results_are_stored(by_name: bool) -> None:
    def run(self: Net, n: int, x: torch.Tensor | None = None) -> torch.Tensor:
        return self.lin(torch.rand(n, 4)).sin()

    with FakeTensorMode():
        net, kwargs = Net(run), {"x": torch.ones(1)} if by_name else {}
        with SACEstimator()(MODEL) as estimator:
            net(3, **kwargs)
    stats = estimator.sac_mod_stats["Net"]
    assert stats.force_store_random is not by_name
    assert [i.ops for i in group(stats).stored] == ([] if by_name else [(0,)])


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_attention_is_random_where_it_drops(p: float) -> None:
    def run(self: Net, q: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, p)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, dropout_p=p)
        return F.scaled_dot_product_attention(q, q, q)

    stats = estimated(run, (1, 2, 8, 4))
    assert len(stats) == 3
    assert stats.rand_ops == ([0, 1] if p else [])


def test_batch_normalisation_does_not_count_twice() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.norm(self.lin(x)).relu_())

    training = estimated(run, (8, 4), norm=lambda: nn.BatchNorm1d(4))
    at = named(training).index("native_batch_norm")
    assert (at, at) in training.inplace_ops
    assert at in {i for item in group(training).stored for i in item.ops}
    evaluating = estimated(run, (8, 4), norm=lambda: nn.BatchNorm1d(4).eval())
    at = named(evaluating).index("native_batch_norm")
    assert (at, at) not in evaluating.inplace_ops
    assert group(evaluating).stored == ()


def test_tensor_subclasses_count_what_is_in_them() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).exp().sin()

    plain = estimated(run, (2, 4))
    with FakeTensorMode():
        net, x = Net(run), torch.randn(2, 4)
        with SACEstimator()(MODEL) as estimator:
            net(TwoTensor(x, x.clone()))
    double = estimator.sac_mod_stats["Net"]
    assert plain.func_names == double.func_names
    assert double.memory == [2 * n for n in plain.memory] == [0, 64, 64, 0]
    assert double.view_like_ops == plain.view_like_ops
    assert double.runtimes == pytest.approx([2 * t for t in plain.runtimes])


class Block(nn.Module):
    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.inplace = inplace
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.norm(x).view(2, -1, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = x + y.transpose(1, 2).reshape(x.shape)
        return x + self.drop(self.down(F.relu(self.up(x), inplace=self.inplace)))


class Stack(planned.Stack):
    def __init__(self, layers: int = 2, inplace: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(inplace) for _ in range(layers)])


def test_pytorchs_estimator_says_the_same_where_it_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed._tools import sac_estimator
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    kept = []  # PyTorch's estimator identifies storages by address, which later storages may reuse

    def untimed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        kept.append(func(*args, **(kwargs or {})))
        return kept[-1], 1.0

    # Neither mode of PyTorch's estimator runs without a GPU.
    monkeypatch.setattr(RuntimeEstimator, "_roofline_estimate", staticmethod(untimed))
    with FakeTensorMode():
        model, x = Stack(inplace=False), torch.randn(2, 5, 8)
        theirs = sac_estimator.SACEstimator()
        with theirs(MODEL):
            model(x)
        with SACEstimator()(MODEL) as ours:
            model(x)
    names = ["Stack", "Stack.layers.0", "Stack.layers.1"]
    assert sorted(ours.sac_mod_stats) == sorted(theirs.sac_mod_stats) == names
    for name in names:
        a, b = ours.sac_mod_stats[name], theirs.sac_mod_stats[name]
        assert named(a) == b.func_names
        assert a.view_like_ops == b.view_like_ops
        assert a.inplace_ops == b.inplace_ops
        assert a.force_store_random == b.force_store_random
        # PyTorch's estimator counts this attention as random although nothing is dropped.
        attention = {i for i, f in enumerate(b.func_names) if f.endswith("flash_attention_for_cpu")}
        assert a.rand_ops == [i for i in b.rand_ops if i not in attention]
        # PyTorch's estimator counts the memory of in-place operators a second time.
        written = {op for op, _ in b.inplace_ops}
        assert a.memory == [0 if i in written else n for i, n in enumerate(b.memory)]
        # PyTorch's estimator misses tensors that autograd saves after the module has ended.
        later = set(a.saved_autograd_ops) ^ set(b.saved_autograd_ops)
        assert later <= {len(a) - 1}
    assert ours.sac_mod_stats["Stack.layers.0"] == ours.sac_mod_stats["Stack.layers.1"]


def test_measured_runtimes() -> None:
    stats = ran(Stack, (2, 5, 8), mode="operator-level-benchmark").sac_mod_stats
    first, second = (stats[f"Stack.layers.{i}"].runtimes for i in range(2))
    assert all(t > 0 for t in first), "views take time too"
    assert second == first


def test_modules_that_are_called_again() -> None:
    def steady(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))

    def unsteady(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x).sum())

    def inner(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) if x.dim() else x.exp()

    estimator = ran(lambda: Net(steady, inner=Net(inner)), (2, 4))
    assert set(estimator.sac_mod_stats) == {"Net", "Net.inner"}
    estimator = ran(lambda: Net(unsteady, inner=Net(inner)), (2, 4))
    assert set(estimator.sac_mod_stats) == {"Net"}
    assert estimator.sac_mod_unsteady == {
        "Net.inner": "module 'Net.inner' is called more than once and runs aten.exp.default as "
        "operator 0 instead of aten.t.default, which its first call ran; checkpoint what calls it, "
        "or what it calls"
    }


def test_further_calls_and_backward_change_nothing_and_another_run_begins_anew() -> None:
    estimator = SACEstimator()(MODEL)
    with FakeTensorMode():
        model, x = Stack(), torch.randn(2, 5, 8)
        with estimator:
            model(x)
        before = estimator.sac_mod_stats
        with estimator:
            model(x)
            model(x).sum().backward()
        assert estimator.sac_mod_stats == before
        estimator.pwlf_sac_tradeoff_curve()
        model.layers[1].norm = nn.Identity()
        with estimator:
            model(x)
    assert len(estimator.sac_mod_stats["Stack"]) == len(before["Stack"]) - 1
    assert estimator.sac_mod_stats["Stack.layers.0"] == before["Stack.layers.0"]
    assert estimator.sac_mod_tradeoff_stats == {}


@pytest.mark.parametrize("fake", [True, False])
def test_real_models(fake: bool) -> None:
    """Real parameters within a fake mode, and a real run without one, give the statistics of fake parameters."""

    def norms(self: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum() + self.stack(y).sum()

    def make() -> Net:
        return Net(norms, norm=nn.BatchNorm1d(4), stack=Stack())

    expected, real = ran(make, (10, 4), (2, 5, 8)).sac_mod_stats, make()
    context = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with context, SACEstimator()(MODEL) as estimator:
        out = real(torch.randn(10, 4), torch.randn(2, 5, 8))
    assert estimator.sac_mod_stats == expected
    layers = ("Net.stack.layers.0", "Net.stack.layers.1")
    assert set(expected) == {"Net", "Net.stack", *layers}
    assert isinstance(out, FakeTensor) is fake


def test_a_run_that_fails_leaves_nothing_behind() -> None:
    def run(self: Net, x: torch.Tensor, fails: bool) -> torch.Tensor:
        x = self.inner(x)
        if fails:
            raise KeyError("no")
        return x.exp()

    def inner(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)

    with FakeTensorMode(), SACEstimator()(MODEL) as estimator:
        net, x = Net(run, inner=Net(inner)), torch.randn(2, 4)
        with pytest.raises(KeyError):
            net(x, True)
        net(x, False)
    assert named(estimator.sac_mod_stats["Net"]) == ["t", "mm", "exp"]


def test_a_model_without_operators() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        return x

    stats = estimated(run, (2, 4))
    assert len(stats) == 0
    assert get_optimal_checkpointing_policy_per_module(stats, 0.5) == []


def test_what_another_thread_runs_meanwhile_is_not_estimated() -> None:
    other, called = Net(lambda self, x: self.lin(x).exp()), nn.Module.__call__
    inner = Net(lambda self, x: self.lin(x))
    seen: list[bool] = []

    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        def there() -> None:
            other(torch.randn(2, 4)).sum().backward()
            inner(torch.randn(2, 4))
            seen.append(nn.Module.__call__ is called and "forward" not in other.__dict__)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        return self.lin(x)

    net = Net(run, inner=inner)
    with SACEstimator()(MODEL) as estimator:
        net(torch.randn(2, 4))
    assert seen == [True]
    assert other.lin.weight.grad is not None
    assert {k: named(s) for k, s in estimator.sac_mod_stats.items()} == {"Net": ["t", "mm"]}


def test_what_is_refused() -> None:
    with pytest.raises(ProblemError, match="'operator-level-guess'; expected 'operator-level-b"):
        SACEstimator()("operator-level-guess")
    with pytest.raises(ProblemError, match="'flops' counts FLOP"):
        SACEstimator()(MODEL, Flops())


def test_two_devices_are_refused() -> None:
    def run(self: Net, x: torch.Tensor) -> torch.Tensor:
        return x.to("cuda:1") + 1

    with (
        FakeTensorMode(),
        torch.no_grad(),
        pytest.raises(ProblemError, match=r"module 'Net': aten._to_copy.default makes a tensor on"),
        SACEstimator()(MODEL),
    ):
        Net(run)(torch.randn(2, 4) + 1)


def test_other_cost_models() -> None:
    default = ran(lambda: Stack(1), (512, 5, 8)).sac_mod_stats["Stack"].runtimes
    with FakeTensorMode():
        model, x = Stack(1), torch.randn(512, 5, 8)
        with SACEstimator()(MODEL, Roofline.parse("a100")) as slow:
            model(x)
    pairs = zip(slow.sac_mod_stats["Stack"].runtimes, default, strict=True)
    assert all(a > b or a == b == 0 for a, b in pairs)
    assert str(slow.cost) == "roofline:a100"
