"""The option ``chunk``: plans of steps whose loss is split, the choice of the number of chunks, and refusals."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.errors import BudgetError, BudgetWarning, PlanError, ProblemError
from remat.passes.joint.chunk_loss import ChunkLoss
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.running.measure import measure_step

V, H, TOKENS = 2000, 16, 256


class Toy(nn.Module):
    def __init__(self, *, returns: bool = False) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(H, H), nn.Linear(H, V, bias=False)
        self.returns = returns

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.layer(x)))
        loss = F.cross_entropy(logits.float(), y)
        return (loss, logits) if self.returns else loss


def inputs(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, H), torch.arange(tokens) % V


@functools.cache
def joint_of(lower: str = "inductor", returns: bool = False) -> remat.JointGraph:
    return remat.capture(Toy(returns=returns), inputs(), lower=lower)


@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_a_plan_with_chunks_has_a_lower_peak(lower: str) -> None:
    joint = joint_of(lower)
    whole = remat.plan(joint, remat.Peak(1.0))
    plan = remat.plan(joint, remat.Peak(1.0), chunk=8)
    assert plan.chunk == "chunk-loss(chunks=8)"
    assert dict(plan.rows)["loss"] == "in chunks of tokens, by chunk-loss(chunks=8)"
    assert plan.peak_bytes <= 0.7 * whole.peak_bytes
    # The baseline is the step without chunks.
    assert plan.without_peak_bytes == whole.without_peak_bytes
    assert plan.without_cost == whole.without_cost
    assert plan.before_after.more == pytest.approx(plan.step_cost / whole.without_cost - 1)
    # Each chunk reads the weight again, and this model is small.
    assert plan.step_cost + plan.recompute_cost <= 1.3 * whole.step_cost
    # The gradients are computed in forward and saved, so that nothing of the logits is.
    assert plan.recompute_cost == 0


def test_a_saved_plan_carries_its_chunks(tmp_path: Path) -> None:
    joint = joint_of()
    plan = remat.plan(joint, remat.Peak(0.5), chunk=4)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    for again in (remat.plan(joint, plan=path), remat.plan(joint, plan=path, chunk=4)):
        assert (again.chunk, again.peak_bytes) == (plan.chunk, plan.peak_bytes)
        assert again.saved == plan.saved
    with pytest.raises(PlanError, match=r"was made with chunk-loss.chunks=4., and chunk-loss"):
        remat.plan(joint, plan=path, chunk=8)


@pytest.mark.parametrize("given", [0, -1, "many", 2.0, True])
def test_what_is_no_number_of_chunks_is_refused(given: Any) -> None:
    with pytest.raises(ProblemError, match="expected a number of chunks, such as 8, or 'auto'"):
        remat.plan(joint_of(), chunk=given)


def test_a_request_as_text() -> None:
    for chunk in (8, "auto"):
        request = PlanRequest.of(budget=remat.Peak(0.5), chunk=chunk)
        assert PlanRequest.of(**request.to_options()) == request
    assert [r.chunks for r in request.each_chunk()] == [1, 2, 4, 8, 16]
    assert remat.plan(joint_of(), chunk=1).saved == remat.plan(joint_of()).saved
    assert remat.plan(joint_of(), chunk="1").chunk == ""


def test_auto_takes_the_cheapest_number_within_the_peak() -> None:
    joint = joint_of("eager")
    whole = remat.plan(joint, remat.Peak(1.0), chunk="auto")
    assert whole.chunk == ""  # without chunks, a step is cheapest
    least = remat.plan(joint, remat.Peak(0.0), chunk="auto")
    assert least.peak_bytes <= min(
        remat.plan(joint, remat.Peak(0.0), chunk=n).peak_bytes for n in (4, 16)
    )
    limit = (least.peak_bytes + whole.peak_bytes) // 2
    chosen = remat.plan(joint, limit, chunk="auto")
    assert chosen.peak_bytes <= limit
    cost = chosen.step_cost + chosen.recompute_cost
    for n in (1, 2, 4, 8, 16):
        try:
            one = remat.plan(joint, limit, chunk=n)
        except BudgetError:
            continue
        assert cost <= one.step_cost + one.recompute_cost
    # A ratio counts from the least peak of all numbers of chunks to the peak of the step without chunks.
    half = remat.plan(joint, remat.Peak(0.5), chunk="auto")
    assert half.peak_limit == least.peak_bytes + -(-(whole.peak_bytes - least.peak_bytes) // 2)
    with pytest.raises(BudgetError, match=f"is .*{least.peak_bytes} bytes"):
        remat.plan(joint, 100_000, chunk="auto")


def test_auto_leaves_a_loss_whole_that_cannot_be_split() -> None:
    joint = joint_of(returns=True)
    with pytest.warns(BudgetWarning, match="planned without chunks: .* are an output of the step"):
        plan = remat.plan(joint, remat.Peak(0.5), chunk="auto")
    assert plan.chunk == ""
    with pytest.raises(PlanError, match="are an output of the step"):
        remat.plan(joint, remat.Peak(0.5), chunk=8)


def test_where_auto_is_refused() -> None:
    with pytest.raises(ProblemError, match=r"chunk='auto' is given with budget .*on the peak"):
        remat.plan(joint_of(), 0.5, chunk="auto")
    with pytest.raises(ProblemError, match="frontier does not choose a number of chunks"):
        remat.frontier(joint_of(), chunk="auto", by="peak")
    with pytest.raises(ProblemError, match="compare does not choose a number of chunks"):
        remat.compare(joint_of(), "greedy", remat.Peak(0.5), chunk="auto")
    with pytest.raises(ProblemError, match="got several graphs"):
        remat.plan([joint_of()], remat.Peak(0.5), chunk=8)


def test_frontier_and_compare_of_a_split_step() -> None:
    joint = joint_of("eager")
    whole = remat.frontier(joint, by="peak").points
    parts = remat.frontier(joint, by="peak", chunk=8).points
    assert min(p.peak_bytes for p in parts) < min(p.peak_bytes for p in whole)
    (row,) = remat.compare(joint, "greedy", remat.Peak(1.0), chunk=8).rows
    assert row.peak_bytes is not None
    assert row.peak_bytes < max(p.peak_bytes for p in whole)


def test_fit_with_chunks() -> None:
    def call(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs(64 * batch)

    options: dict[str, Any] = {"memory": 3_000_000, "optimizer": "sgd", "lower": "eager"}
    (whole,) = remat.fit(Toy(), call, batches=4, **options).rows
    fit = remat.fit(Toy(), call, batches=4, chunk="auto", **options)
    (row,) = fit.rows
    assert not whole.fits
    assert row.fits
    assert row.chunks > 1
    assert row.peak_bytes <= 3_000_000
    assert f'"chunk": {row.chunks}' in fit.code_for(row)


def test_both_forms_are_priced() -> None:
    """Where gradients are computed in forward, the planner may run the chunks in backward instead."""
    request = PlanRequest.of(budget=remat.Peak(0.0), chunk=ChunkLoss(chunks=16))
    planner = Planner.of(joint_of(), request)
    assert planner.search.decisions.at_budget_one.cost == 0
    late = remat.plan(joint_of(), remat.Peak(0.0), chunk=ChunkLoss(chunks=16, in_forward=False))
    both = (
        planner.search.measures.simulated(planner.search.decisions.at_budget_one),
        late.peak_bytes,
    )
    assert planner.search.measures.simulated(planner.search.least_peak) <= min(both)


def gradients(model: nn.Module, call: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = call(x, y)
    (0.3 * loss).backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("chunk", [4, "auto"])
def test_gradients_of_a_compiled_step(chunk: int | str) -> None:
    torch.manual_seed(0)
    model, (x, y) = Toy(), inputs(250)
    y[:9] = -100
    torch._dynamo.reset()
    backend = remat.backend(remat.Peak(0.2), chunk=chunk, lower="eager")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        found = gradients(model, torch.compile(model, backend=backend), x, y)
    assert remat.plans()[-1].chunk
    assert_near(found, gradients(model, model, x, y))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_code_of_inductor_holds_one_chunk_at_a_time() -> None:
    """Measured by the allocator: kernels of different chunks are not fused."""
    torch.manual_seed(0)
    model, (x, y) = Toy(), inputs(1024)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=remat.backend(chunk=3))
    assert_near(gradients(model, compiled, x, y), gradients(model, model, x, y))
    measured = measure_step(compiled, (x, y), by="allocator").peak_bytes
    plan = remat.plans()[-1]
    assert abs(plan.peak_bytes - measured) <= 0.05 * measured
    assert measured <= 0.7 * plan.without_peak_bytes
