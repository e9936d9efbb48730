"""remat on a GPU, in one command and less than eight minutes: ``python -m benchmarks.gpu``. It writes one JSON file after each model.

It runs from a bare checkout. It needs a CUDA device with 40 GiB of free memory, a CUDA build of PyTorch 2.11 or later with Triton, and
numpy, scipy, networkx, pluggy, filelock, rich, click and transformers; nothing is fetched or compiled beforehand. ``--device cpu`` walks
the same code with small models, of which Inductor compiles one: peaks are then those of the profiler's record of allocations, copies stay in the host's memory, and
nothing overlaps.

Each model has a process and a share of the time. What the time does not reach is listed as left out. Measured, in bfloat16:

- ``step``: peaks of the allocator (allocated, requested, reserved) against the plan's, step time, and gradients. Plain Inductor;
  PyTorch's partitioner at a lower budget; remat with the peak of that one as its `remat.Peak`; remat at budget 1.
- ``offload``: a plan that offloads over the link as it was measured, eager lowering, beside the plan at budget 1: peak against the
  plan's, pinned host memory, how much of the copies the step hides, and gradients, which must be bit-equal.
- ``costs``: how cost models rank operators: Spearman's correlation with their times on this device, by the model ``profile``.
- ``branches``: routers over nearly equal experts: tokens that forward sends elsewhere than at budget 1, and backward elsewhere than
  forward.
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
from benchmarks.experiment import Case, Experiment, Row, grid, in_process, silence
from benchmarks.figures import geometric_mean
from benchmarks.workloads import LARGE
from remat.graph.costs.measure import describe_device, free_bytes
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry
from remat.running.measure import measure_step
from tests.models import Outcome, Step
from tests.models import build as build_small

NEEDED_BYTES = 40 * 2**30
#: Seconds after which nothing more is begun, and after which what still runs is ended.
SECONDS, END_S = 420, 460
#: The lower budget of PyTorch's partitioner.
BUDGET = 0.4
#: Relative distance of gradients between two compiled steps in bfloat16 or float32, over all parameters.
LIMIT = {"cuda": 5e-2, "cpu": 1e-3}
COSTS = ("roofline", "roofline-fused")
#: The models of each device. On a CPU, they are small, and Inductor compiles the last one alone.
MODELS = {"cuda": tuple(LARGE), "cpu": ("gpt2", "bert", "vit", "resnet", "t5", "llama")}
ROUTERS = "branches"


class Bench:
    """A device and how to measure on it, in one process.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        lower: ``"inductor"`` or ``"eager"``: what compiles the steps.
        until: time of the clock after which nothing more is begun.
    """

    def __init__(self, device: str, lower: str = "inductor", until: float = float("inf")) -> None:
        self.device, self.lower, self.until = device, lower, until
        self.on_gpu = device == "cuda"
        self.repeats = 20 if self.on_gpu else 3
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.took: dict[str, float] = {}
        self.left_out: list[str] = []

    def has_time(self, what: str, like: str) -> bool:
        """Whether a variant is begun: the last one of the same kind would end in time."""
        if time.time() + self.took.get(like, 0) <= self.until:
            return True
        self.left_out.append(what)
        return False

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

    def step(self, name: str) -> tuple[Step, str]:
        """A step of a model, and its sizes for people."""
        if not self.on_gpu:
            step = build_small(name)
            step.model.eval()  # dropout draws other numbers in other compiled steps
            return step, "small"
        work = LARGE[name]
        (batch,) = work.batches(1, self.device, self.dtype)
        model = work.build(self.device, self.dtype)
        return Step(model=model, kwargs=batch, loss=lambda loss: loss), work.about

    def variant(self, step: Step, backend: str, options: Row) -> tuple[Row, Outcome]:
        """Compiles the step, and measures its time, its memory and its gradients."""
        torch.compiler.reset()
        start, before = time.perf_counter(), self.allocated()
        compiled: Any = torch.compile(step.model, backend=backend, options=options)
        outcome = step.train(compiled)
        compile_s = time.perf_counter() - start

        def once() -> None:
            step(compiled)[1].backward()
            step.model.zero_grad(set_to_none=True)

        once()
        step_ms = self.milliseconds(once)
        measured = measure_step(
            compiled,
            step.args,
            step.kwargs,
            resident=step.model.parameters(),
            by="allocator",
        )
        self.took[options.get("lower", self.lower)] = time.perf_counter() - start
        found = {"compile_s": round(compile_s, 1), "step_ms": step_ms}
        # Workspaces of libraries, which stay from the first variant on.
        own = sum(t.nbytes for t in outcome.tensors().values() if t.device.type == self.device)
        kept = self.allocated() - before - own if self.on_gpu else None
        figures = {"peak_bytes": measured.peak_bytes, "kept_bytes": kept}
        return {**found, **figures, **self.memory(step, once)}, outcome

    def memory(self, step: Step, once: Callable[[], None]) -> Row:
        """The allocator's own figures over two steps, less what is not the step's; nothing on a CPU."""
        names = ("requested", "reserved", "fragmentation", "pinned")
        if not self.on_gpu:
            return dict.fromkeys(f"{name}_bytes" for name in names)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        for _ in range(2):
            once()
        torch.cuda.synchronize()
        after, host = torch.cuda.memory_stats(), {}
        if hasattr(torch.cuda, "host_memory_stats"):
            host = torch.cuda.host_memory_stats()

        def of(stats: Row, name: str, kind: str) -> int:
            return int(stats.get(f"{name}_bytes.all.{kind}", 0))

        given = (*step.model.parameters(), *step.model.buffers(), *step.kwargs.values())
        own = sum(t.nbytes for t in given if isinstance(t, torch.Tensor))
        others = of(before, "allocated", "current") - own  # such as copies of the first weights
        allocated, reserved = of(after, "allocated", "peak"), of(after, "reserved", "peak")
        return {
            # What the program asked for, before each block is rounded up to 512 bytes.
            "requested_bytes": of(after, "requested", "peak") - others,
            "reserved_bytes": reserved - others,
            # Reserved from the driver, and unused when most was allocated.
            "fragmentation_bytes": reserved - allocated,
            "pinned_bytes": int(host.get("allocated_bytes.peak", 0)) or None,
        }

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def plan(self, step: Step, options: Row) -> tuple[Row, Outcome]:
        """A variant of remat's, with the figures of its plan."""
        found, outcome = self.variant(step, "remat", {"lower": self.lower, **options})
        plan = remat.plans()[-1]
        names = ("saved_bytes", "host_bytes", "recompute_cost", "exposed_time", "unit", "solve_s")
        return {
            **found,
            "plan_peak_bytes": plan.peak_bytes,
            "plan_off": round(plan.peak_bytes / found["peak_bytes"] - 1, 5),
            "expected_peak_bytes": plan.estimated_peak_bytes,
            "copies": len(plan.offloads),
            **{name: getattr(plan, name) for name in names},
        }, outcome

    def steps(self, name: str, step: Step) -> Iterator[Row]:
        """Plain Inductor, PyTorch's partitioner, and remat at the peak of that one."""
        from torch._functorch import config

        plain = "inductor" if self.lower == "inductor" else "aot_eager_decomp_partition"
        theirs: dict[float, Row] = {}
        reference: Outcome | None = None
        for budget, side in ((1.0, "inductor"), (BUDGET, "pytorch")):
            if not self.has_time(f"step {side}", self.lower):
                return
            with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
                theirs[budget], outcome = self.variant(step, plain, {})
            reference = reference or outcome
            yield Case(workload=name, budget=budget, side=side).row(
                part="step",
                **theirs[budget],
                gradients_off=outcome.gradient_distance(reference),
                added_ms=theirs[budget]["step_ms"] - theirs[1.0]["step_ms"],
            )
        asked_bytes = theirs[BUDGET]["peak_bytes"]
        for budget, asked in ((BUDGET, remat.Peak(asked_bytes)), (1.0, 1.0)):
            # Without remat's row at their peak, those of PyTorch say nothing.
            if budget == 1 and not self.has_time("step remat 1", self.lower):
                return
            ours, outcome = self.plan(step, {"budget": asked})
            off = outcome.gradient_distance(reference)
            yield Case(workload=name, budget=budget, side="remat").row(
                part="step",
                **ours,
                gradients_off=off,
                gradients_agree=off <= LIMIT[self.device],
                asked_bytes=asked_bytes,
                added_ms=ours["step_ms"] - theirs[1.0]["step_ms"],
                to_pytorch=ours["step_ms"] / theirs[budget]["step_ms"],
                to_inductor=ours["step_ms"] / theirs[1.0]["step_ms"],
            )

    def offload(self, name: str, step: Step, rate: float) -> Iterator[Row]:
        """A plan that offloads, beside the plan at budget 1; eager lowering, so gradients must be bit-equal."""
        reference: Outcome | None = None
        base_ms = None
        for side, budget, options in (
            ("without offload", 1.0, {"budget": 1.0}),
            ("offload", 0.5, {"budget": remat.Peak(0.5), "offload": f"{rate:.3f}GB/s"}),
        ):
            if not self.has_time(f"offload {side}", "eager"):
                return
            found, outcome = self.plan(step, {**options, "lower": "eager"})
            reference, base_ms = reference or outcome, base_ms or found["step_ms"]
            pairs = zip(outcome.gradients.values(), reference.gradients.values(), strict=True)
            copied_ms = 2 * found["host_bytes"] / rate / 1e6
            added_ms = found["step_ms"] - base_ms
            yield Case(workload=name, budget=budget, side=side).row(
                part="offload",
                **found,
                bit_equal=all(torch.equal(a, b) for a, b in pairs),
                copied_ms=round(copied_ms, 4),
                added_ms=round(added_ms, 4),
                # Recomputation counts as copies that the step does not hide.
                hidden=round(1 - added_ms / copied_ms, 3) if copied_ms and self.on_gpu else None,
            )

    def costs(self, name: str, step: Step) -> Iterator[Row]:
        """How each cost model ranks the operators of a step, against their times on this device."""
        if not self.has_time("costs", "costs"):
            return
        state = prepare(remat.capture(step.model, step.args, step.kwargs))
        prices: dict[str, dict[str, int]] = {}
        for cost in ("profile", *COSTS):
            problem = state.lowered(registry().cost_model(f"{cost}:{self.device}")).problem
            prices[cost] = dict(zip(problem.names, problem.cost, strict=True))
        timed = [operator for operator, price in prices["profile"].items() if price]
        times = [prices["profile"][operator] for operator in timed]
        for cost in COSTS:
            predicted = [prices[cost][operator] for operator in timed]
            yield Case(workload=name, side=cost).row(
                part="costs",
                operators=len(timed),
                spearman=round(float(spearmanr(predicted, times).statistic), 4),
                predicted_to_measured=round(sum(predicted) / sum(times), 4),
            )

    def branches(self) -> Iterator[Row]:
        """Tokens that are sent elsewhere than at budget 1, or in backward elsewhere than in forward."""
        from benchmarks.branch_values import TOKENS, build

        first: torch.Tensor | None = None
        for budget in (1.0, 0.5, "peak:0"):
            if not self.has_time(f"branches {budget}", "branches"):
                return
            start = time.perf_counter()
            torch.compiler.reset()
            model, given = build("topk", torch.bfloat16)
            model.to(self.device)
            compiled = torch.compile(model, backend="remat", options={"budget": budget})
            loss, chosen = compiled(given.to(self.device))
            loss.backward()
            self.took["branches"] = time.perf_counter() - start
            first = chosen if first is None else first
            yield Case(workload=ROUTERS, budget=budget).row(
                part="branches",
                tokens=3 * TOKENS,
                forward_moved=int((chosen != first).sum()),
                backward_moved=model.flips(chosen),
            )

    def link(self) -> Iterator[Row]:
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
        for side_name, to, of in (("to the host", host, x), ("to the device", x, host)):
            copy(to, of)
            alone_ms = self.milliseconds(functools.partial(copy, to, of))
            both_ms = self.milliseconds(functools.partial(both, to, of))
            hidden = (alone_ms + products_ms - both_ms) / min(alone_ms, products_ms)
            yield Case(workload="link", side=side_name).row(
                part="link",
                device=describe_device(torch.device(self.device)),
                bytes=x.numel(),
                copy_ms=alone_ms,
                gb_per_s=round(x.numel() / alone_ms / 1e6, 3),
                products_ms=products_ms,
                both_ms=both_ms,
                hidden=round(hidden, 3) if large else None,  # a CPU has no other stream
            )

    def model(self, name: str, rate: float) -> Iterator[Row]:
        """All rows of one model."""
        step, about = self.step(name)
        yield Case(workload=name, side="model").row(
            part="model",
            about=about,
            lower=self.lower,
            parameters=sum(p.numel() for p in step.model.parameters()),
            dtype=str(self.dtype),
        )
        parts = (
            functools.partial(self.steps, name, step),
            functools.partial(self.offload, name, step, rate),
            functools.partial(self.costs, name, step),
        )
        for part in parts:
            try:
                yield from part()
            except Exception as error:  # one part of one model less
                traceback.print_exc()
                yield failed(name, part.func.__name__, error)
            torch.compiler.reset()


def failed(name: str, part: str, error: Exception) -> Row:
    return Case(workload=name).row(part=part, failed=f"{type(error).__name__}: {str(error)[:500]}")


def rows_of(device: str, name: str, rate: float, until: float) -> Iterator[Row]:
    """The rows of one workload, in the process of this call."""
    silence()
    register()
    lower = "inductor" if device == "cuda" or name == MODELS[device][-1] else "eager"
    bench = Bench(device, lower, until)
    if not bench.on_gpu:
        from torch._inductor import config

        config.cpp.simdlen = 1  # loops that are not vectorised compile in half the time
    yield from {"link": bench.link, ROUTERS: bench.branches}.get(
        name, functools.partial(bench.model, name, rate)
    )()
    if bench.left_out:
        yield Case(workload=name).row(part="left out", left_out=bench.left_out)


def register() -> None:
    """Register the backend by name, as an installation does."""
    from torch._dynamo import list_backends, register_backend

    from remat.integrations.backend import compile_step

    if "remat" not in list_backends(exclude_tags=None):
        register_backend(compile_step, name="remat")


class Clock:
    """Shares the time among the workloads, and measures each in a process of its own."""

    def __init__(self, device: str) -> None:
        self.device, self.began, self.rate = device, time.time(), 10.0
        self.left = len(MODELS[device]) + 2

    def measure(self, name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
        now = time.time()
        until = now + max(0.0, self.began + SECONDS - now) / max(1, self.left)
        self.left -= 1
        # What still runs a while after its share, as one compilation may, is ended.
        limit_s = max(1.0, min(until + 60, self.began + END_S) - now)
        try:
            given = (self.device, name, self.rate, until)
            for row in in_process(rows_of, *given, within_s=limit_s, environment={}):
                if row["part"] == "link":
                    self.rate = row["gb_per_s"]
                yield row
        except Exception as error:
            yield failed(name, "process", error)


def summarise(rows: list[Row]) -> Row:
    def of(part: str, side: str) -> list[Row]:
        return [r for r in rows if r["part"] == part and r["side"] == side and "failed" not in r]

    ours, offloads = of("step", "remat"), of("offload", "offload")
    lower = [row for row in ours if row["budget"] != 1]
    routed = of("branches", "remat")
    spearman = {cost: [r["spearman"] for r in of("costs", cost)] for cost in COSTS}
    off = [abs(row["plan_off"]) for row in ours]
    reserved = [r["reserved_bytes"] / r["peak_bytes"] for r in ours if r["reserved_bytes"]]
    found: Row = {
        "models": len({row["workload"] for row in ours}),
        "largest_plan_off": max(off, default=None),
        "largest_reserved_to_peak": max(reserved, default=None),
        "peaks_held": f"{sum(r['peak_bytes'] <= r['asked_bytes'] for r in lower)} of {len(lower)}",
        "gradients_agree": f"{sum(r['gradients_agree'] for r in ours)} of {len(ours)}",
        "median_rank_correlation": {
            cost: statistics.median(found) for cost, found in spearman.items() if found
        },
        "offload_gradients_bit_equal": f"{sum(r['bit_equal'] for r in offloads)} of {len(offloads)}",
        "forward_moved": sum(row["forward_moved"] for row in routed),
        "backward_moved": sum(row["backward_moved"] for row in routed),
        "left_out": [f"{r['workload']}: {x}" for r in rows for x in r.get("left_out", ())],
        "failed": [f"{r['workload']} {r['part']}: {r['failed']}" for r in rows if "failed" in r],
    }
    if lower:
        found["step_time_at_equal_peak"] = geometric_mean(r["to_pytorch"] for r in lower)
        found["step_time_to_inductor"] = geometric_mean(r["to_inductor"] for r in lower)
    if len(lower) > 2:
        costs, added = ([row[key] for row in lower] for key in ("recompute_cost", "added_ms"))
        found["predicted_against_added"] = round(float(spearmanr(costs, added).statistic), 4)
    return found


def experiment_on(device: str) -> Experiment:
    return Experiment(
        name="gpu" if device == "cuda" else "gpu-cpu",
        about="remat on a device: steps, offloading, costs of operators, branches",
        cases=grid(("link", *MODELS[device][:-1], ROUTERS, MODELS[device][-1])),
        quick=grid(("link", ROUTERS, MODELS[device][0])),
        measure=Clock(device).measure,
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
