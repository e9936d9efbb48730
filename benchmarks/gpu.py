"""remat on a device, in one command and ten minutes: ``python -m benchmarks.gpu``. It writes one JSON file.

It needs a CUDA device with 40 GiB of free memory, a CUDA build of PyTorch 2.13 or later with Triton, `transformers`, and a C++
compiler; nothing is fetched. On another machine, ``--device cpu`` walks the same code with small models: peaks are then those of the
profiler's record of allocations, copies stay in the host's memory, and nothing overlaps.

Measured, for six models in bfloat16, as far as the time reaches; the rest is listed as left out:

- ``step``: peaks (``max_memory_allocated``) against the plan's, step time, and gradients. PyTorch's partitioner at budget 1, and
  at a lower budget; remat with the measured peak of the latter as its `remat.Peak`.
- ``costs``: how cost models rank operators: Spearman's correlation with their times on this device, by the model ``profile``.
- ``offload``: a plan that offloads over the link as it was measured, eager lowering, beside the plan at budget 1: peak against the
  plan's, step time, and gradients, which must be bit-equal.
- ``link``: first of all, rates of copies to the host and back; and a product and copies at once, beside each alone.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from scipy.stats import spearmanr

import remat
from benchmarks import run
from benchmarks.experiment import Case, Experiment, Row, grid
from benchmarks.figures import geometric_mean
from benchmarks.workloads import LARGE, STEPS, Workload
from remat.graph.costs.measure import describe_device, free_bytes
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry
from remat.running.measure import measure_step
from tests.models import Outcome, Step

NEEDED_BYTES = 40 * 2**30
MINUTES = 10
#: The lower budget of PyTorch's partitioner.
BUDGET = 0.4
#: Relative distance of gradients between two compiled steps in bfloat16 or float32, over all parameters.
LIMIT = {"cuda": 5e-2, "cpu": 1e-3}
COSTS = ("roofline", "roofline-fused")
#: Each part, and the share of the time after which it begins no further model.
PARTS = {"step": 0.7, "costs": 0.85, "offload": 1.0}


class Bench:
    """A device and how to measure on it."""

    def __init__(self, device: str) -> None:
        self.device, self.began = device, time.monotonic()
        self.on_gpu = device == "cuda"
        self.repeats = 20 if self.on_gpu else 3
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.models = LARGE if self.on_gpu else STEPS

    def milliseconds(self, call: Callable[[], object]) -> float:
        """The median time of a call, until the device is done."""
        wait = torch.cuda.synchronize if self.on_gpu else lambda: None
        found = []
        for _ in range(self.repeats):
            wait()
            start = time.perf_counter()
            call()
            wait()
            found.append(1e3 * (time.perf_counter() - start))
        return round(statistics.median(found), 4)

    def step(self, work: Workload) -> Step:
        (batch,) = work.batches(1, self.device, self.dtype)
        model = work.build(self.device, self.dtype)
        return Step(model=model, kwargs=batch, loss=lambda loss: loss)

    def variant(self, step: Step, backend: str, options: Row) -> tuple[Row, Outcome]:
        """Compiles the step, and measures its time, its peak and its gradients."""
        torch.compiler.reset()
        start = time.perf_counter()
        compiled: Any = torch.compile(step.model, backend=backend, options=options)
        outcome = step.train(compiled)
        compile_s = time.perf_counter() - start

        def once() -> None:
            compiled(**step.kwargs).backward()
            step.model.zero_grad(set_to_none=True)

        once()
        step_ms = self.milliseconds(once)
        measured = measure_step(
            compiled, kwargs=step.kwargs, resident=step.model.parameters(), by="allocator"
        )
        found = {"compile_s": round(compile_s, 1), "step_ms": step_ms}
        return {**found, "peak_bytes": measured.peak_bytes}, outcome

    def plan(self, step: Step, options: Row) -> tuple[Row, Outcome]:
        """A variant of remat's, with the figures of its plan."""
        known = len(remat.plans())
        found, outcome = self.variant(step, "remat", options)
        (plan, *more) = remat.plans()[known:]
        assert not more, "the step has several graphs"
        names = ("saved_bytes", "host_bytes", "recompute_cost", "exposed_time", "unit", "solve_s")
        figures = {
            "plan_peak_bytes": plan.peak_bytes,
            "plan_off": round(plan.peak_bytes / found["peak_bytes"] - 1, 5),
            "expected_peak_bytes": plan.predicted_peak_bytes,
            **{name: getattr(plan, name) for name in names},
        }
        return found | figures, outcome

    def steps(self, name: str, work: Workload) -> Iterator[Row]:
        """PyTorch's partitioner at two budgets, and remat at the peak of the lower one."""
        from torch._functorch import config

        step = self.step(work)
        parameters = sum(p.numel() for p in step.model.parameters())
        yield Case(workload=name, side="model").row(
            about=work.about, parameters=parameters, dtype=str(self.dtype)
        )
        theirs: dict[float, Row] = {}
        reference: Outcome | None = None
        for budget in (1.0, BUDGET):
            with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
                theirs[budget], outcome = self.variant(step, "inductor", {})
            reference = reference or outcome
            yield Case(workload=name, budget=budget, side="pytorch").row(
                **theirs[budget],
                gradients_off=outcome.gradient_distance(reference),
                added_ms=theirs[budget]["step_ms"] - theirs[1.0]["step_ms"],
            )
        peak_bytes, own_ms = theirs[BUDGET]["peak_bytes"], None
        for budget, asked in ((1.0, 1.0), (BUDGET, remat.Peak(peak_bytes))):
            ours, outcome = self.plan(step, {"budget": asked})
            own_ms = own_ms or ours["step_ms"]
            off = outcome.gradient_distance(reference)
            yield Case(workload=name, budget=budget, side="remat").row(
                **ours,
                gradients_off=off,
                gradients_agree=off <= LIMIT[self.device],
                asked_bytes=peak_bytes,
                added_ms=ours["step_ms"] - own_ms,
                to_pytorch=ours["step_ms"] / theirs[budget]["step_ms"],
            )

    def costs(self, name: str, work: Workload) -> Iterator[Row]:
        """How each cost model ranks the operators of a step, against their times on this device."""
        step = self.step(work)
        state = prepare(remat.capture(step.model, (), step.kwargs))
        prices: dict[str, dict[str, int]] = {}
        for cost in ("profile", *COSTS):
            problem = state.lowered(registry().cost_model(f"{cost}:{self.device}")).problem
            prices[cost] = dict(zip(problem.names, problem.cost, strict=True))
        timed = [operator for operator, price in prices["profile"].items() if price]
        times = [prices["profile"][operator] for operator in timed]
        for cost in COSTS:
            predicted = [prices[cost][operator] for operator in timed]
            yield Case(workload=name, side=cost).row(
                operators=len(timed),
                spearman=round(float(spearmanr(predicted, times).statistic), 4),
                predicted_to_measured=round(sum(predicted) / sum(times), 4),
            )

    def offload(self, name: str, work: Workload) -> Iterator[Row]:
        """A plan that offloads, beside the plan at budget 1; eager lowering, so gradients must be bit-equal."""
        step = self.step(work)
        rate = min(row["gb_per_s"] for row in self.link)
        peak = remat.Peak(0.5)
        reference: Outcome | None = None
        for side, budget, options in (
            ("without offload", 1.0, {"budget": 1.0}),
            ("without offload", 0.5, {"budget": peak}),
            ("offload", 0.5, {"budget": peak, "offload": f"{rate:.3f}GB/s"}),
        ):
            found, outcome = self.plan(step, {**options, "lower": "eager"})
            reference = reference or outcome
            pairs = zip(outcome.gradients.values(), reference.gradients.values(), strict=True)
            equal = all(torch.equal(a, b) for a, b in pairs)
            yield Case(workload=name, budget=budget, side=side).row(**found, bit_equal=equal)

    @functools.cached_property
    def link(self) -> list[Row]:
        """Rates of copies each way, and how much of them a product hides."""
        large = self.on_gpu
        x = torch.empty((512 if large else 64) << 20, dtype=torch.uint8, device=self.device)
        host = torch.empty(x.shape, dtype=torch.uint8, pin_memory=large)
        side = 8192 if large else 768
        a = torch.randn(side, side, device=self.device, dtype=self.dtype)
        stream: Any = torch.cuda.Stream() if large else None

        def products() -> None:
            for _ in range(8):
                a @ a

        def copy(to: torch.Tensor, of: torch.Tensor) -> None:
            to.copy_(of, non_blocking=large)

        def both(to: torch.Tensor, of: torch.Tensor) -> None:
            with torch.cuda.stream(stream):  # nothing without a stream
                copy(to, of)
            products()

        products_ms = self.milliseconds(products)
        found = []
        for side_name, to, of in (("to the host", host, x), ("to the device", x, host)):
            copy(to, of)
            alone_ms = self.milliseconds(functools.partial(copy, to, of))
            both_ms = self.milliseconds(functools.partial(both, to, of))
            hidden = (alone_ms + products_ms - both_ms) / min(alone_ms, products_ms)
            row = Case(workload="link", side=side_name).row(
                bytes=x.numel(),
                copy_ms=alone_ms,
                gb_per_s=round(x.numel() / alone_ms / 1e6, 3),
                products_ms=products_ms,
                both_ms=both_ms,
                hidden=round(hidden, 3) if large else None,  # a CPU has no other stream
            )
            found.append(row)
        return found

    def measure(self, name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
        """The rows of one part of one model; what raises is a row too."""
        if quick:
            self.repeats = 3
        if name == "link":
            device = describe_device(torch.device(self.device))
            yield from ({**row, "part": "link", "device": device} for row in self.link)
            return
        part, _, model = name.partition(" ")
        if time.monotonic() > self.began + 60 * PARTS[part] * MINUTES:
            yield Case(workload=name).row(part=part, left_out="the time was over")
            return
        measure = {"step": self.steps, "costs": self.costs, "offload": self.offload}[part]
        try:
            for row in measure(name, self.models[model]):
                yield {**row, "part": part}
        except Exception as error:  # one part of one model less
            traceback.print_exc()
            failed = f"{type(error).__name__}: {str(error)[:500]}"
            yield Case(workload=name).row(part=part, failed=failed)
        torch.compiler.reset()
        if self.on_gpu:
            torch.cuda.empty_cache()


def summarise(rows: list[Row]) -> Row:
    def of(part: str, side: str) -> list[Row]:
        return [r for r in rows if r["part"] == part and r["side"] == side and "failed" not in r]

    ours, offloads = of("step", "remat"), of("offload", "offload")
    lower = [row for row in ours if row["budget"] != 1]
    spearman = {cost: [r["spearman"] for r in of("costs", cost)] for cost in COSTS}
    found: Row = {
        "models": len({row["workload"] for row in ours}),
        "largest_plan_off": max((abs(row["plan_off"]) for row in ours), default=None),
        "peaks_held": f"{sum(r['peak_bytes'] <= r['asked_bytes'] for r in lower)} of {len(lower)}",
        "gradients_agree": f"{sum(r['gradients_agree'] for r in ours)} of {len(ours)}",
        "median_rank_correlation": {
            cost: statistics.median(found) for cost, found in spearman.items() if found
        },
        "offload_gradients_bit_equal": f"{sum(r['bit_equal'] for r in offloads)} of {len(offloads)}",
        "left_out": [r["workload"] for r in rows if "left_out" in r],
        "failed": [f"{r['workload']}: {r['failed']}" for r in rows if "failed" in r],
    }
    if lower:
        found["step_time_at_equal_peak"] = geometric_mean(r["to_pytorch"] for r in lower)
    if len(lower) > 2:
        costs, added = ([row[key] for row in lower] for key in ("recompute_cost", "added_ms"))
        found["predicted_against_added"] = round(float(spearmanr(costs, added).statistic), 4)
    return found


def experiment_on(device: str) -> Experiment:
    bench = Bench(device)
    names = [f"{part} {model}" for part in PARTS for model in bench.models]
    return Experiment(
        name="gpu" if device == "cuda" else "gpu-cpu",
        about="remat on a device: steps, costs of operators, offloading",
        cases=grid(("link", *names)),
        quick=grid(("link", *(f"{part} {next(iter(bench.models))}" for part in PARTS))),
        measure=bench.measure,
        summarise=summarise,
        missed=lambda summary: summary["failed"],
    )


def refusal(device: str) -> str | None:
    """Why the device cannot be measured, and what it needs."""
    if device == "cpu":
        return None
    needs = (
        "benchmarks.gpu needs a CUDA device with 40 GiB of free memory, and a CUDA build of PyTorch; "
        "--device cpu walks the same code with small models"
    )
    if not torch.cuda.is_available():
        return f"there is no CUDA device here (torch {torch.__version__}): {needs}"
    free = free_bytes(torch.device("cuda"))
    if free < NEEDED_BYTES:
        return f"{describe_device(torch.device('cuda'))} has {free / 2**30:.0f} GiB free: {needs}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = run.parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if reason := refusal(options.device):
        print(reason, file=sys.stderr)
        return 2
    # Operators are timed anew.
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", REMAT_CACHE=folder):
        return 0 if run.run(experiment_on(options.device), options, parser) else 1


if __name__ == "__main__":
    sys.exit(main())
