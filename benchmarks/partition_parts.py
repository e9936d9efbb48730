"""Parts of partitioning against their counterparts in PyTorch, and what is around the passes."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import networkx as nx
import numpy as np
from torch import fx
from torch._functorch import partitioners

import remat
from remat.api import default_pipeline
from remat.passes.core.base import Pass
from remat.passes.core.pipeline import Pipeline
from remat.passes.core.state import PassResult, State
from remat.passes.joint.cse import CommonSubexpressions
from remat.passes.split.partition import Partition
from remat.passes.split.reorder_backward import ReorderBackward
from remat.planning.pipelines import shaped

#: What does the same in PyTorch's partitioner.
COUNTERPARTS: dict[str, tuple[type[Any], str]] = {
    "cse": (CommonSubexpressions, "fx_graph_cse"),
    "extraction": (Partition, "_extract_fwd_bwd_modules"),
    "reordering": (ReorderBackward, "reordering_to_mimic_autograd_engine"),
}


def cuts(partition: Callable[[], Any]) -> list[dict[str, Any]]:
    """The minimum cuts of a run of PyTorch's partitioner, by NetworkX and again by OR-Tools."""
    found: list[dict[str, Any]] = []
    original = nx.minimum_cut

    def minimum_cut(graph: Any, source: str, sink: str, **kwargs: Any) -> Any:
        start = time.process_time()
        value, partition = original(graph, source, sink, **kwargs)
        spent = time.process_time() - start
        mine, my_value = max_flow(graph, source, sink)
        found.append(
            {
                "networkx_seconds": spent,
                "networkx_value": int(value),
                "ortools_seconds": mine,
                "ortools_value": my_value,
                "vertices": len(graph),
                "edges": graph.number_of_edges(),
            }
        )
        return value, partition

    with mock.patch.object(nx, "minimum_cut", minimum_cut):
        partition()
    return found


def max_flow(graph: Any, source: str, sink: str) -> tuple[float, int]:
    """OR-Tools' maximum flow on PyTorch's own network: seconds from arrays to the cut, and its value."""
    from ortools.graph.python import max_flow as ortools

    number = {v: i for i, v in enumerate(graph)}
    edges = list(graph.edges(data="capacity", default=float("inf")))
    finite = [c for _, _, c in edges if c != float("inf")]
    big = int(sum(finite)) + 1
    tails = np.array([number[u] for u, _, _ in edges], dtype=np.int64)
    heads = np.array([number[v] for _, v, _ in edges], dtype=np.int64)
    # 2^62 over the arcs at the source keeps any sum of capacities in range.
    limit = min(big, 2**62 // (1 + graph.degree(source)))
    caps = np.array([limit if c == float("inf") else min(int(c), limit) for _, _, c in edges])
    start = time.process_time()
    flow = ortools.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, caps.astype(np.int64))
    status = flow.solve(number[source], number[sink])
    flow.get_sink_side_min_cut()
    seconds = time.process_time() - start
    assert status == flow.OPTIMAL, status
    return seconds, int(flow.optimal_flow())


def against_counterparts(
    joint: remat.JointGraph,
    ours: Callable[[fx.GraphModule], Any],
    theirs: Callable[[fx.GraphModule], Any],
    repeat: int,
) -> dict[str, tuple[float, float]]:
    """Seconds of each part, ours and PyTorch's, on the same graph and without generating code."""
    mine: dict[str, list[float]] = defaultdict(list)
    other: dict[str, list[float]] = defaultdict(list)
    gc.collect()
    gc.disable()
    for _ in range(repeat):
        with _without_code():
            with _timing([(kind, "run", name) for name, (kind, _) in COUNTERPARTS.items()], mine):
                ours(joint.copy().graph_module)
            functions = [(partitioners, f, name) for name, (_, f) in COUNTERPARTS.items()]
            with _timing(functions, other):
                theirs(joint.copy().graph_module)
    gc.enable()
    return {
        name: (statistics.median(mine[name]), statistics.median(other[name]))
        for name in COUNTERPARTS
    }


@contextmanager
def _without_code() -> Iterator[None]:
    """No code is generated for the modules that are made, on either side."""
    with mock.patch.object(fx.GraphModule, "recompile"):
        yield


@contextmanager
def _timing(functions: list[tuple[Any, str, str]], found: dict[str, list[float]]) -> Iterator[None]:
    """Times functions, given as owner, attribute and name, while they are called by others."""

    def watched(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                found[name].append(time.process_time() - start)

        return run

    patches = [
        mock.patch.object(owner, attribute, watched(getattr(owner, attribute), name))
        for owner, attribute, name in functions
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def manager_overhead(joint: remat.JointGraph, budget: float, rounds: int = 7) -> dict[str, float]:
    """What the manager adds to the passes of the default pipeline, as a share of their time.

    Two ways: the passes by hand and through the manager, turn and turn about, of which the least
    counts, good to a few hundredths on a machine that does other things; and the manager alone, on
    as many passes that do nothing, against the passes by hand.
    """
    passes = default_pipeline(budget, "dp", "flops").passes
    manager, idle = Pipeline(passes), Pipeline((_Nothing(),) * len(passes))
    least: dict[str, float] = {}

    def timed(name: str, run: Callable[[State], Any], state: State) -> None:
        start = time.process_time()
        run(state)
        spent = time.process_time() - start
        least[name] = min(spent, least.get(name, spent))

    def by_hand(state: State) -> None:
        for p in passes:
            state = p.run(state).state

    def times_100(state: State) -> None:
        for _ in range(100):
            idle.run(state, in_place=True, verify=False)

    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, run in (
            ("by hand", by_hand),
            ("managed", lambda state: manager.run(state, in_place=True, verify=False)),
            ("idle", times_100),
        ):
            timed(name, run, shaped(joint, in_place=False, count_outputs=False))
    gc.enable()
    return {
        "managed against by hand": least["managed"] / least["by hand"] - 1,
        "manager alone": least["idle"] / 100 / least["by hand"],
    }


@dataclass(frozen=True)
class _Nothing(Pass):
    """Does nothing."""

    name: ClassVar[str] = "nothing"

    def run(self, state: State) -> PassResult:
        return PassResult(state=state, modified=False)


def import_seconds(rounds: int = 5) -> dict[str, float]:
    """What importing takes in a fresh process that has imported torch; the least counts."""
    statements = {"import remat": "import remat", "remat.plan": "import remat; remat.plan"}
    return {
        name: min(_seconds_of(code) for _ in range(rounds)) for name, code in statements.items()
    }


def _seconds_of(code: str) -> float:
    text = f"import time, torch; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return float(done.stdout)
