"""The nine networks of HiRemate within shares of their peaks: modelled, beside the published figures of two systems.

The published figures were measured on GPUs, and are relative to eager PyTorch: HiRemate (Gusak et al., ICML 2025) saves 50 % to 70 %
of the memory for 10 % to 15 % more time; FastSA (Imanishi et al., NeurIPS 2023), on other networks, saves 73 % for 18 % on average.

A network is captured in float32 at real size, without Inductor, and planned under `COST`. Nothing runs. A peak is simulated, with
parameters, buffers, inputs, gradients, temporary results and saved activations; the optimizer's state does not count. A budget of the
side ``remat`` is a share of the peak at budget 1. Costs are shares of the step with every operator once, forward and backward.

- ``graph``: sizes of the network, and its peaks at budget 1 and under eager PyTorch; the latter is that of a step on fake tensors.
- ``remat``: the plan within a share of the peak; no cost if no plan is found. Seconds are the processor's.
- ``least``: the plan with the least peak that the search finds.
- ``within``: the least peak found for at most this cost: of the frontier by peaks, of the plans above, and by bisection.
- ``run``: a small network trains one step, uncompiled, at this ratio of the peaks that are possible. The results are eager PyTorch's bit
  for bit if none differs; the peak is the allocator's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, timed
from benchmarks.figures import grouped
from benchmarks.nine_networks import NETWORKS, SMALL
from benchmarks.plans import COST
from benchmarks.workloads import Workload
from remat.errors import BudgetError
from remat.graph.capture.fakes_of_models import as_fakes
from remat.running.measure import measure_step
from tests.models import Step
from tests.whole_steps import PeakWatch

#: Shares of the peak: those of HiRemate's reductions, and that of FastSA's.
SHARES = (0.5, 0.4, 0.3, 0.27)
#: Published costs, as shares of the step.
COSTS = (0.1, 0.15, 0.18)
SIDES = ("graph", "remat", "least", "within")


def eager_peak(work: Workload) -> tuple[int, int]:
    """Bytes of eager PyTorch's step before it starts, and the most bytes alive in it; on fake tensors."""
    model, given = work.build("meta"), work.batches(1, "meta")[0]
    with as_fakes(model, (), given, fullgraph=True, device=None, run=False) as (fake, _, batch):
        assert isinstance(fake, torch.nn.Module)
        watch = PeakWatch([*fake.parameters(), *fake.buffers(), *batch.values()])
        before = watch.now
        with watch:
            fake(**batch).backward()
    return before, watch.most


def measure_networks(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    if name in RUNS:
        yield from measure_runs(name, cases)
        return
    work = NETWORKS[name]
    joint = remat.capture(work.build("meta"), (), work.batches(1, "meta")[0], lower="eager")
    full = remat.plan(joint, 1, cost=COST)
    resident, eager = eager_peak(work)
    found: list[tuple[float, float]] = []

    def of_peak(share: float) -> remat.Peak:
        return remat.Peak(int(share * full.peak_bytes))

    def planned(budget: remat.Peak) -> Row:
        """The figures of a plan, as shares; all None if no plan is found."""
        try:
            _, seconds, plan = timed(lambda: remat.plan(joint, budget, cost=COST))
        except BudgetError as error:
            return {"share": None, "cost": None, "bound": None, "why": str(error)}
        share, cost = plan.peak_bytes / full.peak_bytes, plan.recompute_cost / plan.step_cost
        found.append((share, cost))
        return {
            "share": round(share, 4),
            "of_activations": round((plan.peak_bytes - resident) / (full.peak_bytes - resident), 4),
            "of_eager": round(plan.peak_bytes / eager, 4),
            "cost": round(cost, 5),
            "bound": round(plan.recompute_bound / plan.step_cost, 5),
            "seconds": round(seconds, 1),
        }

    for case in cases:
        if case.side == "graph":
            yield case.row(
                about=work.about,
                nodes=len(joint.graph.nodes),
                peak_bytes=full.peak_bytes,
                eager_bytes=eager,
                resident_bytes=resident,
                step_ms=round(full.step_cost / 1e9, 2),
                cost=round(full.recompute_cost / full.step_cost, 5),
            )
        elif case.side == "remat":
            yield case.row(**planned(of_peak(case.budget)))
        elif case.side == "least":
            yield case.row(**planned(remat.Peak(0.0)))
            frontier = remat.frontier(joint, by="peak", cost=COST)
            found += (
                (p.peak_bytes / full.peak_bytes, p.recompute_cost / full.step_cost)
                for p in frontier.points
            )
        else:
            share = least_share(case.budget, found, lambda share: planned(of_peak(share)))
            yield case.row(
                share=round(share, 4), of_eager=round(share * full.peak_bytes / eager, 4)
            )


def least_share(
    most: float, found: Sequence[tuple[float, float]], plan: Callable[[float], object]
) -> float:
    """The least share of the peak with at most this cost, by bisection to 1 % of the peak.

    Args:
        most: the cost.
        found: pairs of share and cost; those that are tried are added by ``plan``.
        plan: plans within a share.
    """

    def best() -> float:
        return min(share for share, cost in found if cost <= most)

    low = max((share for share, cost in found if cost > most and share < best()), default=best())
    while (high := best()) - low > 0.01:
        middle = (low + high) / 2
        plan(middle)
        if best() > middle:
            low = middle
    return best()


def measure_runs(name: str, cases: Sequence[Case]) -> Iterator[Row]:
    work = RUNS[name]
    (batch,) = work.batches(1)
    step = Step(model=work.build(), kwargs=batch, loss=lambda loss: loss)
    reference = step.train()
    eager = measure_step(step.model, (), batch, by="allocator")
    for case in cases:
        torch._dynamo.reset()
        options: Any = {"budget": remat.Peak(case.budget), "lower": "eager"}
        compiled = torch.compile(step.model, backend="remat", options=options)
        outcome = step.train(compiled)
        plan = remat.plans()[-1]
        measured = measure_step(compiled, (), batch, by="allocator").peak_bytes
        yield case.row(
            differs=outcome.differs_from(reference),
            error=outcome.gradient_distance(reference),
            limit_bytes=plan.peak_limit,
            planned_bytes=plan.peak_bytes,
            measured_bytes=measured,
            without_bytes=plan.without_peak_bytes,
            eager_bytes=eager.peak_bytes,
            cost=round(plan.recompute_cost / plan.step_cost, 5),
            held=measured <= plan.peak_limit,
        )


def summarise(rows: list[Row]) -> Row:
    """Means over the networks: costs by share, where a plan is found, and reductions by cost."""
    sides = grouped(rows, "side")

    def means(side: str, figure: str) -> dict[str, Any]:
        by_budget = grouped(sides.get(side, ()), "budget")
        values = {
            b: [r[figure] for r in of if r[figure] is not None] for b, of in by_budget.items()
        }
        return {
            f"{budget:g}": {"mean": round(statistics.fmean(v), 4), "networks": len(v)}
            for budget, v in values.items()
            if v
        }

    runs = sides.get("run", [])
    return {
        "cost_within_share": means("remat", "cost"),
        "bound_within_share": means("remat", "bound"),
        "share_within_cost": means("within", "share"),
        "share_of_eager_within_cost": means("within", "of_eager"),
        "runs": len(runs),
        "equal": sum(not row["differs"] for row in runs),
        "held": sum(row["held"] for row in runs),
    }


RUNS = {f"{name}-small": work for name, work in SMALL.items()}
RATIO = (0.25,)  # of the way from the least peak that is found to that of budget 1
EXPERIMENTS = {
    "networks": Experiment(
        about="HiRemate's nine networks within shares of their peaks, and steps of small ones",
        cases=(
            *grid(NETWORKS, sides=("graph",)),
            *grid(NETWORKS, SHARES),
            *grid(NETWORKS, sides=("least",)),
            *grid(NETWORKS, COSTS, ("within",)),
            *grid(RUNS, RATIO, ("run",)),
        ),
        quick=grid(list(RUNS)[:2], RATIO, ("run",)),
        measure=measure_networks,
        tables=("networks", "networks-within"),
        summarise=summarise,
    )
}
