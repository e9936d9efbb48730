"""Real training steps under Inductor: ours against PyTorch's partitioner, by a stopwatch.

    python benchmarks/step.py [--quick] [--models llama,resnet] [--costs profile,inductor]

PyTorch's partitioner gets a budget; what it then really hands from forward to backward is counted in
bytes. Beside it run, each on its own copy of the model: the same once more, whose ratio is the spread of the
measurement; ours, with exactly as many saved bytes as its budget and default options, once for each further cost model
that is named; and ours with PyTorch's own measured peak as a `remat.Peak` budget. All
compiled variants live in one process and train on the same batches in turn, one step
each per round, the first of a round being another one every time; the losses of all must agree at
every step. Times are medians over the rounds, a ratio is the median of the ratios within rounds. The
peak is that of forward and backward, parameters and inputs included: on the CPU from the profiler's
record of every allocation (first checked against a case with a known answer), on CUDA from the
allocator. Operators are timed anew for the cost model ``profile``, whatever is known from before.

What recomputing takes is predicted by several cost models, calibrated for this machine, from which operators run
twice, and measured as the time beyond the step of the same partitioner, theirs or ours, at budget 1. All run with an
allocator that keeps freed memory, since page faults cost as much as recomputing; see `machine.keep_freed_memory`.

Where there is a CUDA device, a Llama of 1.1 billion parameters in bfloat16 is measured there as well;
with every cost model at three budgets that takes 60 GiB or so of its memory.

Beside other work on the machine, OMP_WAIT_POLICY=passive in the environment keeps threads that wait
for one another from taking the cores away from those that they wait for.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomPartitionerFn

# As a script, the folder of this file is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import remat
from benchmarks.machine import keep_freed_memory, quiet
from benchmarks.step_report import loss_difference, record, rows, table
from benchmarks.step_workloads import CPU, CUDA, Batch, Workload
from remat.graph.costs.measure import describe_device
from remat.graph.joint import JointGraph
from remat.graph.liveness import saved_storages
from remat.planning import pipelines
from remat.plugins.registry import registry
from remat.running.measure import measure_step

BUDGETS = (0.4, 0.2)
#: What predicts; each is calibrated for, or runs on, the device that trains.
COSTS = ("roofline-fused", "inductor", "profile")
RESULTS = Path(__file__).parent / "results"
#: Largest relative difference of a loss from the reference's; bfloat16 keeps 8 bits.
LIMIT = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


@dataclass(slots=True, kw_only=True, eq=False)
class Decided:
    """What PyTorch's partitioner decided.

    Attributes:
        joint: the joint graph that it was given.
        saved_bytes: bytes of the distinct storages that its forward hands to backward.
        forward: names of the operators in its forward.
        backward: names of the operators in its backward.
    """

    joint: JointGraph
    saved_bytes: int
    forward: frozenset[str]
    backward: frozenset[str]


def operators(half: fx.GraphModule) -> frozenset[str]:
    return frozenset(n.name for n in half.graph.nodes if n.op == "call_function")


class PyTorch(CustomPartitionerFn):
    """PyTorch's own partitioner at a budget, called as Inductor calls it.

    What it decides is handed on and not kept, as Inductor copies its options deeply.
    """

    def __init__(self, budget: float, tell: Callable[[Decided], None]) -> None:
        self.budget = budget
        self.tell = tell

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **convention: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch import config
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        own_outputs = int(convention["num_fwd_outputs"])
        joint = JointGraph(graph_module=gm, num_fwd_outputs=own_outputs).copy()
        with config.patch(activation_memory_budget=self.budget):
            halves = min_cut_rematerialization_partition(gm, joint_inputs, **convention)
        forward, backward = (operators(half) for half in halves)
        self.tell(
            Decided(
                joint=joint,
                saved_bytes=sum(saved_storages(halves[0], own_outputs).values()),
                forward=forward,
                backward=backward,
            )
        )
        return halves

    def uuid(self) -> str:
        return f"pytorch-{self.budget}"


@dataclass(slots=True, kw_only=True)
class Variant:
    """One way to run the step, with its own copy of the model.

    Attributes:
        who: ``"eager"``, ``"pytorch"``, ``"pytorch again"``, ``"remat"``, ``"remat peak"``, or the cost
            model that ours decided by.
        budget: PyTorch's budget whose bytes, or peak, it has; None for eager.
        model: the copy.
        step: what is called: the copy, or the copy compiled.
        saved_bytes: bytes that forward hands to backward; None for eager.
        repeated: how often which operators run in forward and again in backward; views are not
            counted.
        moved: the same of operators that only backward needs and that forward runs, so that their
            result is saved.
        predicted_ps: by cost model, what that repetition costs under it.
        losses: by step.
        step_ms: milliseconds of each step: forward, backward and optimiser.
        forward_ms: of that, until the loss is known (not on CUDA).
        peak_bytes: of each measurement.
    """

    who: str
    budget: float | None
    model: nn.Module
    step: Callable[..., torch.Tensor]
    saved_bytes: int | None = None
    repeated: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    predicted_ps: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


def variants(
    work: Workload, costs: Sequence[str], named: Sequence[str], budgets: Sequence[float], show: Any
) -> list[Variant]:
    """Compiles everything that is compared, by one step each that leaves the weights as they were."""
    original = work.build()
    batch = work.batches(1)[0]
    made: list[Variant] = []

    def add(
        who: str, budget: float | None, options: dict[str, Any] | None, backend: str
    ) -> Variant:
        show(f"{work.name}: compiling {who} at {budget}")
        model = copy.deepcopy(original)
        step: Any = model
        if options is not None:
            step = torch.compile(model, backend=backend, options=options)
        variant = Variant(who=who, budget=budget, model=model, step=step)
        step(**batch).backward()
        model.load_state_dict(original.state_dict())
        model.zero_grad(set_to_none=True)
        made.append(variant)
        return variant

    def ours(who: str, budget: float, options: dict[str, Any]) -> None:
        known = len(remat.plans())
        # Options that no other variant has, else Dynamo takes a step that it has compiled for another one.
        options["rank_wait_s"] = 30 + len(made) / 1000
        try:
            variant = add(who, budget, options, "remat")
        except Exception as error:  # Dynamo's, around ours: no plan is within that peak
            show(f"{work.name}: {who} at {budget}: {error}")
            return
        (plan,) = remat.plans()[known:]
        variant.saved_bytes = plan.saved_bytes
        yardstick.tell(variant, operators(plan.forward), operators(plan.backward))

    add("eager", None, None, "")
    for budget in (1.0, *budgets):
        for who in ("pytorch", "pytorch again"):
            told: list[Decided] = []
            partition = PyTorch(budget, told.append)
            variant = add(who, budget, {"custom_partitioner_fn": partition}, "inductor")
            (theirs,) = told  # one graph, compiled now and not found in a cache
            variant.saved_bytes = theirs.saved_bytes
            yardstick = Yardstick(theirs.joint, costs)
            yardstick.tell(variant, theirs.forward, theirs.backward)
        asked = remat.Saved(theirs.saved_bytes) if budget < 1 else 1.0
        ours("remat", budget, {"budget": asked})
        if budget == 1:
            continue
        for cost in named:
            ours(cost, budget, {"budget": asked, "cost": cost})
        with quiet():
            peak = measure_step(variant.step, kwargs=batch, by="allocator").peak_bytes
        ours("remat peak", budget, {"budget": remat.Peak(peak)})
    return made


class Yardstick:
    """What operators of a joint graph are and cost, by name: one measure for every decision."""

    def __init__(self, joint: JointGraph, costs: Sequence[str]) -> None:
        state = pipelines.prepare(joint)
        self.operators = {
            n.name: str(n.target) for n in state.joint.graph.nodes if n.op == "call_function"
        }
        self.prices: dict[str, dict[str, int]] = {}
        for cost in costs:
            problem = state.lowered(registry().cost_model(cost)).problem
            self.prices[cost] = {
                n: p for n, p in zip(problem.names, problem.cost, strict=True) if p
            }
            self.needed = {
                n for n, needed in zip(problem.names, problem.in_forward, strict=True) if needed
            }

    def tell(self, variant: Variant, forward: frozenset[str], backward: frozenset[str]) -> None:
        """Notes on a variant what its halves, by the names of their operators, come to."""
        again = forward & backward & self.needed
        variant.repeated = self._count(again)
        variant.moved = self._count(forward - self.needed)
        variant.predicted_ps = {
            cost: sum(table.get(n, 0) for n in again) for cost, table in self.prices.items()
        }

    def _count(self, names: Iterable[str]) -> dict[str, int]:
        priced = (n for n in sorted(names) if any(n in table for table in self.prices.values()))
        return dict(Counter(self.operators[n] for n in priced).most_common())


def placed(cost: str, device: str) -> str:
    """A cost model for a device, where it is for any and not told which."""
    return f"{cost}:{device}" if cost in COSTS or cost == "roofline" else cost


def train(made: Sequence[Variant], work: Workload, steps: int, show: Any) -> None:
    """Trains every variant by the same batches, one step in turn; two steps before are not counted."""
    optimizers = [torch.optim.SGD(v.model.parameters(), lr=work.rate) for v in made]
    for at, batch in enumerate(work.batches(steps + 2)):
        show(f"{work.name}: step {at + 1} of {steps + 2}")
        for turn in range(len(made)):
            i = (turn + at) % len(made)
            torch.manual_seed(at)
            one_step(made[i], optimizers[i], batch, work.device, counted=at >= 2)


def one_step(v: Variant, optimizer: Any, batch: Batch, device: str, *, counted: bool) -> None:
    optimizer.zero_grad(set_to_none=True)
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        loss = v.step(**batch)
        loss.backward()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        step_ms, forward_ms = begin.elapsed_time(end), None
    else:
        start = time.perf_counter()
        loss = v.step(**batch)
        between = time.perf_counter()
        loss.backward()
        optimizer.step()
        step_ms, forward_ms = (time.perf_counter() - start) * 1e3, (between - start) * 1e3
    optimizer.zero_grad(set_to_none=True)
    v.losses.append(float(loss.detach()))
    if counted:
        v.step_ms.append(step_ms)
        if forward_ms is not None:
            v.forward_ms.append(forward_ms)


def measure_peaks(made: Sequence[Variant], work: Workload, rounds: int, show: Any) -> None:
    batch = work.batches(1)[0]
    for at in range(rounds):
        for v in made:
            show(f"{work.name}: peak {at + 1} of {rounds}, {v.who} at {v.budget}")
            with quiet():
                measured = measure_step(v.step, kwargs=batch, by="allocator")
            v.peak_bytes.append(measured.peak_bytes)


def check_meter(device: str) -> None:
    """Measures a compiled step whose peak is known: five matrices at the end of forward.

    They are the input, the weight, the first product and its sine, and the second product, which is
    the output; generated code allocates the last three.
    """
    side = 1024
    x = torch.randn(side, side, device=device, requires_grad=True)
    w = torch.randn(side, side, device=device)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ w) @ w

    with quiet():
        measured = measure_step(torch.compile(step, fullgraph=True), (x, w), by="allocator")
    matrices = measured.forward_peak_bytes / (4 * side * side)
    if abs(matrices - 5) > 0.01:
        raise SystemExit(f"the peak of a step that takes 5 matrices is measured as {matrices:.3f}")


def measure(
    work: Workload, named: Sequence[str], budgets: Sequence[float], steps: int, console: Console
) -> dict[str, Any]:
    start, load = time.perf_counter(), os.getloadavg()
    costs = [placed(cost, work.device) for cost in COSTS]
    named = [placed(cost, work.device) for cost in named]
    torch._dynamo.reset()
    with console.status("") as status:
        check_meter(work.device)
        made = variants(work, costs, named, budgets, status.update)
        compiled = counters["stats"]["unique_graphs"]
        train(made, work, steps, status.update)
        measure_peaks(made, work, 3, status.update)
        if counters["stats"]["unique_graphs"] != compiled:
            raise SystemExit("a step was compiled again: TORCH_LOGS=recompiles says why")
    return {
        "model": work.name,
        "about": work.about,
        "parameters": sum(p.numel() for p in made[0].model.parameters()),
        "dtype": str(work.dtype).removeprefix("torch."),
        "device": describe_device(torch.device(work.device)),
        "steps": steps,
        "largest_loss_difference": loss_difference(made, draws=work.draws),
        "loss_difference_allowed": LIMIT[work.dtype],
        "costs": {cost: registry().cost_model(cost).key() for cost in costs},
        "load_average_before_and_after": [round(load[0], 1), round(os.getloadavg()[0], 1)],
        "elapsed_s": round(time.perf_counter() - start, 1),
        "rows": rows(made),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="budget 0.5 and 5 steps only")
    parser.add_argument("--models", default=",".join(CPU), help="names, separated by commas")
    parser.add_argument("--costs", default="", help="further cost models that ours decides by")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="PyTorch's")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each variant")
    parser.add_argument("--keep", action="store_true", help="keep models that the file has already")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON files")
    given = parser.parse_args()
    costs = [cost for cost in given.costs.split(",") if cost]
    budgets = [float(b) for b in given.budgets.split(",")]
    steps = given.steps
    if given.quick:
        budgets, steps = [0.5], 5
    console = Console(width=None if sys.stdout.isatty() else 136)
    places = {"step": CPU}
    if torch.cuda.is_available():
        places["step_cuda"] = CUDA
    wrong = []
    for name, models in places.items():
        path = given.output / f"{name}{'.quick' if given.quick else ''}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text())["models"] if given.keep and path.exists() else []
        reports: list[dict[str, Any]] = []
        for model in (m for m in given.models.split(",") if m in models):
            reports.append(measure(models[model](), costs, budgets, steps, console))
            console.print(table(reports[-1]))
            fresh = {r["model"] for r in reports}
            recorded = record([*(r for r in known if r["model"] not in fresh), *reports])
            path.write_text(json.dumps(recorded, indent=2) + "\n")
            found, allowed = (
                reports[-1][k] for k in ("largest_loss_difference", "loss_difference_allowed")
            )
            console.print(f"losses differ by at most {found:.1e}, relative; {allowed:g} is allowed")
            if not found <= allowed:
                wrong.append(model)
        if reports:
            console.print_json(data=recorded["summary"])
        console.print(f"written to {path}")
    if "step_cuda" not in places:
        console.print(
            "no CUDA device here: the 1.1-billion-parameter Llama in bfloat16 was not measured; the "
            "same command measures it where there is one"
        )
    if wrong:
        raise SystemExit(f"losses of {', '.join(wrong)} are apart")


if __name__ == "__main__":
    keep_freed_memory()
    # Each variant is a compilation of the same code; Dynamo gives up after eight by default.
    with (
        tempfile.TemporaryDirectory() as folder,
        torch._dynamo.config.patch(recompile_limit=64),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        os.environ["REMAT_CACHE"] = folder
        main()
