"""Time to partition, and time to compile: remat, and PyTorch's partitioner.

``partition``: both partitioners on copies of the same joint graph, a Llama with 7B-shaped layers, in turn; garbage collection off, and
no code of the two graphs generated. Processor time counts, since both sides use one thread; seconds by the clock are recorded
beside it.

``compile-time``: a first step, forward and backward, in a process of its own with empty caches: under plain Inductor, and
under remat at a ratio of the saved bytes. The ratio is that of the medians.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

import remat
from benchmarks.experiment import Case, Experiment, Row, geometric_mean, grid, in_process, timed
from benchmarks.torch_partitioner import Modules, split_by_pytorch
from benchmarks.workloads import STEPS, llama
from remat.torch_compat import use_lazy_graph_module

#: PyTorch's side takes minutes on more nodes than this.
THEIRS_UP_TO = 10_000


def measure_partition(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    layers = int(name.removeprefix("llama-"))
    joint = remat.capture(*llama(layers))
    nodes = len(joint.graph.nodes)
    for budget in dict.fromkeys(case.budget for case in cases):
        own = {case.side: case for case in cases if case.budget == budget}
        splits: dict[str, Callable[[fx.GraphModule], Modules]] = {
            "remat": functools.partial(
                remat.partitioner(budget, solver="dp", cost="flops"),
                joint_inputs=[],
                num_fwd_outputs=joint.num_fwd_outputs,
                static_lifetime_input_indices=list(joint.static_inputs),
            ),
            "pytorch": functools.partial(split_by_pytorch, joint, budget),
        }
        sides = [side for side in own if side == "remat" or nodes <= THEIRS_UP_TO]
        found: dict[str, list[tuple[float, float, Modules]]] = {side: [] for side in sides}
        # Modules are lazy, as under `torch.compile`: nobody asks for their code here.
        with use_lazy_graph_module(True):
            splits["remat"](joint.copy().graph_module)  # the process knows all operators then
            for _ in range(1 if quick else 3):
                for side in sides:
                    # A partitioner takes apart the graph that it is given.
                    split = functools.partial(splits[side], joint.copy().graph_module)
                    found[side].append(timed(split))
        for side in sides:
            clock_s, cpu_s = (statistics.median(run[at] for run in found[side]) for at in (0, 1))
            yield own[side].row(
                layers=layers,
                joint_nodes=nodes,
                nodes=[len(half.graph.nodes) for half in found[side][-1][2]],
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


def first_step(name: str, budget: float | None) -> Iterator[Row]:
    """Seconds of a first step, under remat if there is a budget."""
    step, batch = STEPS[name].build(), STEPS[name].batches(1)[0]
    backend, options = ("inductor", {}) if budget is None else ("remat", {"budget": budget})
    compiled: Any = torch.compile(step, backend=backend, options=options)
    start = time.perf_counter()
    compiled(**batch).backward()
    yield {"seconds": round(time.perf_counter() - start, 3)}


def measure_compile_time(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(1 if quick else 3):
        for case in cases[:: 1 if turn % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "REMAT_CACHE": folder}
                budget = case.budget if case.side == "remat" else None
                (row,) = in_process(first_step, name, budget, environment=caches)
                seconds[case].append(row["seconds"])
    medians = {case.side: statistics.median(found) for case, found in seconds.items()}
    for case, found in seconds.items():
        row = case.row(seconds=found)
        if case.side == "remat" and "inductor" in medians:
            row["ratio"] = round(medians["remat"] / medians["inductor"], 4)
        yield row


def summarise_compile_time(rows: list[Row]) -> Row:
    ours = [row for row in rows if "ratio" in row]
    mean = geometric_mean(row["ratio"] for row in ours)
    return {"budget": ours[0]["budget"] if ours else None, "geometric_mean": round(mean, 4)}


EXPERIMENTS = {
    "partition": Experiment(
        name="partition",
        about="processor seconds of both partitioners on the same joint graph",
        cases=grid([f"llama-{n}" for n in (2, 8, 32, 128)], (1.0, 0.3), ("remat", "pytorch")),
        quick=grid(("llama-2",), (0.3,), ("remat", "pytorch")),
        measure=measure_partition,
        summarise=summarise_partition,
        tables=("partition",),
    ),
    "compile-time": Experiment(
        name="compile-time",
        about="seconds of a first step with empty caches, beside plain Inductor's",
        cases=grid(("llama", "resnet", "gpt2-long", "bert", "unet"), (0.5,), ("inductor", "remat")),
        quick=grid(("gpt2-long",), (0.5,), ("inductor", "remat")),
        measure=measure_compile_time,
        summarise=summarise_compile_time,
        tables=("first-step",),
    ),
}
