"""Workspaces of operators, counted in the peaks of steps that a CPU runs operator by operator."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import remat
from remat.errors import BudgetWarning, PeakWarning
from remat.graph.capture.fake import repair_aliases
from remat.graph.capture.step import capture
from remat.graph.joint import JointGraph
from remat.graph.memory.liveness import memory_curve
from remat.graph.memory.storages import WORKSPACE, expression_of, hint
from remat.planning.pipelines import modules_of, prepare
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.running import workspace
from remat.running.measure import measure_step
from remat.running.workspace import note_workspaces, workspace_bytes
from tests.graphs import evaluated

_CONVOLUTION = torch.ops.aten.convolution.default
_PADDED = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def convolutions() -> nn.Module:
    """Model of three convolutions with batch norms."""
    blocks = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


class Dropped(nn.Module):
    """Model of layers whose dropouts are recomputed under a small budget."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.dropout(functional.gelu(layer(x)), 0.3)
        return x.square().mean()


def compiled(fn: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend="remat", options={"lower": "eager", **options})


def rows_in_place(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        h = (x @ w).sin()
        h[:10] += 1
        x = (h @ v).relu()
    return x.sum()


def of_rows() -> Any:
    """PyTorch's ``copy`` into a view takes the memory behind the view; its cache of fake results says less."""
    w, v = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    return rows_in_place, (torch.randn(96, 64), w, v), "storages", 0.7, ()


def of_convolutions() -> Any:
    return convolutions(), (torch.randn(4, 8, 16, 16),), "allocator", 0.85, ("batch_norm",)


def of_dropouts() -> Any:
    return Dropped(), (torch.randn(256, 32),), "allocator", 0.7, ("bernoulli", "dropout")


@pytest.mark.parametrize("make", [of_rows, of_convolutions, of_dropouts])
def test_peaks_count_what_operators_take_and_take_again(make: Any) -> None:
    fn, args, by, share, repeated = make()

    def measured_as_planned(budget: int) -> int:
        measured = measure_step(compiled(fn, budget=budget), args, by=by).peak_bytes
        assert remat.plans()[-1].peak_bytes == measured
        return measured

    budget = int(measured_as_planned(1) * share)
    assert measured_as_planned(budget) <= budget
    recomputed = remat.plans()[-1].recomputed
    assert not repeated or any(word in name for word in repeated for name in recomputed)


def test_a_copy_into_elements_that_share_memory_takes_these_elements_alone() -> None:
    joint = remat.capture(
        lambda x, w: (x * w).sum(), (torch.randn(64, 8), torch.randn(8, requires_grad=True))
    )
    graph = joint.graph_module.graph
    product = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    mode = product.meta["val"].fake_mode
    with mode, graph.inserting_after(product):
        row = product.meta["val"][0].expand(4, 8)
        view = graph.call_function(torch.ops.aten.clone.default, (product,))
        view.meta["val"] = row
    with mode, graph.inserting_after(view):
        copied = graph.call_function(torch.ops.aten.copy.default, (view, view))
        copied.meta["val"] = row.contiguous()
    repair_aliases(graph, by_kernel=True)
    assert copied.meta["val"].untyped_storage().nbytes() == 4 * 8 * 4


def test_the_timeline_names_what_operators_take_and_a_plan_agrees_with_the_backend() -> None:
    model, x = convolutions(), torch.randn(4, 8, 16, 16)
    compiled(model, budget=1)(x).sum().backward()
    plan = remat.plans()[-1]
    inside = [
        x for x in plan.timeline.lifetimes if x.node.startswith("workspace of aten.convolution")
    ]
    assert inside
    assert all(x.first == x.last for x in inside)
    assert plan.timeline.peak_bytes == plan.peak_bytes
    joint = capture(model, (x,), lower="eager")
    assert remat.plan(joint, 1, cost="auto").peak_bytes == plan.peak_bytes


def small_joint() -> JointGraph:
    return capture(convolutions(), (torch.randn(4, 8, 16, 16),), lower="eager")


def test_the_search_counts_as_the_simulation_does() -> None:
    layers = (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())
    joint = capture(nn.Sequential(*layers), (torch.randn(4, 8, 16, 16),), lower="eager")
    planner = Planner.of(joint, PlanRequest.of(cost="roofline:epyc"))
    done = planner.search.measures.split_of(planner.search.decisions.at_budget_one)
    step, modules = planner.search.schedules.lowered_schedule, modules_of(done)
    assert any(step.problem.extra)
    found = evaluated(step, *modules)
    simulated = memory_curve(*modules, done.joint.num_fwd_outputs).peak_bytes
    assert found.peak_bytes == simulated


def test_a_plan_for_another_device_runs_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = small_joint()
    known = remat.plan(joint, 1, cost="roofline:epyc").peak_bytes

    def refused(*_: Any) -> int:
        raise AssertionError("an operator ran")

    monkeypatch.setattr(workspace, "_cached", refused)
    for cost in ("roofline:a100", "roofline:h100", "flops"):
        assert remat.plan(joint, 1, cost=cost).peak_bytes < known


def test_a_saved_plan_is_applied_where_operators_take_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint = small_joint()
    plan = remat.Plan.from_json(remat.plan(joint, 1, cost="roofline:epyc").to_json())
    monkeypatch.setattr(workspace, "_cached", lambda *_: 4096)
    applied = remat.plan(joint, plan=plan)
    assert applied.peak_bytes != plan.peak_bytes
    assert applied.saved_bytes == plan.saved_bytes


def test_a_cost_model_that_is_about_no_cpu_is_warned_of() -> None:
    step = compiled(convolutions(), budget="1GiB", cost="flops")
    with pytest.warns(BudgetWarning, match="cost model 'flops' is about none"):
        step(torch.randn(4, 8, 16, 16)).sum().backward()


def test_smaller_batches_tell_what_a_large_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.zeros(64, 16, 8, 8), torch.zeros(16, 16, 3, 3)
    args = (x, w, None, *_PADDED)
    backward = torch.ops.aten.convolution_backward.default
    given = (x, x, w, [0], *_PADDED, [True, True, False])
    calls = ((_CONVOLUTION, args, x), (backward, given, (x, w)))
    monkeypatch.setattr(workspace, "_CACHE", {})
    whole = [workspace_bytes(op, values, {}, results) for op, values, results in calls]
    ran: list[int] = []

    def noted(op: Any, values: Any, kwargs: Any) -> int:
        ran.append(len(values[0]))
        return measured(op, values, kwargs)

    measured = workspace._measured
    monkeypatch.setattr(workspace, "_CACHE", {})
    monkeypatch.setattr(workspace, "MOST_BYTES", 64 << 10)
    monkeypatch.setattr(workspace, "_measured", noted)
    assert [workspace_bytes(op, values, {}, results) for op, values, results in calls] == whole
    assert ran
    assert max(ran) < 64


def convolution_of_two_gibibytes() -> Any:
    x, w = torch.empty(2, 16, 4096, 4096), torch.empty(16, 16, 3, 3)
    return _CONVOLUTION, (x, w, None, *_PADDED), x


def product_of_rows_far_apart() -> Any:
    """Return a product of 8 rows of 64 bytes that lie 256 MiB apart in a wide matrix of 2 GiB."""
    rows = torch.empty_strided((8, 16), (2**26, 1))
    return torch.ops.aten.linear.default, (rows, torch.empty(4, 16)), torch.empty(8, 4)


@pytest.mark.parametrize("call", [convolution_of_two_gibibytes, product_of_rows_far_apart])
def test_what_is_too_large_does_not_run_and_is_said(
    monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    monkeypatch.setattr(workspace, "_CACHE", {})
    monkeypatch.setattr(workspace, "_measured", lambda *_: pytest.fail("an operator ran"))
    with FakeTensorMode():
        op, values, results = call()
    with pytest.warns(PeakWarning, match="is not run on more than 256 MiB"):
        assert workspace_bytes(op, values, {}, results) == 0


def test_threads_measure_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    running = threading.Lock()
    calls: list[Any] = []

    def measured(*call: Any) -> int:
        assert running.acquire(blocking=False), "two measurements at once: one profiler fails"
        calls.append(call)
        time.sleep(0.05)  # long enough for other threads to enter, if the lock did not stop them
        running.release()
        return 77

    monkeypatch.setattr(workspace, "_CACHE", {})
    monkeypatch.setattr(workspace, "_measured", measured)
    x, weight = torch.zeros(8, 16), torch.zeros(4, 16)

    def ask(_: int) -> int:
        return workspace_bytes(torch.ops.aten.linear.default, (x, weight), {}, torch.zeros(8, 4))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [77] * 4
    assert len(calls) == 1


def test_a_profile_of_the_user_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_CACHE", {})
    x, w = torch.zeros(2, 16, 8, 8), torch.zeros(16, 16, 3, 3)
    with torch.profiler.profile() as profile:
        with pytest.warns(PeakWarning, match="a profiler runs"):
            assert workspace_bytes(_CONVOLUTION, (x, w, None, *_PADDED), {}, x) == 0
        x.sin()
    assert any(event.key == "aten::sin" for event in profile.key_averages())
    assert workspace_bytes(_CONVOLUTION, (x, w, None, *_PADDED), {}, x) > 0


def test_what_operators_take_grows_with_the_sizes_that_are_symbols() -> None:
    x = torch.randn(4, 8, 16, 16)
    torch._dynamo.mark_dynamic(x, 0)
    graph = prepare(capture(convolutions(), (x,), lower="eager")).joint.graph
    note_workspaces(graph)
    taken = [n.meta[WORKSPACE] for n in graph.nodes if "convolution" in str(n.target)]
    assert taken
    for nbytes in taken:
        expression = expression_of(nbytes)
        (symbol,) = expression.free_symbols
        assert int(expression.subs(symbol, 8)) == 2 * hint(nbytes)


def test_elements_and_products_that_lie_densely_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        workspace, "_cached", lambda op, *_: asked.append(op.overloadpacket.__name__) or 0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joint = capture(
            lambda x, w: functional.layer_norm((x @ w).tanh().t()[::2], (8,)).square().mean(),
            (torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)),
            lower="eager",
        )
    note_workspaces(prepare(joint).joint.graph)
    assert "native_layer_norm" in asked
    assert not {"mm", "tanh"} & {*asked}


def test_a_backward_that_reads_onednns_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of an LSTM on a CPU crashes Python if its argument ``workspace`` is zeros."""

    def measured(op: Any, *_: Any) -> int:
        ran.append(str(op))
        return 0

    ran: list[str] = []
    monkeypatch.setattr(workspace, "_measured", measured)
    monkeypatch.setattr(workspace, "_CACHE", {})
    lstm = nn.LSTM(8, 8)
    with torch._dynamo.config.patch(allow_rnn=True):
        joint = capture(lambda x: lstm(x)[0].sin().sum(), (torch.randn(4, 2, 8),), lower="eager")
    assert remat.plan(joint, 0.5).peak_bytes > 0
    assert any("mkldnn_rnn_layer" in op for op in ran)
    assert not any("rnn_layer_backward" in op for op in ran)
