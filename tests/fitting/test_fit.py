"""Whole steps: what is predicted is what training takes, and what does not fit is refused."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import BudgetError, ProblemError, RematError
from remat.fitting.fit import _by_speed, read_batches, read_memory, rows_up_to_most
from remat.fitting.table import FitRow
from remat.graph.costs import Roofline
from tests.fitting.fit_cells import cells


def test_the_predicted_peak_is_what_training_allocates() -> None:
    """At budget 1 and within less: as the profiler saw every allocation of the third step."""
    small = ("n_embd=128", "n_layer=1", "n_head=4", "vocab_size=500")
    found = cells("gpt2", small, "adamw", seq=64, tight=0.95)
    assert [c["budget"] == "1" for c in found] == [True, False]
    for cell in found:
        assert abs(cell["off"]) < 0.03, cell
        assert cell["predicted"] <= cell["memory"]


def mlp(width: int = 64, depth: int = 4) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Tanh()) for _ in range(depth)]
    with torch.device("meta"):
        return nn.Sequential(*layers).to("meta")


def rows_at(batch: int) -> tuple[torch.Tensor]:
    return (torch.empty(batch, 64, device="meta"),)


def fitted(model: nn.Module | None = None, **options: Any) -> remat.Fit:
    model = mlp() if model is None else model
    return remat.fit(model, rows_at, lower="eager", cost="roofline:cpu", **options)


def test_the_parts_are_those_of_the_model() -> None:
    fit = fitted(memory="1GiB", batches=(4, 2, 2))
    own = sum(p.nbytes for p in mlp().parameters())
    assert (fit.parameter_bytes, fit.gradient_bytes) == (own, own)
    assert fit.state_bytes == 2 * own + 4 * 8
    assert [row.batch for row in fit.rows] == [2, 4]
    assert all(row.fits and row.budget == "1" for row in fit.rows)
    assert fit.rows[0].peak_bytes >= 4 * own


@cache
def tight() -> remat.Fit:
    """Of two batches the first fits, with recomputing."""
    return fitted(memory=11_000_000, batches=(4096, 1 << 16), optimizer="sgd")


def test_on_a_gpu_the_step_of_the_optimizer_takes_a_copy_of_the_parameters() -> None:
    fit = remat.fit(mlp(), rows_at, memory="1GiB", batches=1, lower="eager", cost="roofline:h100")
    assert fit.optimizer_bytes == fit.parameter_bytes
    other = replace(fit, rows=())
    assert other.largest_batch is None
    assert other.code == ""


def test_less_memory_takes_a_lower_budget_and_more_time() -> None:
    whole = fitted(memory="1GiB", batches=4096, optimizer="sgd").rows[0]
    less, none = tight().rows
    assert whole.budget == "1"
    assert (less.budget or "").startswith("peak:")
    assert less.peak_bytes <= 11_000_000 < min(whole.peak_bytes, none.peak_bytes)
    assert (less.recompute_s or 0) > (whole.recompute_s or 0)
    data = json.loads(tight().to_json())
    assert data["largest_batch"] == data["best_batch"] == 4096
    for row, given in zip(tight().rows, data["rows"], strict=True):
        for name in ("batch", "budget", "peak_bytes", "step_s", "fits", "reason"):
            assert given[name] == getattr(row, name)
    assert (less.fits, none.fits, none.budget) == (True, False, None)
    assert none.reason


def test_the_largest_batch_is_the_one_above_which_none_fits() -> None:
    small = partial(fitted, mlp(depth=1), memory="96KiB", optimizer="sgd")
    fit = small()
    largest = fit.largest_batch
    assert largest is not None
    fits = {row.batch: row.fits for row in fit.rows}
    assert fits == {b: b <= largest for b in fits}
    above = min(b for b in fits if not fits[b])
    assert above - largest <= max(1, largest // 50)
    assert not small(batches=above).rows[0].fits


def test_the_best_batch_has_the_most_samples_per_second() -> None:
    fit = fitted(memory="1GiB", batches=(1, 64, 512))
    rates = {row.batch: row.samples_per_s or 0 for row in fit.rows}
    assert fit.best_batch == max(rates, key=lambda b: rates[b])
    for row in fit.rows:
        assert row.samples_per_s == pytest.approx(row.batch / (row.step_s or 0))


def test_the_line_to_paste_is_run() -> None:
    torch._dynamo.reset()
    made = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    space: dict[str, Any] = {"torch": torch, "remat": remat, "model": made}
    exec(tight().code, space)
    space["model"](torch.randn(4, 64)).sum().backward()
    assert remat.plans()[-1].budget == tight().rows[0].budget
    assert all(line in str(tight()) for line in tight().code.splitlines())


def test_the_line_to_paste_names_the_cost_model_that_was_asked_for() -> None:
    assert '"cost": "roofline:cpu"' in fitted(memory="1GiB", batches=2).code
    usual = remat.fit(mlp(), rows_at, memory="1GiB", batches=2)
    assert usual.asked_cost == ""
    assert "cost" not in usual.code


def test_summed_gradients_lie_beside_forward_and_backward() -> None:
    once, four = (fitted(memory="1GiB", batches=64, optimizer="sgd", accumulate=n) for n in (1, 4))
    (one,), (more,) = once.rows, four.rows
    assert more.peak_bytes - one.peak_bytes == once.gradient_bytes
    assert more.step_s == pytest.approx(4 * (one.step_s or 0), rel=0.2)
    assert (more.samples_per_s or 0) >= (one.samples_per_s or 0)


def test_the_lines_to_paste_train_by_micro_batches() -> None:
    torch._dynamo.reset()
    fit = fitted(memory="1GiB", batches=4, optimizer="sgd:lr=0.5", accumulate=2)
    model = nn.Linear(64, 64)
    space: dict[str, Any] = {"torch": torch, "remat": remat, "model": model}
    exec(fit.code, space)
    assert fit.code.splitlines()[1] == "optimizer = torch.optim.SGD(model.parameters(), lr=0.5)"
    before, batches = model.weight.detach().clone(), torch.randn(2, 4, 64)
    gradients = torch.autograd.grad(sum(model(b).mean() for b in batches), model.weight)
    space["train_step"](batches, lambda model, batch: model(batch).mean())
    torch.testing.assert_close(before - model.weight, 0.25 * gradients[0])
    of_class = fitted(memory="1GiB", batches=2, optimizer=torch.optim.SGD, accumulate=2)
    assert "def train_step(" in of_class.code
    assert "optimizer = " not in of_class.code


def test_a_margin_stays_free() -> None:
    half = fitted(memory=22_000_000, margin="50%", batches=4096, optimizer="sgd")
    assert half.rows == tight().rows[:1]
    assert "of which 50 % stays free" in str(half)
    with pytest.raises(BudgetError, match="more than the 64 KiB that a step may take"):
        fitted(memory="128KiB", margin=0.5, batches=1)
    row = fitted(memory="256KiB", margin=0.25, batches=1).rows[0]
    assert "more than they may;" in row.reason


def test_a_batch_that_exceeds_the_memory_of_the_host_does_not_end_the_search() -> None:
    offload: dict[str, Any] = {"policies": {"0": "offload"}, "host_memory": 4000}
    fit = fitted(mlp(depth=2), memory="1MiB", optimizer="sgd", **offload)
    assert fit.largest_batch is not None
    above = next(row for row in fit.rows if not row.fits)
    assert above.batch == fit.largest_batch + 1
    assert above.reason.startswith("host_memory is 3.91 KiB")
    assert f": {above.reason}" in str(fit)


def test_a_batch_does_not_fit_only_if_it_does_not_for_any_number_of_chunks() -> None:
    row = FitRow(batch=1, fits=False, budget=None, peak_bytes=10, proven=True)
    fits = replace(row, fits=True, samples_per_s=1.0, chunks=4)
    found = replace(row, proven=False, peak_bytes=12, chunks=2)
    assert min([(row, ()), (found, ())], key=_by_speed)[0] is found
    assert min([(row, ()), (found, ()), (fits, ())], key=_by_speed)[0] is fits


def test_lines_for_the_largest_batch_are_printed_if_it_needs_other_options() -> None:
    fit = fitted(memory="1GiB", batches=(2, 4), optimizer="sgd")
    first, last = fit.rows
    rows = replace(first, samples_per_s=9e9), replace(last, chunks=4)
    assert '"chunk": 4' in str(replace(fit, rows=rows)).splitlines()[-1]


@pytest.mark.parametrize(
    "args",
    [
        (torch.empty(3, 64, device="meta"),),
        lambda batch: torch.empty(batch, 64, device="meta"),
        lambda batch: {"input": torch.empty(batch, 64, device="meta")},
        lambda batch: ((), {"input": torch.empty(batch, 64, device="meta")}),
    ],
)
def test_the_arguments_of_a_batch_come_in_several_ways(args: Any) -> None:
    ways = remat.fit(mlp(), args, memory="1GiB", batches=(2, 8), lower="eager", cost="roofline:cpu")
    assert ways.rows[1].peak_bytes == fitted(memory="1GiB", batches=8).rows[0].peak_bytes


def test_buffers_are_alive_throughout_the_step() -> None:
    model = mlp()
    model.register_buffer("table", torch.empty(1 << 20, device="meta"))
    plain, more = (fitted(m, memory="1GiB", batches=4).rows[0] for m in (mlp(), model))
    assert more.peak_bytes == plain.peak_bytes + (4 << 20)


def test_frozen_and_unused_parameters_have_no_gradient_and_no_state() -> None:
    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), nn.Linear(64, 1000, device="meta")
            self.used[0].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    fit = fitted(Used(), memory="1GiB", batches=1)
    trained = 3 * 4 * (64 * 64 + 64)
    assert fit.gradient_bytes == trained
    assert fit.state_bytes == 2 * trained + 4 * 6
    assert fit.parameter_bytes == trained * 4 // 3 + 4 * (64 * 1000 + 1000)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"memory": "80"}, BudgetError, "did you mean '80GiB'"),
        ({"memory": 80}, BudgetError, "did you mean '80GiB'"),
        ({"memory": "much"}, BudgetError, "such as '80GiB'"),
        ({"memory": 0.5}, BudgetError, "such as '80GiB'"),
        ({"batches": 0}, ProblemError, "batch is 0; expected whole numbers of 1 or more"),
        ({"batches": (1, -2)}, ProblemError, "batch is -2"),
        ({"batches": ()}, ProblemError, "batches is empty"),
        ({"batches": "all"}, ProblemError, "batch is 'all'"),
        ({"margin": "100%"}, ProblemError, "margin is '100%'; expected the part"),
        ({"margin": "much"}, ProblemError, "margin is 'much'"),
        ({"margin": -0.1}, ProblemError, "margin is -0.1"),
        ({"accumulate": 0}, ProblemError, "accumulate is 0; expected the number of micro-batches"),
        ({"ranks": 0}, ProblemError, "ranks is 0"),
        ({"fsdp": True}, ProblemError, "ranks is 1; say ranks=8"),
        ({"link_gbps": 0}, ProblemError, "expected GB/s above 0"),
        ({"cost": "flops"}, ProblemError, "counts FLOP, no time"),
        ({"optimizer": "lbfgs"}, ProblemError, "cannot be traced"),
        ({"kwargs": {}}, ProblemError, "let it return (args, kwargs)"),
        ({"args": ()}, ProblemError, "give a callable"),
        ({"model": nn.ReLU()}, ProblemError, "'ReLU' has no parameters"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    given: dict[str, Any], error: type[RematError], says: str
) -> None:
    with pytest.raises(error) as caught:
        remat.fit(**{"model": mlp(), "args": rows_at, "memory": "1GiB", **given})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_larger_than_the_memory_are_told_with_what_would_do() -> None:
    big = nn.ModuleList(nn.Linear(1024, 1024, device="meta") for _ in range(64))
    with pytest.raises(BudgetError) as caught:
        remat.fit(big, rows_at, memory="200MiB")
    message = str(caught.value)
    assert (
        "alone take 256 MiB on a rank, 56.2 MiB more than the 200 MiB that a step may take"
        in message
    )
    ranks = int(message.partition("share them among ")[2].split()[0])
    whole = sum(p.nbytes for p in big.parameters())
    assert 5 * whole / ranks < 200 << 20  # with gradients, state, and a copy while it steps


def test_batches_are_doubled_and_then_bisected() -> None:
    def looked_at(largest: int, width: int = 1) -> list[int]:
        seen: list[int] = []

        def ask(batches: Any, others: Any) -> Any:
            seen.extend(batches)
            return {
                b: (FitRow(batch=b, fits=b <= largest, budget=None, peak_bytes=b), ())
                for b in batches
            }

        rows = rows_up_to_most(ask, width)
        assert [b for b in rows if b <= largest] == [b for b in rows if rows[b].fits]
        return seen

    assert looked_at(0) == [1]
    assert looked_at(5) == [1, 2, 4, 8, 6, 5]
    assert looked_at(5, width=3) == [1, 2, 4, 8, 16, 32, 6, 5]
    assert looked_at(48)[-1] in (48, 49)
    assert len(looked_at(3000)) < 20
    assert read_batches([4, 1, 4]) == (1, 4)
    assert read_memory("80GiB") == 80 << 30
    assert read_memory("80 GB") == 80 * 10**9


def fit_wide(**options: Any) -> remat.Fit:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
        )
    options = {"optimizer": "sgd", "cost": "roofline:h100", **options}
    return remat.fit(model, of_sixteen, **options)


def of_sixteen(batch: int) -> tuple[torch.Tensor]:
    return (torch.empty(batch, 16, device="meta"),)


def test_the_largest_batch_never_falls_with_more_memory() -> None:
    """Searches that are aimed at a memory find a plan here and none there; what fits is not asked of them."""
    fit = partial(fit_wide, lower="eager")
    memories = 70_000, 80_000
    largest = [fit(memory=m).largest_batch or 0 for m in memories]
    assert largest == sorted(largest)
    assert largest[0] > 0
    below = fit(memory=memories[0], batches=(largest[0] - 1, largest[0]))
    assert all(row.fits for row in below.rows), "asked by itself, too"
    assert all(row.recomputing is not None and row.recomputing > 0 for row in below.rows)


def test_what_does_not_fit_is_proven_or_only_not_found() -> None:
    """Proven is what operators of an eager graph have alive at once, and what the optimizer's step takes."""
    eager = fit_wide(memory=500_000, batches=1024, lower="eager")
    assert eager.rows[0].proven
    assert "does not fit" in str(eager)
    assert "that any plan can have" in eager.rows[0].reason
    fused = fit_wide(memory=500_000, batches=900)
    assert (fused.rows[0].fits, fused.rows[0].proven) == (False, False)
    assert "that there is none is not proven" in str(fused)
    assert "that was found" in fused.rows[0].reason


def test_processes_answer_what_this_one_does(pool: ProcessPoolExecutor) -> None:
    fit = partial(fit_wide, memory="56kB", lower="eager")
    assert fit(executor=pool) == fit()
    assert fit(executor=pool, batches=(4, 500)) == fit(batches=(4, 500))
    with pytest.raises(ProblemError, match=r"cost model .* cannot be sent to an executor"):
        fit(executor=2, cost=Roofline())
