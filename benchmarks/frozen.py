"""Plans that are kept, to judge a change of the planner: cost, saved bytes, peaks, and the time that planning takes.

Each row of `results/frozen.json` is a cell: a step, a budget, and how the step is planned, which the side says.

- ``ratio``, ``saved``: real architectures under a ratio, and under bytes of saved activations.
- ``peak``: steps under `remat.Peak`.
- ``frontier``: the frontier by peak; the cost is that at the middle of the peaks.
- ``offload``: steps that may offload over a link of 25 GB/s.
- ``graphs``: a step of several graphs that share a peak.
- ``schedule``: drawn rematerialisation graphs within a share of the peak of their own order.
- ``solver NAME``: a named solver decides alone.
- ``compiled``: steps that Inductor would compile. Code is generated, and its kernels are not compiled.

``calls`` counts Python calls during planning; it does not depend on the machine's load. ``python -m benchmarks.frozen FILE``
compares the results in a file with those that are kept, and lists the cells that are above `LIMITS`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, timed
from benchmarks.figures import geometric_mean, grouped, ratio_of
from benchmarks.plans import COST
from benchmarks.quality import FLOOR
from benchmarks.tables import RESULTS
from benchmarks.workloads import COMPILED, captured
from remat.plugins.registry import registry
from remat.solvers.run import run
from remat.solvers.schedule.problem import evaluate_schedule
from remat.testing.steps import layered
from remat.torch_compat import PyCodeCache

#: Largest multiples of a frozen figure of one cell.
LIMITS = {"cost": 1.005, "peak_bytes": 1.005, "calls": 1.1}
#: Cost model of steps that Inductor compiles: that of this machine, whose operators then have workspaces.
CPU = "auto"
LINK = "25GB/s"
#: Steps at real size, and small ones.
REAL = ("llama-7b", "resnet-50", "mixtral-8x7b", "unet")
SMALL = tuple(f"{name}-small" for name in ("llama", "gpt2", "bert", "t5", "vit", "resnet"))
NAMED = ("greedy", "dp", "native", "cpsat", "lagrangian", "graph-milp")
NINE = ("llama", "resnet", "gpt2-long", "bert", "vit", "t5", "unet", "dit", "moe")
#: Nodes and width of the drawn graphs.
DRAWN = {"drawn-100": (100, 0.27), "drawn-250": (250, 0.43), "drawn-500": (500, 0.36)}


class Planned(BaseException):
    """Ends a step that Inductor compiled before its kernels are compiled."""


class Broken(torch.nn.Module):
    """Perceptrons with graph breaks between them."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        self.graphs = graphs
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(3 * graphs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # PyTorch compiles nothing where a graph breaks inside of a loop.
        x = self.part(0, x)
        torch._dynamo.graph_break()
        x = self.part(1, x)
        if self.graphs > 2:
            torch._dynamo.graph_break()
            x = self.part(2, x)
        return x.square().sum()

    def part(self, k: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[3 * k : 3 * k + 3]:
            x = torch.tanh(block(x)).sin() + x
        return x


@functools.cache
def broken(graphs: int) -> list[remat.JointGraph]:
    torch._dynamo.reset()
    return remat.capture(Broken(graphs), (torch.randn(512, 128),), lower="eager", fullgraph=False)


def counted(work: Callable[[], Any]) -> int:
    """Python calls that a function makes."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def figures(plan: Any) -> Row:
    """The figures of one plan, or of the plans of a step's graphs together."""
    plans = [plan] if isinstance(plan, remat.Plan) else [*plan]
    return {
        "cost": sum(p.recompute_cost + p.exposed_time for p in plans),
        "bound": sum(p.recompute_bound for p in plans),
        "saved_bytes": sum(p.saved_bytes for p in plans),
        "peak_bytes": plan.peak_bytes,
    }


def planned(name: str, case: Case) -> Row:
    """The figures of a plan that is made without compiling."""
    kind, _, solver = case.side.partition(" ")
    joint = broken(int(name[-1])) if kind == "graphs" else captured(name, "eager")
    budget: Any = remat.Peak(case.budget)
    options: dict[str, Any] = {"cost": COST, "solver": solver or "auto"}
    if kind == "ratio":
        budget = case.budget
    elif kind == "saved":
        budget = remat.Saved(int(case.budget * remat.plan(joint, 1, **options).saved_bytes))
    elif kind == "offload":
        options["offload"] = LINK
    elif kind == "solver" and case.budget > 0.5:
        budget = case.budget - 0.5  # a ratio of saved bytes
    plan = functools.partial(remat.plan, joint, budget, **options)
    seconds, processor_s, made = timed(plan)
    return {**figures(made), "seconds": seconds, "processor_s": processor_s, "calls": counted(plan)}


def frontier(name: str, case: Case) -> Row:
    joint = captured(name, "eager")
    work = functools.partial(remat.frontier, joint, by="peak", cost=COST)
    seconds, processor_s, made = timed(work)
    points = made.points
    least, most = points[0].peak_bytes, points[-1].peak_bytes
    within = [p for p in points if p.peak_bytes <= (least + most) // 2]
    return {
        "cost": within[-1].recompute_cost,
        "saved_bytes": within[-1].saved_bytes,
        "peak_bytes": least,
        "points": len(points),
        "seconds": seconds,
        "processor_s": processor_s,
        "calls": counted(work),
    }


def schedule(name: str, case: Case) -> Row:
    nodes, width = DRAWN[name]
    problem = layered(nodes, width=width, seed=nodes)
    given = evaluate_schedule(problem, range(len(problem)))
    within = problem.within(math.ceil(case.budget * given.peak_bytes))
    seconds, processor_s, made = timed(lambda: run(registry().solver("auto"), within))
    return {
        "cost": made.cost - given.cost,
        "bound": made.bound - given.cost,
        "peak_bytes": made.peak_bytes,
        "seconds": seconds,
        "processor_s": processor_s,
    }


class Kernels:
    """What Inductor loads instead of a module with compiled kernels."""

    runner = recursively_apply_fns = None

    def call(self, arguments: Any) -> Any:
        raise Planned


def compiled(name: str, case: Case) -> Row:
    """The figures of a step that Inductor would compile, and seconds until its kernels would be compiled."""
    torch._dynamo.reset()
    step, batch = COMPILED[name].build(), COMPILED[name].batches(1)[0]
    budget = case.budget if case.budget == 1 else remat.Peak(case.budget)
    run: Any = torch.compile(step, backend="remat", options={"budget": budget, "cost": CPU})

    def first_call() -> None:
        with contextlib.suppress(Planned):
            run(**batch)

    with mock.patch.object(PyCodeCache, "load_by_key_path", return_value=Kernels()):
        seconds, processor_s, _ = timed(first_call)
    plan = remat.plans()[-1]
    estimated = {"estimated": plan.estimated_peak_bytes}
    return {**figures(plan), **estimated, "seconds": seconds, "processor_s": processor_s}


MEASURES = {"frontier": frontier, "schedule": schedule, "compiled": compiled}


def measure_frozen(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    for case in cases:
        yield case.row(**MEASURES.get(case.side, planned)(name, case))


def summarise_frozen(rows: list[Row]) -> Row:
    found: Row = {"cells": len(rows)}
    for side, own in grouped(rows, "side").items():
        found[side] = {
            "cost": sum(row["cost"] for row in own),
            "processor_s": round(sum(row["processor_s"] for row in own), 1),
        }
    return found


def compared(rows: Sequence[Row], frozen: Sequence[Row]) -> Row:
    """Multiples of frozen figures: geometric means by side, and the cells above `LIMITS`, the worst first."""
    keys = ("workload", "budget", "side")
    before = {tuple(row[k] for k in keys): row for row in frozen}
    pairs = [(row, before[at]) for row in rows if (at := tuple(row[k] for k in keys)) in before]
    worse: list[tuple[float, str]] = []
    means: Row = {}
    for side, own in {"all": pairs, **_by_side(pairs)}.items():
        means[side] = {}
        for key in ("cost", "peak_bytes", "saved_bytes", "calls", "processor_s"):
            ratios = [(ratio_of(a[key], b[key]), a) for a, b in own if key in a and key in b]
            if ratios:
                means[side][key] = round(geometric_mean((r for r, _ in ratios), FLOOR), 4)
            if side == "all" and key in LIMITS:
                cells = ((r, " ".join(str(row[k]) for k in keys)) for r, row in ratios)
                worse += [(r, f"{name}: {key} {r:.4f}") for r, name in cells if r > LIMITS[key]]
    return {"cells": len(pairs), "means": means, "worse": [text for _, text in sorted(worse)[::-1]]}


def _by_side(pairs: Sequence[tuple[Row, Row]]) -> dict[str, list[tuple[Row, Row]]]:
    found: dict[str, list[tuple[Row, Row]]] = {}
    for pair in pairs:
        found.setdefault(pair[0]["side"], []).append(pair)
    return found


def show_comparison(path: Path) -> None:
    """Prints how the results in a file compare with those that are kept."""
    kept = json.loads((RESULTS / "frozen.json").read_text())["rows"]
    print(json.dumps(compared(json.loads(path.read_text())["rows"], kept), indent=1))


EXPERIMENTS = {
    "frozen": Experiment(
        about="plans of a hundred cells, to compare a changed planner with",
        cases=(
            *grid(REAL, (0.2, 0.5), ("ratio", "peak")),
            *grid(REAL[1:2] + REAL[3:], (0.25,), ("offload",)),
            *grid(SMALL, (0.3,), ("ratio", "offload")),
            *grid(SMALL, (0.5,), ("saved",)),
            *grid(SMALL, (0.0, 0.1, 0.3, 0.5, 0.7), ("peak",)),
            *grid(SMALL, (None,), ("frontier",)),
            *grid(("llama-small", "resnet-small"), (0.3, 0.8), [f"solver {n}" for n in NAMED]),
            *grid(("graphs-2", "graphs-3"), (0.0, 0.3, 0.6), ("graphs",)),
            *grid(DRAWN, (0.8, 0.7), ("schedule",)),
            *grid(NINE, (1, 0.5), ("compiled",)),
        ),
        quick=(
            *grid(("llama-small",), (0.3,), ("ratio", "peak", "solver greedy")),
            *grid(("drawn-100",), (0.8,), ("schedule",)),
        ),
        measure=measure_frozen,
        summarise=summarise_frozen,
        environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"},
    ),
}

if __name__ == "__main__":
    show_comparison(Path(sys.argv[1]))
