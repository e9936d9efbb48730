"""How near predicted memory is to the memory that a step really takes, on the CPU.

``peak``: eager lowering. The simulated peak of a plan, without workspaces of operators, against the *storages* that were alive
(a dispatch mode follows the results of operators until they are freed); and the plan's own peak, with workspaces, against
the *allocator* (the profiler's record of every allocation).

``compiled-memory``: steps that Inductor compiled. The simulated peak, the one that is expected before compiling, the one
that is known after it, and the allocator's; bytes held from forward to backward, by the plan and by autograd.

Both have three sides. ``ratio``: budgets that are a ratio of saved bytes. ``within``: `remat.Peak` budgets in bytes, the
budget of the row being their place between the least and the highest peak of the ratios. ``falling``: ``Peak(share)`` from
1 to 0; the measured peak should fall with it.

``fit``: the peak of a whole training step, optimizer included: at budget 1, and within 93 % of that peak.

``hooks``: what saved-tensor hooks save on a training step of a small Llama, eager lowering, and what they cost in accuracy: without
hooks, and with every ready-made pair. Saved bytes and simulated peaks are the plan's; peaks are those of storages. The gradient's
error is the norm of the difference of all gradients together, relative to their norm without hooks. The side ``float8 by PyTorch``
gives the same pair to PyTorch instead (``torch.autograd.graph.saved_tensors_hooks`` with graph modules), which inlines it at the end
of forward and at the start of backward; its peak holds every saved tensor unpacked. ``cpu-offload`` is not measured: on a CPU
everything is in the host's memory already, and the pair declines.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import fx

import remat
from benchmarks.experiment import Case, Experiment, Row, grid
from benchmarks.figures import above, grouped
from benchmarks.workloads import FITTED, text
from remat.graph.memory.liveness import StepWalk, own_outputs
from remat.passes.packing.pairs import pack_float8, unpack_float8
from remat.running.measure import measure_step
from tests.fitting.fit_cells import cells as fit_cells
from tests.models import ZOO, Outcome, Step, build
from tests.steps import measure_held

#: Largest difference that the simulation may have, and least rank correlation.
LIMIT, CORRELATION = 0.02, 0.99
#: Largest share by which a step may go above the peak that was asked for.
OVER = 0.01
RATIOS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1)
QUICK = ("llama", "resnet", "mutated_buffer")


def measure(cell: Callable[[str, Any, Case], Row], by: str, margin: int) -> Any:
    """Measures the cases of one model, ratios first: the places of ``within`` lie between their peaks.

    Args:
        cell: measures a model under a budget.
        by: the entry of its rows that holds the measured peak.
        margin: bytes that a place between two peaks is moved up.
    """

    def run(name: str, asked: Sequence[Case], quick: bool) -> Iterator[Row]:
        peaks: list[int] = []
        for case in asked:
            budget: Any = case.budget
            if case.side == "within":
                low, high = min(peaks), max(peaks)
                budget = remat.Peak(low + int((high - low) * budget) + margin)
            elif case.side == "falling":
                budget = remat.Peak(budget)
            row = case.row(**cell(name, budget, case))
            if case.side == "ratio":
                peaks.append(row[by])
            yield row

    return run


def run_compiled(name: str, budget: Any, lower: str) -> tuple[Any, Any]:
    """The small model, and its step compiled under a budget."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = build(name)
    options = {"budget": budget, "lower": lower}
    return step, torch.compile(step.model, backend="remat", options=options)


def eager_cell(name: str, budget: Any, case: Case) -> Row:
    step, compiled = run_compiled(name, budget, "eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", remat.PeakWarning)
        storages = measure_step(compiled, step.args, step.kwargs).peak_bytes
    plan = remat.plans()[-1]
    outputs = own_outputs(plan.forward)
    # Storages do not see what an operator takes while it runs.
    simulated = max(StepWalk(plan.forward, plan.backward, outputs).alive(workspaces=False))
    row = {"simulated": simulated, "planned": plan.peak_bytes, "storages": storages}
    if case.side == "within":
        row["asked"] = budget.nbytes
    if case.side == "ratio":
        row["allocator"] = measure_step(compiled, step.args, step.kwargs, by="allocator").peak_bytes
        row["saved_bytes"] = plan.saved_bytes
        row["warned"] = any(issubclass(w.category, remat.PeakWarning) for w in seen)
    return row


def inductor_cell(name: str, budget: Any, case: Case) -> Row:
    before = len(remat.plans())
    step, compiled = run_compiled(name, budget, "inductor")
    try:
        allocated = measure_step(compiled, step.args, step.kwargs, by="allocator").peak_bytes
    except Exception as error:  # Dynamo wraps the errors of a backend
        if not isinstance(error, remat.RematError) and "BudgetError" not in str(error):
            raise
        return {"peak_budget": f"peak:{budget.nbytes}B", "refused": str(error)[:400]}
    assert len(remat.plans()) > before
    plan = remat.plans()[-1]
    return {
        **({"peak_budget": plan.budget} if case.side != "ratio" else {}),
        "simulated": plan.planned_peak_bytes,
        "expected": plan.estimated_peak_bytes,
        "known": plan.peak_bytes,
        "allocated": allocated,
        "expected_off": round(plan.estimated_peak_bytes / allocated - 1, 5),
        "known_off": round(plan.peak_bytes / allocated - 1, 5),
        "planned_saved": plan.planned_saved_bytes,
        "saved": plan.saved_bytes,
        "held": measure_held(compiled, step.args, step.kwargs),
        "capacity": plan.capacity,
    }


def largest_rise(rows: Iterable[Row], by: str) -> float:
    """The largest share by which the measured peak rises where the share of the peak falls."""
    falling = grouped(row for row in rows if row["side"] == "falling").values()
    rises = (b[by] / a[by] - 1 for of in falling for a, b in pairwise(of))
    return max(rises, default=0.0)


def summarise_peak(rows: list[Row]) -> Row:
    cells = [row for row in rows if row["side"] == "ratio"]
    simulated, storages, allocator = (
        [row[key] for row in cells] for key in ("simulated", "storages", "allocator")
    )
    planned = [row.get("planned", row["simulated"]) for row in cells]
    off = [a / b - 1 for a, b in zip(simulated, storages, strict=True)]
    top = {row["workload"]: row["storages"] for row in cells if row["budget"] == 1}
    higher = [r["warned"] for r in cells if r["storages"] > top.get(r["workload"], r["storages"])]
    asked = [row["storages"] / row["asked"] - 1 for row in rows if row["side"] == "within"]
    return {
        "limits": {"error": LIMIT, "rank_correlation": CORRELATION},
        "largest_error": max(map(abs, off)),
        "exact": off.count(0),
        "spearman": float(spearmanr(simulated, storages).statistic),
        "allocator_error": max(1 - a / b for a, b in zip(planned, allocator, strict=True)),
        "allocator_spearman": float(spearmanr(planned, allocator).statistic),
        "over": max(asked, default=0.0),
        "largest_rise": largest_rise(rows, "storages"),
        "above_budget_1": higher.count(False),
        "above_budget_1_warned": higher.count(True),
        "warned": sum(row["warned"] for row in cells),
    }


def missed_peak(summary: Row) -> list[str]:
    figures = {**summary, "1 - spearman": 1 - summary["spearman"]}
    return above(figures, {"largest_error": LIMIT, "over": OVER, "1 - spearman": 1 - CORRELATION})


def summarise_compiled(rows: list[Row]) -> Row:
    cells, within = ([r for r in rows if r["side"] == side] for side in ("ratio", "within"))
    limits = [int(r["peak_budget"].removeprefix("peak:").removesuffix("B")) for r in within]
    reached = [row.get("allocated", math.inf) for row in within]
    return {
        "largest_expected_off": max(abs(row["expected_off"]) for row in cells),
        "largest_known_off": max(abs(row["known_off"]) for row in cells),
        "held_equal": f"{sum(r['held'] == r['saved'] for r in cells)} of {len(cells)}",
        "held_within": f"{sum(r['held'] <= r['capacity'] for r in cells)} of {len(cells)}",
        "peaks_held": sum(peak <= limit for peak, limit in zip(reached, limits, strict=True)),
        "peaks_refused": sum("refused" in row for row in within),
        "peaks": len(within),
        "largest_rise": round(largest_rise(rows, "allocated"), 5),
    }


def measure_fit(name: str, asked: Sequence[Case], quick: bool) -> Iterator[Row]:
    for case in asked:
        for found in fit_cells(name, tuple(FITTED[name].split()), case.side):
            yield case.row(**{k: v for k, v in found.items() if k != "optimizer"})


def summarise_fit(rows: list[Row]) -> Row:
    return {"largest_off": max(abs(row["off"]) for row in rows)}


#: What the float8 pair may leave of the saved bytes, and how far from the simulated fall of the
#: peak the measured one may be.
HOOK_LIMITS = {"share": 0.3, "off": 0.02}
HOOKS = ("none", "bf16", "int8", "float8", "float8 by PyTorch")


def llama(*, quick: bool) -> Step:
    """A Llama with random weights whose activations outweigh its parameters."""
    width, batch, seq = (64, 4, 64) if quick else (256, 8, 128)
    work = text(
        "llama", batch, seq, vocab_size=1024, hidden_size=width, intermediate_size=11 * width // 4,
        num_hidden_layers=2 if quick else 4, num_attention_heads=width // 32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kwargs = work.batch()
        model = work.model().train()
    return Step(model=model, kwargs=kwargs, loss=lambda out: out.loss)


def measure_hooks(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    step = llama(quick=quick)
    plain: dict[float | None, Outcome] = {}
    for case in cases:
        torch._dynamo.reset()
        hooks, _, by_pytorch = case.side.partition(" by ")
        options: dict[str, Any] = {"budget": case.budget, "lower": "eager"}
        if hooks != "none" and not by_pytorch:
            options["hooks"] = hooks
        compiled: Any = torch.compile(step.model, backend="remat", options=options)
        run = within_pytorchs_hooks(compiled) if by_pytorch else compiled
        outcome = step.train(run)
        resident = [*step.model.parameters(), *step.model.buffers()]
        peak = measure_step(run, step.args, step.kwargs, resident=resident).peak_bytes
        plan = remat.plans()[-1]
        yield case.row(
            saved=0 if by_pytorch else plan.saved_bytes,
            simulated=0 if by_pytorch else plan.peak_bytes,
            measured=peak,
            error=outcome.gradient_distance(plain.setdefault(case.budget, outcome)),
        )


fx.wrap("pack_float8")  # a leaf of PyTorch's graph modules, as is the next one


@fx.wrap  # type: ignore[untyped-decorator]
def leaf_unpack(packed: Any) -> Any:
    return packed if isinstance(packed, torch.Tensor) else unpack_float8(packed)


def within_pytorchs_hooks(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Calls with the float8 pair as PyTorch takes it for inlining."""
    pack = fx.symbolic_trace(lambda x: pack_float8(x))
    unpack = fx.symbolic_trace(lambda packed: leaf_unpack(packed))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return compiled(*args, **kwargs)

    return run


def summarise_hooks(rows: list[Row]) -> Row:
    plain = {row["budget"]: row for row in rows if row["side"] == "none"}
    off, shares = [], []
    for row in rows:
        of = plain[row["budget"]]
        if row is not of and "by" not in row["side"]:
            simulated, measured = (of[key] - row[key] for key in ("simulated", "measured"))
            off.append(abs(measured / simulated - 1) if simulated else float("inf"))
        if (row["side"], row["budget"]) == ("float8", 1):
            shares.append(row["saved"] / of["saved"])
    return {"limits": HOOK_LIMITS, "share": max(shares), "off": max(off)}


EXPERIMENTS = {
    "peak": Experiment(
        about="the simulated peak of plans, against the memory of their steps, eager lowering",
        cases=(
            *grid(ZOO, RATIOS, ("ratio",)),
            *grid(ZOO, (0.05, 0.3, 0.7), ("within",)),
            *grid(ZOO, [tenths / 10 for tenths in range(10, -1, -1)], ("falling",)),
        ),
        quick=(
            *grid(QUICK, (0, 0.5, 1), ("ratio",)),
            *grid(QUICK, (0.3,), ("within",)),
            *grid(QUICK, (1.0, 0.5, 0.0), ("falling",)),
        ),
        measure=measure(eager_cell, "storages", 16),
        summarise=summarise_peak,
        tables=("memory",),
        missed=missed_peak,
    ),
    "compiled-memory": Experiment(
        about="the expected and the known peak of steps that Inductor compiled, against the allocator",
        cases=(
            *grid(ZOO, (1.0, 0.5, 0.2, 0.1), ("ratio",)),
            *grid(ZOO, (0.75, 0.5, 0.25), ("within",)),
            *grid(ZOO, (1.0, 0.75, 0.5, 0.25, 0.0), ("falling",)),
        ),
        quick=(*grid(QUICK[2:], (1.0, 0.2), ("ratio",)), *grid(QUICK[2:], (0.5,), ("within",))),
        measure=measure(inductor_cell, "allocated", 0),
        summarise=summarise_compiled,
        tables=("memory",),
    ),
    "fit": Experiment(
        about="the peak of whole training steps, as remat.fit predicts it, against the allocator",
        cases=grid(FITTED, sides=("adamw", "sgd:momentum=0.9")),
        quick=grid(("gpt2",), sides=("sgd:momentum=0.9",)),
        measure=measure_fit,
        summarise=summarise_fit,
        tables=("memory",),
    ),
    "hooks": Experiment(
        about="saved-tensor hooks on a Llama: bytes, peaks, error of the gradients",
        cases=grid(("llama",), (1, 0.5), HOOKS),
        quick=grid(("llama",), (1,), HOOKS),
        measure=measure_hooks,
        summarise=summarise_hooks,
        missed=lambda summary: above(summary, HOOK_LIMITS),
    ),
}
