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

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from scipy.stats import spearmanr

import remat
from benchmarks.experiment import RESULTS, Case, Row, geometric_mean, header
from benchmarks.workloads import LARGE, Workload
from remat.graph.costs.measure import describe_device, free_bytes
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry
from remat.running.measure import measure_step
from tests.models import build as build_small

NEEDED_BYTES = 40 * 2**30
#: The lower budget of PyTorch's partitioner.
BUDGET = 0.4
#: Relative distance of gradients between two compiled steps in bfloat16 or float32, over all parameters.
LIMIT = {"cuda": 5e-2, "cpu": 1e-3}
COSTS = ("roofline", "roofline-fused", "inductor")


def small(name: str) -> Workload:
    """A model of the tests, which stands for a large one on the CPU."""
    step = functools.partial(build_small, name)
    return Workload(
        about="small, as in tests.models",
        model=lambda: step().model,
        batch=lambda: dict(step().kwargs),
    )


SMALL = {name: small(name) for name in ("llama", "gpt2", "bert", "t5", "vit", "resnet")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A device and how to measure on it.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        models: by name.
        repeats: timed steps of each variant.
        began: when the run began, as of `time.monotonic`.
        minutes: nothing begins after these.
    """

    device: str
    models: Mapping[str, Workload]
    repeats: int
    began: float
    minutes: float

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], object], repeats: int = 0) -> float:
        """The median time of a call, until the device is done."""
        found = []
        for _ in range(repeats or self.repeats):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            found.append(1e3 * (time.perf_counter() - start))
        return round(statistics.median(found), 4)


class Step:
    """A model with a batch, on the device; its variants run one after another."""

    def __init__(self, bench: Bench, work: Workload) -> None:
        self.bench, self.work = bench, work
        self.model = work.build(bench.device, bench.dtype)
        (self.batch,) = work.batches(1, bench.device, bench.dtype)

    def gradients(self, step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of one step from a seed, in the host's memory."""
        self.model.zero_grad(set_to_none=True)
        state = {name: b.clone() for name, b in self.model.named_buffers()}
        torch.manual_seed(7)
        step(**self.batch).backward()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state[name])
        found = [p.grad.detach().to("cpu", copy=True) for p in self.trained()]
        self.model.zero_grad(set_to_none=True)
        return found

    def trained(self) -> list[Any]:
        return [p for p in self.model.parameters() if p.grad is not None]

    def variant(self, backend: str, options: Row) -> tuple[Row, list[torch.Tensor]]:
        """Compiles the step, and measures its time, its peak and its gradients."""
        torch.compiler.reset()
        start = time.perf_counter()
        step: Any = torch.compile(self.model, backend=backend, options=options)
        gradients = self.gradients(step)
        compile_s = time.perf_counter() - start

        def run() -> None:
            step(**self.batch).backward()
            self.model.zero_grad(set_to_none=True)

        run()
        found: Row = {"compile_s": round(compile_s, 1), "step_ms": self.bench.milliseconds(run)}
        found["peak_bytes"] = measure_step(
            step, kwargs=self.batch, resident=self.model.parameters(), by="allocator"
        ).peak_bytes
        return found, gradients


def distance(mine: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Norm of the difference of all gradients together, relative to their norm."""
    pairs = [(a.double(), b.double()) for a, b in zip(mine, other, strict=True)]
    away = sum(float((a - b).square().sum()) for a, b in pairs)
    norm = sum(float(b.square().sum()) for _, b in pairs)
    return math.sqrt(away / norm) if norm else math.inf


def measure_plan(step: Step, options: Row) -> tuple[Row, list[torch.Tensor]]:
    """A variant of remat's, with the figures of its plan."""
    known = len(remat.plans())
    found, gradients = step.variant("remat", options)
    (plan, *more) = remat.plans()[known:]
    assert not more, "the step has several graphs"
    figures = {
        "plan_peak_bytes": plan.peak_bytes,
        "plan_off": round(plan.peak_bytes / found["peak_bytes"] - 1, 5),
        "expected_peak_bytes": plan.predicted_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "host_bytes": plan.host_bytes,
        "recompute_cost": plan.recompute_cost,
        "exposed_time": plan.exposed_time,
        "unit": plan.unit,
        "solve_s": round(plan.solve_s, 3),
    }
    return found | figures, gradients


def steps(bench: Bench, name: str, link: float) -> Iterator[Row]:
    """PyTorch's partitioner at two budgets, and remat at the peak of the lower one."""
    from torch._functorch import config

    step = Step(bench, bench.models[name])
    case = Case(workload=name, side="model")
    parameters = sum(p.numel() for p in step.model.parameters())
    yield case.row(about=step.work.about, parameters=parameters, dtype=str(bench.dtype))
    reference: list[torch.Tensor] = []
    for budget in (1.0, BUDGET):
        with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
            theirs, gradients = step.variant("inductor", {})
        if budget == 1:
            full_ms, reference = theirs["step_ms"], gradients
        off = distance(gradients, reference)
        yield Case(workload=name, budget=budget, side="pytorch").row(
            **theirs, gradients_off=off, added_ms=theirs["step_ms"] - full_ms
        )
    for budget, asked in ((1.0, 1.0), (BUDGET, remat.Peak(theirs["peak_bytes"]))):
        ours, gradients = measure_plan(step, {"budget": asked})
        if budget == 1:
            own_ms = ours["step_ms"]
        off = distance(gradients, reference)
        extra = {} if budget == 1 else {"to_pytorch": ours["step_ms"] / theirs["step_ms"]}
        yield Case(workload=name, budget=budget, side="remat").row(
            **ours,
            gradients_off=off,
            gradients_agree=off <= LIMIT[bench.device],
            asked_bytes=theirs["peak_bytes"],
            added_ms=ours["step_ms"] - own_ms,
            **extra,
        )


def costs(bench: Bench, name: str, link: float) -> Iterator[Row]:
    """How each cost model ranks the operators of a step, against their times on this device."""
    step = Step(bench, bench.models[name])
    state = prepare(remat.capture(step.model, (), step.batch))
    prices: dict[str, dict[str, int]] = {}
    for cost in ("profile", *COSTS):
        problem = state.lowered(registry().cost_model(f"{cost}:{bench.device}")).problem
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


def offload(bench: Bench, name: str, link: float) -> Iterator[Row]:
    """A plan that offloads, beside the plan at budget 1; eager lowering, so gradients must be bit-equal."""
    step = Step(bench, bench.models[name])
    reference: list[torch.Tensor] = []
    for budget, options in (
        (1.0, {"budget": 1.0}),
        (0.5, {"budget": remat.Peak(0.5)}),
        (0.5, {"budget": remat.Peak(0.5), "offload": f"{link:.3f}GB/s"}),
    ):
        found, gradients = measure_plan(step, {**options, "lower": "eager"})
        reference = reference or gradients
        side = "offload" if "offload" in options else "without offload"
        yield Case(workload=name, budget=budget, side=side).row(
            **found,
            bit_equal=all(map(torch.equal, gradients, reference)),
        )


def measure_link(bench: Bench) -> Iterator[Row]:
    """Rates of copies each way, and how much of them a product hides."""
    large = bench.device == "cuda"
    megabytes = 512 if large else 64
    x = torch.empty(megabytes << 20, dtype=torch.uint8, device=bench.device)
    host = torch.empty(x.shape, dtype=torch.uint8, pin_memory=large)
    side = 8192 if large else 768
    a = torch.randn(side, side, device=bench.device, dtype=bench.dtype)
    stream: Any = torch.cuda.Stream() if large else None

    def out() -> None:
        host.copy_(x, non_blocking=large)

    def back() -> None:
        x.copy_(host, non_blocking=large)

    def products() -> None:
        for _ in range(8):
            a @ a

    def at_once(copy: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if stream is None:
                copy()
            else:
                with torch.cuda.stream(stream):
                    copy()
            products()

        return run

    products_ms = bench.milliseconds(products)
    for side_name, copy in (("to the host", out), ("to the device", back)):
        copy()
        alone_ms = bench.milliseconds(copy)
        both_ms = bench.milliseconds(at_once(copy))
        hidden = (alone_ms + products_ms - both_ms) / min(alone_ms, products_ms)
        yield Case(workload="link", side=side_name).row(
            bytes=x.numel(),
            copy_ms=alone_ms,
            gb_per_s=round(x.numel() / alone_ms / 1e6, 3),
            products_ms=products_ms,
            both_ms=both_ms,
            hidden=round(hidden, 3) if large else None,  # a CPU has no other stream
        )


#: Each part, and the share of the time after which it begins no further model.
PARTS: Mapping[str, tuple[Callable[[Bench, str, float], Iterator[Row]], float]] = {
    "step": (steps, 0.7),
    "costs": (costs, 0.85),
    "offload": (offload, 1.0),
}


def measured(bench: Bench) -> Iterator[Row]:
    """The rows of everything, each part of all models before the next part."""
    link = math.inf
    for row in measure_link(bench):
        link = min(link, row["gb_per_s"])
        yield {"part": "link", **row}
    for part, (measure, share) in PARTS.items():
        for name in bench.models:
            row: Row = {"part": part, "workload": name}
            if time.monotonic() > bench.began + 60 * share * bench.minutes:
                yield {**row, "left_out": "the time was over"}
                continue
            try:
                for row in measure(bench, name, link):
                    yield {"part": part, **row}
            except Exception as error:  # one part of one model less
                traceback.print_exc()
                yield {**row, "failed": f"{type(error).__name__}: {str(error)[:500]}"}
            torch.compiler.reset()
            if bench.device == "cuda":
                torch.cuda.empty_cache()


def summarise(rows: list[Row]) -> Row:
    def of(part: str, side: str) -> list[Row]:
        return [r for r in rows if r["part"] == part and r.get("side") == side]

    ours = of("step", "remat")
    lower = [row for row in ours if "to_pytorch" in row]
    offloads = of("offload", "offload")
    spearman = {cost: [r["spearman"] for r in of("costs", cost)] for cost in COSTS}
    predicted = [(r["recompute_cost"], r["added_ms"]) for r in lower]
    return {
        "models": len({row["workload"] for row in ours}),
        "largest_plan_off": max((abs(row["plan_off"]) for row in ours), default=None),
        "peaks_held": f"{sum(r['peak_bytes'] <= r['asked_bytes'] for r in lower)} of {len(lower)}",
        "step_time_at_equal_peak": geometric_mean(r["to_pytorch"] for r in lower)
        if lower
        else None,
        "gradients_agree": f"{sum(r['gradients_agree'] for r in ours)} of {len(ours)}",
        "predicted_against_added": round(
            float(spearmanr(*zip(*predicted, strict=True)).statistic), 4
        )
        if len(predicted) > 2
        else None,
        "median_rank_correlation": {
            cost: statistics.median(found) for cost, found in spearman.items() if found
        },
        "offload_gradients_bit_equal": f"{sum(r['bit_equal'] for r in offloads)} of {len(offloads)}",
        "left_out": [f"{r['part']} {r['workload']}" for r in rows if "left_out" in r],
        "failed": [f"{r['part']} {r['workload']}: {r['failed']}" for r in rows if "failed" in r],
    }


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=10, help="begin nothing after these")
    parser.add_argument("--models", default="", help="some of them, separated by commas")
    parser.add_argument("--quick", action="store_true", help="one model, few repeats")
    parser.add_argument("--json", type=Path, help="default benchmarks/results/gpu.json")
    options = parser.parse_args(arguments)
    if reason := refusal(options.device):
        print(reason, file=sys.stderr)
        return 2
    models: Mapping[str, Workload] = LARGE if options.device == "cuda" else SMALL
    names = (
        options.models.split(",")
        if options.models
        else list(models)[: 1 if options.quick else None]
    )
    if unknown := [name for name in names if name not in models]:
        parser.error(f"--models: there is no '{unknown[0]}'; known: {', '.join(models)}")
    short = "_cpu" if options.device == "cpu" else ""
    path = options.json or RESULTS / f"gpu{short}{'.quick' if options.quick else ''}.json"
    bench = Bench(
        device=options.device,
        models={name: models[name] for name in names},
        repeats=3 if options.quick or options.device == "cpu" else 20,
        began=time.monotonic(),
        minutes=options.minutes,
    )
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", REMAT_CACHE=folder):
        for row in measured(bench):
            print(json.dumps(row), flush=True)
            rows.append(row)
            device = describe_device(torch.device(options.device))
            spent = {"device": device, "elapsed_s": round(time.monotonic() - bench.began, 1)}
            record = {**header("gpu"), **spent, "summary": summarise(rows), "rows": rows}
            path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["summary"], indent=1))
    print(f"written to {path}", file=sys.stderr)
    return 1 if record["summary"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
