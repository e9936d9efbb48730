"""Selective checkpointing of real steps: what is estimated, what is measured, and PyTorch's program beside it.

The side ``step``: models of ``transformers`` with random weights run on the CPU, within a share of the step's peak.

- Activation bytes at the end of forward, and the peak: estimated, and measured by following every storage until it is
  freed, with the plan applied by `remat.sac.apply`.
- The time of running again: estimated operator by operator (``operator-level-benchmark``), and measured in backward
  under the plan, the median of some steps.
- Whether gradients are those of the same step without a plan, bit by bit.
- PyTorch's ``sac_milp`` on the same statistics, with the two segments of our envelope for each module (PyTorch's needs the
  package ``pwlf`` to fit its own). PyTorch's ``get_optimal_checkpointing_policy_per_module`` turns its decision into operators,
  which are simulated like ours. Its time does not include that second step; ours includes it.
  ``solve_s`` has ours at PyTorch's gap of 5 %, and at the default gap.

The side ``program``: the program alone, for a Llama of many layers on fake tensors.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import networkx as nx
import torch
from torch import nn

from benchmarks.experiment import KEPT_MEMORY, Case, Experiment, Row, grid, timed
from benchmarks.figures import above
from benchmarks.workloads import CHECKPOINTED, llama_of
from remat.checkpointing import estimate, plan
from remat.errors import BudgetError
from remat.running.measure import StorageTracker, as_before, measure_step, run_backward, run_forward
from remat.sac import SACPlan, apply, greedy_order, remove, upper_envelope
from remat.sac.estimation.modules import loss_only
from remat.sac.solve.choices import StoredSet, candidates
from remat.sac.solve.peaks import Simulated, simulate
from tests.models import Step

#: How far estimates of activation bytes may be off.
BYTES_OFF = 0.03
#: The gap at which PyTorch's program stops.
THEIR_GAP = 0.05
PS_PER_MS = 10**9


def measure(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    if cases[0].side == "step":
        yield from steps(name, cases, 3 if quick else 15)
    else:
        yield from program(name, cases)


def steps(name: str, cases: Sequence[Case], repeats: int) -> Iterator[Row]:
    work = CHECKPOINTED.get(name) or llama_of(2, width=48)
    model, kwargs = work.model().train(), work.batch()
    tree = estimate(model, (), kwargs, mode="operator-level-benchmark")
    step = Step(model=model, kwargs=kwargs, loss=lambda out: out.loss)
    eager = step.train().gradients
    for case in cases:
        try:
            found, solve_s = solved(tree, case.budget)
        except BudgetError as error:
            print(f"{name} at {case.budget}: {error}", flush=True)
            continue
        apply(model, found)
        gradients = step.train().gradients
        remove(model)
        model.zero_grad(set_to_none=True)
        held, measured = measured_bytes(model, kwargs, found)
        simulated = simulate_plan(tree, found)
        yield case.row(
            budget_bytes=found.budget_bytes,
            modules=len(found.modules),
            activations=(int(simulated.memory[tree.forward_end]) - measured.input_bytes, held),
            peak=(found.peak_bytes, measured.peak_bytes),
            again_ms=(found.recompute_ms, measured_again(model, kwargs, found, repeats)),
            equal=all(torch.equal(gradients[name], each) for name, each in eager.items()),
            solve_s=solve_s,
            theirs=their_plan(tree, found.budget_bytes),
        )


def program(name: str, cases: Sequence[Case]) -> Iterator[Row]:
    """The program alone, for a Llama of many layers."""
    work = llama_of(int(name.split()[2]))
    with torch.device("meta"):
        tree = estimate(work.model().train(), (), work.batch())
    for case in cases:
        ours, solve_s = solved(tree, case.budget)
        yield case.row(
            modules=len(tree.modules),
            budget_bytes=ours.budget_bytes,
            peak=ours.peak_bytes,
            recompute_ms=ours.recompute_ms,
            bound_ms=ours.bound_ms,
            solve_s=solve_s,
            theirs=their_plan(tree, ours.budget_bytes),
        )


def solved(tree: Any, share: float | None) -> tuple[SACPlan, tuple[float, float]]:
    """The plan within a share of the peak, and seconds: at PyTorch's gap, and at the default one."""
    import scipy.optimize  # noqa: F401 - as PuLP is imported before theirs is timed

    coarse_s = timed(lambda: plan(tree, memory=share, gap=THEIR_GAP))[0]
    default_s, _, found = timed(lambda: plan(tree, memory=share))
    return found, (coarse_s, default_s)


def simulate_plan(tree: Any, found: SACPlan) -> Simulated:
    """The memory of a step under a plan."""
    places = {m.name: k for k, m in enumerate(tree.modules)}
    decision = {
        places[tree[m.name].name]: StoredSet(
            stored=m.stored, kept_bytes=m.stored_bytes, recompute_ps=0
        )
        for m in found.modules
    }
    return simulate(tree, decision, tree.memory(found.world_size))


def measured_bytes(model: nn.Module, kwargs: dict[str, Any], found: SACPlan) -> tuple[int, Any]:
    """Activation bytes at the end of forward, and the memory of the step, both under a plan."""
    apply(model, found)
    resident = [*model.parameters(), *model.buffers()]
    try:
        with as_before([*resident, *kwargs.values()], torch.device("cpu")):
            tracker = StorageTracker()
            for tensor in (*resident, *kwargs.values()):
                tracker.add(tensor)
            before = tracker.current
            with tracker:
                result = run_forward(loss_only(model), (), kwargs)
                held = tracker.current - before
            del result
        return held, measure_step(loss_only(model), (), kwargs, resident=resident)
    finally:
        remove(model)


def measured_again(model: nn.Module, kwargs: dict[str, Any], found: SACPlan, repeats: int) -> float:
    """Milliseconds of a step in which modules run again, the median of some steps.

    A module runs again while backward runs: from there on, the time of its forward counts.
    """
    spent: list[float] = []

    def clocked(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return forward(*args, **named)
            finally:  # checkpointing stops early, by an exception
                spent.append(time.perf_counter() - started)

        return run

    found_ms = []
    with contextlib.ExitStack() as stack:
        for chosen in found.modules:
            module = model.get_submodule(chosen.name)
            stack.enter_context(mock.patch.object(module, "forward", clocked(module.forward)))
        apply(model, found)
        for _ in range(repeats):
            result = run_forward(loss_only(model), (), kwargs)
            spent.clear()
            run_backward(result)
            found_ms.append(1e3 * sum(spent))
            model.zero_grad(set_to_none=True)
        remove(model)
    return statistics.median(found_ms)


def their_plan(tree: Any, budget: int) -> Row:
    """Runs PyTorch's ``sac_milp`` on the statistics of a tree, with remat's as its envelopes.

    Returns:
        The recompute time and the peak that it states; the recompute time and the simulated peak of its decision; whether
        that is within the budget; its seconds, policies not included.
    """
    from torch.distributed._tools import sac_ilp

    units = [tree.modules[k].name for k in candidates(tree)]
    graph = as_graph(tree)
    solve_s, _, (chosen, said_ms, said_bytes) = timed(
        lambda: sac_ilp.sac_milp(graph, budget / 2**30, ac_units=units)
    )
    decision: dict[int, StoredSet] = {}
    places = {m.name: k for k, m in enumerate(tree.modules)}
    for name, discarded in chosen.items():
        module = tree[name]
        stats = module.stats
        kept = sac_ilp.get_optimal_checkpointing_policy_per_module(stats, 1 - discarded)
        if not kept:  # no set of operators keeps so little
            continue
        stored = tuple(i for i, keep in enumerate(kept) if keep)
        again_ms = (ms for ms, keep in zip(stats.runtimes, kept, strict=True) if not keep)
        decision[places[name]] = StoredSet(
            stored=stored,
            kept_bytes=sum(stats.memory[i] for i in stored),
            recompute_ps=round(PS_PER_MS * sum(again_ms)),
        )
    peak = simulate(tree, decision, tree.memory()).peak_bytes
    return {
        "said_ms": said_ms,
        "said_bytes": said_bytes,
        "recompute_ms": sum(c.recompute_ps for c in decision.values()) / PS_PER_MS,
        "peak_bytes": int(peak),
        "fits": bool(peak <= budget),
        "solve_s": solve_s,
    }


def as_graph(tree: Any) -> Any:
    """A tree as ``torch.distributed._tools.ilp_utils.Graph``."""
    from torch.distributed._tools.ilp_utils import Graph

    ran = [m for m in tree.modules if m.calls]
    graph = Graph(len(ran))
    inside = nx.DiGraph((m.parent, k) for k, m in enumerate(tree.modules))  # -1 is above the roots
    ended = [tree.modules[k] for k in nx.dfs_postorder_nodes(inside, -1) if k >= 0]
    post_order = [module.name for module in ended if module.calls]
    graph.fw_post_order = post_order
    for index, module in enumerate(ran):
        place = {"index": index, "pos_fw_post_order": post_order.index(module.name)}
        graph.add_node(node_of(tree, module) | place)
    for i, a in enumerate(ran):
        for j in range(i, len(ran)):
            if ran[j].name == a.name or ran[j].name.startswith(f"{a.name}."):
                graph.ad_matrix[i][j] = 1
    return graph


def node_of(tree: Any, module: Any) -> Row:
    """What PyTorch's program reads of a module."""
    call, stats = module.calls[0], module.stats
    node: Row = {
        "fqn": module.name,
        "param_per_module": module.parameter_bytes,
        "grad_total": int(tree.gradients[call.back]),
        "act_fw_per_module": module.activation_bytes,
        "act_total": int(tree.other[call.back]),
        "act_grad_per_module": call.gradient_bytes,
        "is_leaf": module.is_leaf or stats is None,
    }
    names = ("sac_runtime", "sac_memory", "n_segments", "slopes", "intercepts")
    if node["is_leaf"]:
        return {**node, **dict(zip(names, (0.0, 0, 0, [], []), strict=True))}
    fitted = upper_envelope(stats, greedy_order(stats))
    node |= {name: getattr(fitted, name) for name in names}
    return {**node, "sac_memory": max(1, fitted.sac_memory)}


def summarise(rows: list[Row]) -> Row:
    measured = [row for row in rows if row["side"] == "step"]
    return {
        "limits": {"bytes_off": BYTES_OFF},
        "largest_activations_off": max(
            (abs(r["activations"][0] / r["activations"][1] - 1) for r in measured), default=0.0
        ),
        "other_gradients": [f"{r['workload']} {r['budget']}" for r in measured if not r["equal"]],
    }


def missed(summary: Row) -> list[str]:
    others = [f"{name}: other gradients" for name in summary["other_gradients"]]
    return above(summary, {"largest_activations_off": BYTES_OFF}) + others


EXPERIMENTS = {
    "sac": Experiment(
        about="selective checkpointing of modules: estimated, measured, and PyTorch's sac_milp",
        cases=(
            *grid(CHECKPOINTED, (0.85, 0.7), ("step",)),
            *grid(("Llama of 80 layers",), (0.8, 0.5, 0.4), ("program",)),
        ),
        quick=(
            *grid(("small Llama",), (0.85,), ("step",)),
            *grid(("Llama of 4 layers",), (0.8,), ("program",)),
        ),
        measure=measure,
        summarise=summarise,
        tables=("checkpointing", "checkpointing-large"),
        missed=missed,
        environment=KEPT_MEMORY,
    ),
}
