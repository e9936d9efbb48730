"""Real training steps under Inductor: remat against PyTorch's partitioner, by a stopwatch.

PyTorch's partitioner gets a budget; the bytes that it then hands from forward to backward are counted on the captured graph. Beside it run, each on a copy
of the model:

- ``pytorch again``: the same once more; its ratio is the spread of the measurement;
- ``remat``: remat, with exactly as many saved bytes as its budget;
- ``remat peak``: remat, with PyTorch's own measured peak as a `remat.Peak` budget.

All variants live in one process and train on the same batches in turn, one step each per round, the first of a round being
another one every time. The losses of all must agree at every step. Times are medians over the rounds; a ratio is the median
of the ratios within rounds. The peak is that of forward and backward, parameters and inputs included, from the profiler's
record of every allocation.

The time of recomputing is predicted by several cost models, calibrated for this machine, and measured as the time beyond the
step of the same partitioner at budget 1. The allocator keeps freed memory, since page faults cost as much as recomputing.

On a machine that does other work too, OMP_WAIT_POLICY=passive in the environment keeps waiting threads off the cores.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import torch
from scipy.stats import spearmanr
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch

import remat
from benchmarks.experiment import KEPT_MEMORY, Case, Experiment, Row, grid
from benchmarks.torch_partitioner import Split, partition, run_twice
from benchmarks.workloads import STEPS, WITHOUT_BUDGET, Batch, Workload
from remat.graph.joint import JointGraph
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry
from remat.running.measure import measure_step

#: All models that are timed.
WORK = {**STEPS, **WITHOUT_BUDGET}
#: The cost models that predict.
COSTS = ("roofline-fused:cpu", "profile:cpu")
#: Largest relative difference of a loss from the reference's.
LIMIT = 1e-3
#: Steps of which losses are compared: training doubles their differences every few steps.
COMPARED = 22
SIDES = ("pytorch", "pytorch again", "remat", "remat peak")
#: Standard error of the median of normally distributed numbers, for the distance of their quartiles and one number.
OF_MEDIANS = 1.2533 / 1.349


@dataclass(slots=True, kw_only=True)
class Variant:
    """One way to run the step, with its own copy of the model.

    Attributes:
        case: its budget and side.
        model: the copy.
        step: the copy, or the copy compiled.
        saved_bytes: bytes that forward hands to backward; None for eager.
        predicted_ps: by cost model, the cost of the operators that run in forward and again in backward.
        losses: by step.
        step_ms: milliseconds of each step: forward, backward and optimizer.
        peak_bytes: of each measurement.
    """

    case: Case
    model: nn.Module
    step: Callable[..., torch.Tensor]
    saved_bytes: int | None = None
    predicted_ps: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


def prices_of(joint: JointGraph) -> dict[str, dict[str, int]]:
    """The costs of the operators that forward needs, by cost model and name: one measure for every decision."""
    state = prepare(joint)
    prices = {}
    for cost in COSTS:
        problem = state.lowered(registry().cost_model(cost)).problem
        nodes = zip(problem.names, problem.cost, problem.in_forward, strict=True)
        prices[cost] = {name: price for name, price, needed in nodes if needed}
    return prices


def variants(name: str, budgets: Sequence[float]) -> list[Variant]:
    """Compiles everything that is compared, by one step each that leaves the weights as they were."""
    work = WORK[name]
    original = work.build()
    batch = work.batches(1)[0]
    made: list[Variant] = []

    def add(side: str, budget: float | None, **how: Any) -> Variant:
        model = copy.deepcopy(original)
        step: Any = torch.compile(model, **how) if how else model
        case = Case(workload=name, budget=budget, side=side)
        variant = Variant(case=case, model=model, step=step)
        step(**batch).backward()
        model.load_state_dict(original.state_dict())
        model.zero_grad(set_to_none=True)
        made.append(variant)
        return variant

    def recompute(variant: Variant, saved_bytes: int, twice: Sequence[str]) -> None:
        variant.saved_bytes = saved_bytes
        for cost, table in prices.items():
            variant.predicted_ps[cost] = sum(table.get(name, 0) for name in twice)

    def ours(side: str, budget: float, asked: Any) -> None:
        known = len(remat.plans())
        # An option that no other variant has, else Dynamo takes a step that it has compiled for another one.
        options = {"budget": asked, "rank_wait_s": 30 + len(made) / 1000}
        try:
            variant = add(side, budget, backend="remat", options=options)
        except Exception as error:  # Dynamo's, around ours: no plan is within that peak
            print(f"{name}: {side} at {budget}: {error}", flush=True)
            return
        (plan,) = remat.plans()[known:]
        recompute(variant, plan.saved_bytes, run_twice((plan.forward, plan.backward)))

    joint = remat.capture(copy.deepcopy(original), (), batch)
    prices = prices_of(joint) if budgets else {}
    add("eager", None)
    for budget in (1.0, *budgets):
        theirs = Split.of(joint, partition(joint.copy(), budget))
        for side in SIDES[:2]:
            # An option that no other variant has, as below; it is of a tuner that is off.
            options = {"autotune_num_choices_displayed": 10 + len(made)}
            with functorch.patch(activation_memory_budget=budget):
                variant = add(side, budget, options=options)
            recompute(variant, theirs.saved_bytes, theirs.twice)
        ours("remat", budget, remat.Saved(theirs.saved_bytes) if budget < 1 else 1.0)
        if budget < 1:
            ours("remat peak", budget, remat.Peak(peak_of(variant, batch)))
    return made


def peak_of(variant: Variant, batch: Batch) -> int:
    return measure_step(variant.step, kwargs=batch, by="allocator").peak_bytes


def train(made: Sequence[Variant], work: Workload, steps: int) -> None:
    """Trains every variant by the same batches, one step in turn; two steps before are not counted."""
    optimizers = [torch.optim.SGD(v.model.parameters(), lr=work.rate) for v in made]
    for at, batch in enumerate(work.batches(steps + 2)):
        for turn in range(len(made)):
            i = (turn + at) % len(made)
            torch.manual_seed(at)
            start = time.perf_counter()
            loss = made[i].step(**batch)
            loss.backward()
            optimizers[i].step()
            seconds = time.perf_counter() - start
            optimizers[i].zero_grad(set_to_none=True)
            made[i].losses.append(float(loss.detach()))
            if at >= 2:
                made[i].step_ms.append(1e3 * seconds)


def measure(name: str, cases: Sequence[Case], quick: bool, steps: int = 20) -> Iterator[Row]:
    """Each variant is a compilation of the same code; Dynamo gives up after eight by default."""
    # Operators are timed anew for the cost model ``profile``, whatever is known from before.
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", REMAT_CACHE=folder),
        torch._dynamo.config.patch(recompile_limit=64),
        functorch.patch(enable_autograd_cache=False),
    ):
        yield from timed_steps(name, cases, 5 if quick else steps)


def timed_steps(name: str, cases: Sequence[Case], steps: int) -> Iterator[Row]:
    work, start = WORK[name], time.perf_counter()
    made = variants(name, [b for b in dict.fromkeys(case.budget for case in cases) if b < 1])
    batch, compiled = work.batches(1)[0], counters["stats"]["unique_graphs"]
    train(made, work, steps)
    for _ in range(3):
        for v in made:
            v.peak_bytes.append(peak_of(v, batch))
    if counters["stats"]["unique_graphs"] != compiled:
        raise SystemExit("a step was compiled again: TORCH_LOGS=recompiles says why")
    yield Case(workload=name, side="model").row(
        about=work.about,
        parameters=sum(p.numel() for p in made[0].model.parameters()),
        steps=steps,
        largest_loss_difference=loss_difference(made, draws=work.draws),
        loss_difference_allowed=LIMIT,
        costs={cost: registry().cost_model(cost).key() for cost in COSTS},
        elapsed_s=round(time.perf_counter() - start, 1),
    )
    yield from rows_of_variants(made)


def loss_difference(made: Sequence[Variant], *, draws: bool) -> float:
    """The largest relative difference of any of the first `COMPARED` losses from eager PyTorch's at the same step.

    Of a model that draws random numbers: of any compiled step's from that of PyTorch's partitioner at budget 1.
    """
    made = made[draws:]
    reference = made[0].losses
    pairs = [pair for v in made for pair in list(zip(v.losses, reference, strict=True))[:COMPARED]]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(q, 3) for q in statistics.quantiles(values, n=4, method="inclusive")]


def rows_of_variants(made: Sequence[Variant]) -> Iterator[Row]:
    by_case = {(v.case.side, v.case.budget): v for v in made}
    for v in made:
        other = by_case["pytorch", v.case.budget or 1.0]
        own = by_case["pytorch" if v.case.side.startswith("pytorch") else "remat", 1.0]
        ratios = [a / b for a, b in zip(v.step_ms, other.step_ms, strict=True)]
        added = [a - b for a, b in zip(v.step_ms, own.step_ms, strict=True)]
        peak = statistics.median(v.peak_bytes)
        yield v.case.row(
            saved_bytes=v.saved_bytes,
            step_ms=quartiles(v.step_ms),
            to_pytorch=quartiles(ratios),
            added_to_own_ms=quartiles(added),
            peak_bytes=peak,
            peak_to_pytorch=round(peak / statistics.median(other.peak_bytes), 4),
            predicted_recompute_ms={k: round(p / 1e9, 4) for k, p in v.predicted_ps.items()},
        )


def summarise(rows: list[Row]) -> Row:
    """The totals over all models.

    ``predicted`` is by each cost model, of the operators recomputed beyond those that the same side recomputes at budget 1: the
    rank correlation with the time that was measured beyond that step, the one that exact predictions would have under the noise
    of these medians, the sum of all predicted over the sum of all measured, and the root mean square of their differences as
    fractions of the step; of the plans that remat compiled, and of all.
    """
    by_case = {(r["workload"], r["side"], r["budget"]): r for r in rows}
    points: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    squares: dict[tuple[str, str], list[float]] = {}
    for (name, side, budget), row in by_case.items():
        if budget in (None, 1):
            continue
        own = by_case[name, "pytorch" if side.startswith("pytorch") else "remat", 1.0]
        steps = by_case[name, "model", None]["steps"]
        low, middle, high = row["added_to_own_ms"]
        noise = OF_MEDIANS * (high - low) / steps**0.5
        for model, predicted in row["predicted_recompute_ms"].items():
            ms = predicted - own["predicted_recompute_ms"][model]
            for whose in ("remat", "all"):
                if whose == "all" or side.startswith(whose):
                    key = whose, model.partition(":")[0]
                    points.setdefault(key, []).append((ms, middle, noise))
                    squares.setdefault(key, []).append(((ms - middle) / own["step_ms"][1]) ** 2)
    apart = (
        row["workload"]
        for row in rows
        if row["side"] == "model"
        and not row["largest_loss_difference"] <= row["loss_difference_allowed"]
    )
    return {
        "predicted": {
            f"{whose}, {model}": {
                "plans": len(pairs),
                "spearman": rank_correlation([a for a, *_ in pairs], [b for _, b, _ in pairs]),
                "spearman_if_exact": if_exact(pairs),
                "predicted_to_measured": round(
                    sum(a for a, *_ in pairs) / sum(b for _, b, _ in pairs), 4
                ),
                "error_of_step": round(statistics.fmean(squares[whose, model]) ** 0.5, 4),
            }
            for (whose, model), pairs in sorted(points.items(), reverse=True)
        },
        "losses_apart": list(apart),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    return round(float(spearmanr(a, b).statistic), 4)


def if_exact(pairs: Sequence[tuple[float, float, float]], draws: int = 500) -> float:
    """The rank correlation that predictions have with themselves, measured with the noise of each median."""
    random = Random(0)
    exact = [a for a, *_ in pairs]
    found = [
        rank_correlation(exact, [random.gauss(a, noise) for a, _, noise in pairs])
        for _ in range(draws)
    ]
    return round(statistics.mean(found), 4)


EXPERIMENTS = {
    "step": Experiment(
        about="measured training steps under Inductor, beside PyTorch's partitioner",
        cases=grid(STEPS, (0.4, 0.2), SIDES),
        quick=grid(("wide",), (0.4,), SIDES),
        measure=measure,
        summarise=summarise,
        tables=("step", "predictions"),
        missed=lambda summary: [f"losses of {name} are apart" for name in summary["losses_apart"]],
        environment=KEPT_MEMORY,
    ),
}
