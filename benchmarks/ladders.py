"""Plans within eight peaks of one step: together in one ladder, and each by a call of its own.

``ladders``: eight shares of the range from the least peak to that of budget 1, planned together by `remat.compare` and each alone by
`remat.plan`. ``dearer`` and ``out_of_order`` count larger budgets of the ladder that cost more than the one before, or whose plan
has the lower peak. ``alone`` is the largest ratio of a separate plan's cost to that of the ladder. ``near_least`` is the cost within
0.5 % above the least peak, divided by that of the cheapest plan known there, of the ladder and of the frontier. ``gap`` is the
geometric mean of costs divided by their proven bounds, for the budgets from a quarter to three quarters; ``unproven`` counts those
whose bound is 0.

``compiled-ladders``: five peaks in bytes between the least and that of budget 1, each compiled by Inductor on its own. A larger budget
is dearer, or a smaller one peaks higher, if it does so by more than half a per cent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, in_process, timed
from benchmarks.figures import above, geometric_mean, ratio_of
from benchmarks.plans import COST
from benchmarks.workloads import COMPILED, ZOO, captured

SHARES = tuple(remat.Peak(k / 8) for k in range(8))
NETS = (*(f"{name}-small" for name in ZOO), "resnet-50", "unet", "random-skips")


def measure_ladders(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name, "eager")
    for case in cases:
        seconds, _, compared = timed(lambda: remat.compare(joint, "auto", SHARES, COST))
        rows = compared.rows
        alone = [remat.plan(joint, share, cost=COST).recompute_cost for share in SHARES]
        limit = int(1.005 * rows[0].peak_bytes)
        points = remat.frontier(joint, by="peak", cost=COST).points
        near = remat.plan(joint, limit, cost=COST).recompute_cost
        known = min(r.recompute_cost for r in (*rows, *points) if r.peak_bytes <= limit)
        proven = [r for r in rows[2:7] if r.recompute_bound]
        gaps = [ratio_of(r.recompute_cost, r.recompute_bound) for r in proven]
        yield case.row(
            dearer=sum(b.recompute_cost > a.recompute_cost for a, b in pairwise(rows)),
            out_of_order=sum(b.peak_bytes < a.peak_bytes for a, b in pairwise(rows)),
            alone=max(ratio_of(a, r.recompute_cost) for a, r in zip(alone, rows, strict=True)),
            near_least=ratio_of(near, min(near, known)),
            unproven=5 - len(proven),
            gap=geometric_mean(gaps) if gaps else None,
            worst_gap=max(gaps, default=None),
            seconds=seconds,
        )


def summarise_ladders(rows: list[Row]) -> Row:
    return {
        "dearer": sum(row["dearer"] for row in rows),
        "out_of_order": sum(row["out_of_order"] for row in rows),
        **{f"worst_{key}": max(row[key] for row in rows) for key in ("alone", "near_least")},
        "mean_gap": geometric_mean(row["gap"] for row in rows if row["gap"]),
    }


def compiled_at(name: str, place: float) -> Iterator[Row]:
    """Peak and cost of a step that Inductor compiled within a peak between the least and that of budget 1."""
    step, batch = COMPILED[name].build(), COMPILED[name].batches(1)[0]
    joint = remat.capture(step, (), batch)
    least, full = (remat.plan(joint, b).estimated_peak_bytes for b in (remat.Peak(0.0), 1.0))
    budget = int(least + place * (full - least))
    torch.compile(step, backend="remat", options={"budget": budget})(**batch).backward()
    (plan,) = remat.plans()
    yield {
        "bytes": budget,
        "peak": plan.peak_bytes,
        "cost": plan.recompute_cost,
        "step_cost": plan.step_cost,
    }


def measure_compiled_ladders(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    rows = []
    for case in cases:
        (row,) = in_process(compiled_at, name, case.budget)
        rows.append(row)
        yield case.row(
            **row,
            out_of_order=any(r["peak"] > 1.005 * row["peak"] for r in rows[:-1]),
            dearer=any(
                row["step_cost"] + row["cost"] > 1.005 * (r["step_cost"] + r["cost"])
                for r in rows[:-1]
            ),
        )


def summarise_compiled_ladders(rows: list[Row]) -> Row:
    return {key: sum(row[key] for row in rows) for key in ("out_of_order", "dearer")} | {
        "cells": len(rows),
        "held": sum(row["peak"] <= row["bytes"] for row in rows),
    }


EXPERIMENTS = {
    "ladders": Experiment(
        about="plans within eight peaks, together and alone",
        cases=grid(NETS, sides=("ladder",)),
        quick=grid(NETS[:1], sides=("ladder",)),
        measure=measure_ladders,
        summarise=summarise_ladders,
        missed=lambda summary: above(
            summary, {"dearer": 0, "out_of_order": 0, "worst_alone": 1.005, "worst_near_least": 1.1}
        ),
    ),
    "compiled-ladders": Experiment(
        about="five peaks in bytes, each compiled by Inductor",
        cases=grid(("wide", "unet", "vit", "gpt2-long"), (0.2, 0.35, 0.5, 0.65, 0.8), ("ladder",)),
        quick=grid(("wide",), (0.5,), ("ladder",)),
        measure=measure_compiled_ladders,
        summarise=summarise_compiled_ladders,
    ),
}
