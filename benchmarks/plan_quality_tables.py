"""The tables of `plan_quality.py`, and its targets, from the figures in its JSON file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

#: A ratio counts for no less than this in a geometric mean, so that a cost of 0 does not decide it.
FLOOR = 0.01


def ratio(ours: int, theirs: int) -> float:
    """Our cost as a share of theirs; 1 where both are 0."""
    if theirs == 0:
        return 1.0 if ours == 0 else math.inf
    return ours / theirs


def geomean(ratios: Iterable[float]) -> float:
    """Geometric mean, each ratio counted for no less than `FLOOR`; NaN of none."""
    logs = [math.log(max(FLOOR, r)) for r in ratios]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def cells_of(data: dict[str, Any], cost: str) -> list[dict[str, Any]]:
    """All cells under a cost model, each with the name of its architecture."""
    return [
        {"name": name, **found}
        for name, row in data["architectures"].items()
        for found in row.get("cells", {}).get(cost, ())
    ]


def rises(cells: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Pairs of budgets of one architecture where more bytes come with more cost."""
    by_bytes = sorted(cells, key=lambda c: (c["saved_bytes"], c["budget"]))
    return [
        (a["budget"], b["budget"])
        for a, b in pairwise(by_bytes)
        if b["ours"]["cost"] > a["ours"]["cost"]
    ]


def _differs(cell: dict[str, Any]) -> bool:
    """Whether PyTorch's modules, counted by themselves, come to less than its decision does by us.

    More is possible: where PyTorch saves a view and computes its owner again, we count it saved.
    """
    of = cell["pytorch"]
    return bool(
        of["cost_of_modules"] < of["cost"]
        or of["bytes_of_modules"] < cell["saved_bytes"] - of["state_bytes"]
    )


def summary(data: dict[str, Any]) -> dict[str, Any]:
    """The totals that the targets are about, in plain figures."""
    rows = data["architectures"]
    made: dict[str, Any] = {}
    for cost in sorted({c for row in rows.values() for c in row.get("cells", {})}):
        cells = cells_of(data, cost)
        made[cost] = {
            "architectures": len({c["name"] for c in cells if rows[c["name"]].get("complete")}),
            "cells": len(cells),
            "above_pytorch": [f"{c['name']} {c['budget']}" for c in cells if c["ratio"] > 1],
            "geomean_ratio": geomean(c["ratio"] for c in cells),
            "geomean_ratio_legal": geomean(
                c["ratio"] for c in cells if c["pytorch"]["illegal"] is None
            ),
            "illegal": sum(c["pytorch"]["illegal"] is not None for c in cells),
            "counted_otherwise": [f"{c['name']} {c['budget']}" for c in cells if _differs(c)],
            "worst_ratio": max((c["ratio"] for c in cells), default=math.nan),
            "share_within_0.1%": statistics.fmean(c["gap"] <= 0.001 for c in cells)
            if cells
            else math.nan,
            "worst_gap": max((c["gap"] for c in cells), default=math.nan),
            "rises": sum(
                len(rises(row["cells"][cost]))
                for row in rows.values()
                if cost in row.get("cells", {})
            ),
        }
    timed = [w for row in rows.values() for w in row.get("whole", ())]
    if timed:
        made["whole"] = {
            "cells": len(timed),
            "geomean_ratio": geomean(w["ratio"] for w in timed),
            "worst_ratio": max(w["ratio"] for w in timed),
            "geomean_cpu_ratio": geomean(w["cpu_ratio"] for w in timed),
            "worst_cpu_ratio": max(w["cpu_ratio"] for w in timed),
            "above_a_fifth": [
                name
                for name, row in rows.items()
                if any(w["ratio"] > 0.2 for w in row.get("whole", ()))
            ],
        }
    plans = [p for row in rows.values() for p in row.get("plans", ())]
    if plans:
        made["deep"] = {
            "plan_s": max(p["plan_s"] for p in plans),
            "gap": max(p["gap"] for p in plans),
        }
    made["failed"] = [name for name, row in rows.items() if "error" in row]
    made["interrupted"] = [name for name, row in rows.items() if not row.get("complete")]
    return made


HEAD = (
    f"{'architecture':17} {'joint':>6} {'cells':>5} {'geomean':>8} {'worst':>7} {'worst gap':>9} "
    f"{'median':>8} {'slowest':>8} {'PyTorch':>8} {'whole':>8} {'PyTorch':>8} {'share':>6}"
)


def line(name: str, row: dict[str, Any], cost: str = "roofline") -> str:
    """One architecture: ratios, gaps, and times of deciding and of whole partitioners."""
    head = f"{name:17} {row.get('joint_nodes', 0):>6}"
    if "error" in row:
        return f"{head} failed: {row['error'][:100]}"
    if "plans" in row:
        return f"{head} " + "; ".join(
            f"budget {p['budget']}: planned in {p['plan_s']:.1f} s (solver {p['solve_s']:.1f} s), "
            f"gap {p['gap']:.3%}"
            for p in row["plans"]
        )
    cells = row["cells"].get(cost, [])
    if not cells:
        return f"{head} {0:>5}"
    solves = [c["ours"]["seconds"] for c in cells]
    theirs = statistics.median(c["pytorch"]["seconds"] for c in cells)
    text = (
        f"{head} {len(cells):>5} {geomean(c['ratio'] for c in cells):>8.4f} "
        f"{max(c['ratio'] for c in cells):>7.4f} {max(c['gap'] for c in cells):>9.4%} "
        f"{statistics.median(solves):>7.2f}s {max(solves):>7.2f}s {theirs:>7.1f}s "
    )
    for w in row["whole"]:
        text += f"{w['ours_s']:>7.2f}s {w['pytorch_s']:>7.1f}s {w['ratio']:>6.3f}"
    return text


def show(data: dict[str, Any]) -> None:
    """Prints one table for each cost model, and the totals beside their targets."""
    rows, totals = data["architectures"], summary(data)
    print(f"torch {data['torch']}, remat {data['remat']}, Python {data['python']}")
    for cost in [c for c in ("roofline", "flops", "roofline-fused") if c in totals]:
        print(f"\n{cost}: our recompute cost as a share of PyTorch's, at PyTorch's bytes")
        print(HEAD)
        for name, row in rows.items():
            if cost in row.get("cells", {}):
                print(line(name, row, cost))
        of = totals[cost]
        print(
            f"{'all':17} {'':>6} {of['cells']:>5} {of['geomean_ratio']:>8.4f} "
            f"{of['worst_ratio']:>7.4f} {of['worst_gap']:>9.4%}"
        )
        if of["counted_otherwise"]:
            print(f"PyTorch's modules come to less than we count: {of['counted_otherwise']}")
        if of["illegal"]:
            print(
                f"{of['illegal']} of PyTorch's decisions recompute what may not be recomputed; "
                f"geometric mean without them {of['geomean_ratio_legal']:.4f}"
            )
    for name, row in rows.items():
        if "plans" in row or "error" in row:
            print(line(name, row))
    print(f"\n{'figure':58} {'measured':>12} {'target':>10}")
    for label, value, target, met in targets(totals):
        print(f"{label:58} {value:>12} {target:>10} {'met' if met else 'MISSED'}")
    for cost in ("roofline", "flops", "roofline-fused"):
        for cell in totals.get(cost, {}).get("above_pytorch", ()):
            print(f"above PyTorch under {cost}: {cell}")
    if totals["interrupted"]:
        print(f"not measured to the end: {totals['interrupted']}")
    if totals.get("whole", {}).get("above_a_fifth"):
        print(f"planning takes over a fifth of PyTorch's time: {totals['whole']['above_a_fifth']}")
    for cell in cells_of(data, "roofline"):
        if cell["gap"] > 0.001:
            print(f"gap above 0.1 %: {cell['name']} {cell['budget']} {cell['gap']:.3%}")


def targets(totals: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Each target: what it is about, what was measured, what was aimed at, and whether it is met."""
    made: list[tuple[str, str, str, bool]] = []
    of = totals.get("roofline")
    if of is not None:
        share = of["share_within_0.1%"]
        made += [
            ("architectures", str(of["architectures"]), ">= 12", of["architectures"] >= 12),
            (
                "cells above PyTorch's cost at PyTorch's bytes",
                str(len(of["above_pytorch"])),
                "0",
                not of["above_pytorch"],
            ),
            (
                "geometric mean of the cost ratio",
                f"{of['geomean_ratio']:.4f}",
                "<= 0.78",
                of["geomean_ratio"] <= 0.78,
            ),
            ("cells with a proven gap of at most 0.1 %", f"{share:.1%}", ">= 95 %", share >= 0.95),
            ("worst proven gap", f"{of['worst_gap']:.3%}", "<= 1 %", of["worst_gap"] <= 0.01),
            ("budgets at which more bytes cost more", str(of["rises"]), "0", not of["rises"]),
        ]
    if "whole" in totals:
        worst = totals["whole"]["worst_ratio"]
        made.append(
            ("time to plan, share of PyTorch's, worst", f"{worst:.3f}", "<= 0.2", worst <= 0.2)
        )
        mean = totals["whole"]["geomean_ratio"]
        made.append(("  geometric mean", f"{mean:.3f}", "<= 0.2", mean <= 0.2))
        cpu = totals["whole"]["worst_cpu_ratio"]
        made.append(("  worst, in processor seconds", f"{cpu:.3f}", "<= 0.2", cpu <= 0.2))
    if "deep" in totals:
        deep = totals["deep"]
        made += [
            (
                "50,000 nodes: time to plan",
                f"{deep['plan_s']:.1f} s",
                "<= 60 s",
                deep["plan_s"] <= 60,
            ),
            ("50,000 nodes: proven gap", f"{deep['gap']:.3%}", "<= 1 %", deep["gap"] <= 0.01),
        ]
    return made
