"""Time to partition, and time to compile: remat, and PyTorch's partitioner.

``partition``: both partitioners on copies of the same joint graph, a Llama with 7B-shaped layers, in turn; garbage collection off, and
no code of the two graphs generated. Processor time counts, since both sides use one thread; seconds by the clock are recorded
beside it.

``compile-time``: processor seconds of a first step, forward and backward, in a process of its own with empty caches, and in a
second process with the caches of the first. Sides: plain Inductor; remat at a ratio of the saved bytes; remat within a peak in
bytes, the budget being its place between the least peak and that of budget 1. Kernels are compiled one at a time, in the
process, so that their processor time counts.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch import config as functorch

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, in_process, timed
from benchmarks.figures import geometric_mean, grouped
from benchmarks.torch_partitioner import Modules, pytorchs, split_by
from benchmarks.workloads import COMPILED, captured
from remat.torch_compat import use_lazy_graph_module
from tests.model_type_steps import cpu_seconds

#: PyTorch's side takes minutes on more nodes than this.
THEIRS_UP_TO = 10_000


def measure_partition(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name)
    nodes = len(joint.graph.nodes)
    for budget in dict.fromkeys(case.budget for case in cases):
        own = {case.side: case for case in cases if case.budget == budget}
        splits = {
            "remat": remat.partitioner(budget, solver="dp", cost="flops"),
            "pytorch": pytorchs(budget),
        }
        sides = [side for side in own if side == "remat" or nodes <= THEIRS_UP_TO]
        found: dict[str, list[tuple[float, float, Modules]]] = {side: [] for side in sides}
        # Modules are lazy, as under `torch.compile`: nobody asks for their code here.
        with use_lazy_graph_module(True):
            # The process knows all operators then.
            split_by(splits["remat"], joint, joint.copy().graph_module)
            for _ in range(1 if quick else 3):
                for side in sides:
                    # A partitioner takes apart the graph that it is given.
                    fresh = joint.copy().graph_module
                    found[side].append(timed(partial(split_by, splits[side], joint, fresh)))
        for side in sides:
            clock_s, cpu_s = (statistics.median(run[at] for run in found[side]) for at in (0, 1))
            yield own[side].row(
                layers=int(name.removeprefix("llama-")),
                joint_nodes=nodes,
                **{"collection off": {"seconds": cpu_s, "clock_seconds": clock_s}},
            )


def summarise_partition(rows: list[Row]) -> Row:
    """Exponents of remat's time over the number of joint nodes: over all sizes, and over the last two."""
    points = sorted(
        (row["joint_nodes"], row["collection off"]["seconds"])
        for row in rows
        if row["side"] == "remat" and row["budget"] == 1
    )
    if len(points) < 2:
        return {}

    def exponent(a: tuple[int, float], b: tuple[int, float]) -> float:
        return math.log(b[1] / a[1]) / math.log(b[0] / a[0])

    ends = {"overall": (points[0], points[-1]), "last": (points[-2], points[-1])}
    return {"growth": {name: exponent(*pair) for name, pair in ends.items()}}


def peak_between(name: str, place: float) -> Iterator[int]:
    """Bytes at a place between the least peak of a step, as it is estimated under Inductor, and that of budget 1."""
    step, batch = COMPILED[name].build(), COMPILED[name].batches(1)[0]
    joint = remat.capture(step, (), batch)
    least, full = (remat.plan(joint, b).estimated_peak_bytes for b in (remat.Peak(0.0), 1.0))
    yield int(least + place * (full - least))


def first_step(name: str, side: str, budget: float | int) -> Iterator[Row]:
    """Processor seconds of a first step: plain Inductor's, with PyTorch's partitioner at this ratio, or remat's."""
    step, batch = COMPILED[name].build(), COMPILED[name].batches(1)[0]
    ours = side in ("remat", "peak")
    how: Row = {"backend": "remat", "options": {"budget": budget}} if ours else {}
    compiled: Any = torch.compile(step, **how)
    start = cpu_seconds()
    with functorch.patch(activation_memory_budget=budget if side == "pytorch" else 1.0):
        compiled(**batch).backward()
    row: Row = {"seconds": round(cpu_seconds() - start, 2)}
    if isinstance(budget, int):
        (plan,) = remat.plans()
        figures = {"estimated": plan.estimated_peak_bytes, "compiled": plan.peak_bytes}
        row |= {"bytes": budget, **figures}
    yield row


def measure_compile_time(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    plain: Row | None = None
    for case in cases:
        budget = case.budget
        if case.side == "peak":
            (budget,) = in_process(peak_between, name, case.budget)
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                "TORCHINDUCTOR_CACHE_DIR": folder,
                "REMAT_CACHE": folder,
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            }
            # A process has ended, and has written its caches, before the next one starts.
            (cold,), (warm,) = (
                in_process(first_step, name, case.side, budget, environment=environment)
                for _ in range(2)
            )
        row = case.row(**cold, warm_seconds=warm["seconds"])
        if case.side == "inductor":
            plain = row
        elif plain is not None:
            for key, of in (("ratio", "seconds"), ("warm_ratio", "warm_seconds")):
                row[key] = round(row[of] / plain[of], 4)
        yield row


def summarise_compile_time(rows: list[Row]) -> Row:
    """Means and worst ratios by side, cold and warm; estimates of the peak, and how much of the budget is used."""
    found: Row = {}
    by_side = grouped(rows, "side")
    for side in ("pytorch", "remat", "peak"):
        own = [row for row in by_side.get(side, ()) if "ratio" in row]
        if own:
            found[side] = {"budget": own[0]["budget"]}
            for warm in ("", "warm_"):
                ratios = [row[f"{warm}ratio"] for row in own]
                found[side][f"{warm}geometric_mean"] = round(geometric_mean(ratios), 4)
                found[side][f"{warm}worst"] = max(ratios)
    if peaks := by_side.get("peak"):
        found["peak"] |= {
            "largest_estimate_off": max(abs(r["estimated"] / r["compiled"] - 1) for r in peaks),
            "least_used": min(r["compiled"] / r["bytes"] for r in peaks),
        }
    return found


EXPERIMENTS = {
    "partition": Experiment(
        about="processor seconds of both partitioners on the same joint graph",
        cases=grid([f"llama-{n}" for n in (2, 8, 32, 128)], (1.0, 0.3), ("remat", "pytorch")),
        quick=grid(("llama-2",), (0.3,), ("remat", "pytorch")),
        measure=measure_partition,
        summarise=summarise_partition,
    ),
    "compile-time": Experiment(
        about="processor seconds of a first step, with empty and with full caches, beside plain Inductor's",
        cases=grid(
            ("llama", "resnet", "gpt2-long", "bert", "vit", "t5", "unet", "dit", "moe"),
            (0.5,),
            ("inductor", "pytorch", "remat", "peak"),
        ),
        quick=grid(("gpt2-long",), (0.5,), ("inductor", "remat", "peak")),
        measure=measure_compile_time,
        summarise=summarise_compile_time,
        tables=("first-step",),
    ),
}
