"""Peaks in bytes of compiled steps, with made-up code: what is planned, in which order, and what is refused."""

from __future__ import annotations

import re
import warnings
import zlib
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler import config as compiler_config

import remat
from remat.errors import BudgetError, BudgetWarning
from remat.integrations.compiled_budget import CompiledBudget, warn_of_saved
from remat.integrations.workarounds import sound_donation
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search.compiled import CompiledSearch
from remat.units import format_bytes


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + torch.nn.functional.gelu(x @ w) @ w.mT
    return x.logsumexp(-1).sum()


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    x, w = torch.randn(64, 16), torch.randn(16, 32, requires_grad=True)
    return remat.capture(step, (x, w), lower="inductor")


class Compiler:
    """Plans a step as often as it is to be, where compiled code takes up to half more than is expected of it.

    Args:
        joint: the step.
        salt: by how much more, each plan by itself.
    """

    def __init__(self, joint: remat.JointGraph, salt: int) -> None:
        self._joint, self._salt = joint, salt

    def compiled(self, made: remat.Plan) -> remat.Plan:
        text = f"{self._salt} {made.saved} {made.forward_order} {made.backward_order}"
        more = zlib.crc32(text.encode()) % 512
        taken = made.estimated_peak_bytes * (1024 + more) // 1024
        return replace(made, peak_bytes=taken, planned_peak_bytes=made.peak_bytes)

    def run(self, budget: remat.Peak) -> list[int]:
        """The peaks of what was compiled, the last one that runs under bytes."""
        known, request = CompiledBudget(), PlanRequest.of(budget=budget, solver="greedy")
        peaks = []
        again = True
        while again:
            made = self.compiled(known.plan(self._joint.copy(), request, agree=None))
            peaks.append(made.peak_bytes)
            assert made.requested == request.budget
            again = known.replans(made, request)
        return peaks


@pytest.mark.filterwarnings("ignore::remat.errors.BudgetWarning")
@pytest.mark.parametrize("salt", [6, 7])
def test_no_peak_is_refused_that_the_least_peak_comes_to(
    joint: remat.JointGraph, salt: int
) -> None:
    compiler = Compiler(joint, salt)
    least = min(compiler.run(remat.Peak(0.0)))
    for more in (1.0, 1.01, 1.05):
        assert compiler.run(remat.Peak(int(more * least)))[-1] <= int(more * least)


class Above(Compiler):
    """Compiled code takes a multiple of what is expected of it, plus some bytes."""

    def compiled(self, made: remat.Plan) -> remat.Plan:
        taken = made.estimated_peak_bytes * self._salt + 4096
        return replace(made, peak_bytes=taken, planned_peak_bytes=made.peak_bytes)


@pytest.mark.filterwarnings("ignore::remat.errors.BudgetWarning")
@pytest.mark.parametrize("times", [1, 2, 5, 100])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_ratio_of_the_peak_runs_whatever_its_step_takes_as_compiled(
    joint: remat.JointGraph, times: int, ratio: float
) -> None:
    peaks = Above(joint, times).run(remat.Peak(ratio))
    assert len(peaks) <= 3


@pytest.mark.parametrize("times", [1, 2, 5, 100])
def test_bytes_are_refused_with_a_budget_that_holds_whatever_the_step_takes_as_compiled(
    joint: remat.JointGraph, times: int
) -> None:
    compiler = Above(joint, times)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        least = min(compiler.run(remat.Peak(0.0)))
    # Half of the least peak, and one byte more than parameters and inputs
    for nbytes in (least // 2, 64 * 16 * 4 + 16 * 32 * 4 + 1):
        with pytest.raises(BudgetError) as raised:
            compiler.run(remat.Peak(nbytes))
        named = int(re.findall(r"give budget=(\d+)$", str(raised.value))[0])
        assert compiler.run(remat.Peak(named))[-1] <= named


@pytest.mark.filterwarnings("ignore::remat.errors.BudgetWarning")
def test_a_refusal_names_what_was_found_and_proven_and_a_budget_that_holds(
    joint: remat.JointGraph,
) -> None:
    compiler = Compiler(joint, 6)
    with pytest.raises(BudgetError) as raised:
        compiler.run(remat.Peak(min(compiler.run(remat.Peak(0.0))) * 3 // 5))
    found, proven, named = (
        int(re.findall(pattern, str(raised.value))[0])
        for pattern in (
            r"has a peak of [^(]*\((\d+) bytes\)",
            r"proven only that none is below (\d+) bytes",
            r"give budget=(\d+)$",
        )
    )
    assert proven < found <= named
    assert compiler.run(remat.Peak(named))[-1] <= named


def test_a_step_from_a_cache_is_known_as_where_it_was_compiled(joint: remat.JointGraph) -> None:
    """The next compilation then has the same key, so that it comes from the cache too."""
    request = PlanRequest.of(budget=remat.Peak(40_000), solver="greedy")
    here, elsewhere = CompiledBudget(), CompiledBudget()
    made = Compiler(joint, 0).compiled(here.plan(joint.copy(), request, agree=None))
    assert here.replans(made, request)
    assert elsewhere.replans(made, request)
    assert elsewhere.key == here.key
    for known in (here, elsewhere):  # only the first has candidates from its last search
        assert known.plan(joint.copy(), request, agree=None).decision != made.decision


def test_a_refusal_of_one_of_several_graphs_names_no_budget(joint: remat.JointGraph) -> None:
    """The other graphs take memory besides, so no budget is known that holds for the step."""
    request = PlanRequest.of(budget=remat.Peak(30_000), solver="greedy")
    known, compiler = CompiledBudget(), Compiler(joint, 6)
    text, without = "", 0
    while not text:
        made = compiler.compiled(known.plan(joint.copy(), request, agree=None))
        without = made.without_estimated_bytes
        try:
            assert known.replans(made, replace(request, of_several=True))
        except BudgetError as error:
            text = str(error)
    assert "give budget=" not in text
    assert re.search(r"needs \d+ bytes or more.*TORCH_LOGS=graph_breaks.*fullgraph=False", text)
    assert f"about {format_bytes(without)} without remat" in text
    assert "--budget peak:0" in text


def test_a_peak_below_parameters_and_inputs_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, joint: remat.JointGraph
) -> None:
    def compiled(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("remat.integrations.budget_loop.compile_graph", compiled)
    x, w = torch.randn(64, 16), torch.randn(16, 32, requires_grad=True)
    torch.compiler.reset()
    budget = remat.Peak((64 * 16 + 16 * 32) * 4 - 1)
    with pytest.raises(BudgetError, match=r"inputs alone take 6 KiB \(6144 bytes\)") as caught:
        torch.compile(step, backend="remat", options={"budget": budget})(x, w)
    least = re.search(r"about .* \((\d+) bytes\), estimated under Inductor", str(caught.value))
    assert least
    request = PlanRequest.of(budget=remat.Peak(0.0))
    planner = Planner.of(joint.copy(), request)
    assert int(least[1]) == planner.search.measures.estimated(
        CompiledSearch(planner.search).search_within(request.budget)
    )
    assert "budget=remat.Peak(0.0) runs that plan" in str(caught.value)


def test_a_saved_plan_that_is_above_its_budget_as_compiled_is_warned_of(
    joint: remat.JointGraph,
) -> None:
    """It was simulated within its budget, and is above it as Inductor lays values out."""
    made = Compiler(joint, 0).compiled(remat.plan(joint, remat.Peak("1MiB"), "greedy"))
    assert f"peak {format_bytes(made.peak_bytes)} as compiled" in repr(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        warn_of_saved(made)
    less = replace(made, budget=f"peak:{made.peak_bytes - 1}", _requested=None)
    with pytest.warns(BudgetWarning, match=r"as Inductor compiled it by a saved plan, above"):
        warn_of_saved(less)


def test_a_saved_value_in_the_memory_of_another_is_not_overwritten() -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        values = [torch.empty(8), torch.empty(4, 4)]
        values.append(values[1].t())
    for k, value in enumerate(values):
        graph.placeholder(f"saved_{k}").meta["val"] = value
    context = TracingContext(mode)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=[0, 1, 2])
    with tracing(context), ExitStack() as stack:
        sound_donation(graph, True, stack)
        assert compiler_config.cache_key_tag.endswith("donated: [0]")
    assert context.fw_metadata.bw_donated_idxs == [0]
