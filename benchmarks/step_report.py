"""What `benchmarks/step.py` says of its variants: rows, a table, and what all models come to together."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.table import Table
from scipy.stats import spearmanr

import remat

if TYPE_CHECKING:
    from benchmarks.step import Variant

#: Share of PyTorch's own step at budget 1 from which its recomputing is said to cost much.
MUCH = 0.05
MIB = 2**20
#: Steps of which losses are compared: training doubles their differences every few steps.
COMPARED = 22
#: Standard error of the median of normally distributed numbers, for the distance of their quartiles and one number.
_OF_MEDIANS = 1.2533 / 1.349


def loss_difference(made: Sequence[Variant], *, draws: bool) -> float:
    """The largest relative difference of any of the first `COMPARED` losses from eager PyTorch's at the same step.

    Of a model that draws random numbers: of any compiled step's from that of PyTorch's partitioner at budget 1.
    """
    made = made[draws:]
    reference = made[0].losses
    pairs = [pair for v in made for pair in list(zip(v.losses, reference, strict=True))[:COMPARED]]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0]] * 3
    return [round(q, 3) for q in statistics.quantiles(values, n=4, method="inclusive")]


def rows(made: Sequence[Variant]) -> list[dict[str, Any]]:
    found = []
    full, ours = (
        next(v for v in made if v.who == who and v.budget == 1.0) for who in ("pytorch", "remat")
    )
    for v in made:
        same = (o for o in made if o.who == "pytorch" and o.budget == (v.budget or 1.0))
        other = next(same)
        ratios = [a / b for a, b in zip(v.step_ms, other.step_ms, strict=True)]
        added = [a - b for a, b in zip(v.step_ms, full.step_ms, strict=True)]
        own = full if v.who.startswith("pytorch") else ours
        beyond = [a - b for a, b in zip(v.step_ms, own.step_ms, strict=True)]
        peak = statistics.median(v.peak_bytes)
        found.append(
            {
                "variant": v.who,
                "budget": v.budget,
                "saved_bytes": v.saved_bytes,
                "step_ms": quartiles(v.step_ms),
                "forward_ms": quartiles(v.forward_ms) if v.forward_ms else None,
                "to_pytorch": quartiles(ratios),
                "added_ms": quartiles(added),
                "added_to_own_ms": quartiles(beyond),
                "peak_bytes": peak,
                "peak_to_pytorch": round(peak / statistics.median(other.peak_bytes), 4),
                "peak_spread_bytes": max(v.peak_bytes) - min(v.peak_bytes),
                "predicted_recompute_ms": {k: round(p / 1e9, 4) for k, p in v.predicted_ps.items()},
                "repeated_operators": v.repeated,
                "moved_to_forward": v.moved,
                "last_loss": v.losses[-1],
            }
        )
    return found


def table(report: dict[str, Any]) -> Table:
    shown = Table(
        title=f"{report['model']} on {report['device']}: {report['about']}",
        caption="to theirs: ratio to PyTorch at the same bytes; again: operators that run twice; moved: "
        "that forward runs for backward; added: step time beyond PyTorch's at budget 1; after it, what "
        "the cost models say that recomputing takes",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    heads = ("budget", "variant", "saved MiB", "step ms", "to theirs", "quartiles", "peak MiB")
    costs = [c.partition(":")[0] for c in report["costs"]]
    for head in (*heads, "to theirs", "again", "moved", "added ms", *costs):
        shown.add_column(head, justify="left" if head == "variant" else "right", no_wrap=True)
    for r in report["rows"]:
        if r["variant"] == "pytorch":
            shown.add_section()
        low, middle, high = r["to_pytorch"]
        shown.add_row(
            "–" if r["budget"] is None else f"{r['budget']}",
            r["variant"].partition(":")[0],
            "–" if r["saved_bytes"] is None else f"{r['saved_bytes'] / MIB:.1f}",
            f"{r['step_ms'][1]:.1f}",
            f"{middle:.3f}",
            f"{low:.2f}–{high:.2f}",
            f"{r['peak_bytes'] / MIB:.1f}",
            f"{r['peak_to_pytorch']:.3f}",
            str(sum(r["repeated_operators"].values())),
            str(sum(r["moved_to_forward"].values())),
            f"{r['added_ms'][1]:+.1f}",
            *(f"{ms:.1f}" for ms in r["predicted_recompute_ms"].values()),
        )
    return shown


def record(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "benchmark": "step",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "remat": remat.__version__,
        "threads": torch.get_num_threads(),
        "summary": summary(reports),
        "models": reports,
    }


def summary(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all models come to together.

    ``much`` and ``little`` are the cells in which PyTorch's recomputing costs at least, or less than, `MUCH` of its
    step at budget 1; ratios are to PyTorch at the same budget. Predictions are by each cost model, of what is recomputed
    beyond what the same side recomputes at budget 1: rank correlation with the time that was measured beyond that step, beside the one that exact predictions would have under the noise of these
    medians, and the sum of all predicted over the sum of all measured; of the plans that remat compiled, and of
    all, among which are those that plain Inductor did.
    """
    cells: dict[str, dict[str, list[float]]] = {"much": {}, "little": {}}
    points: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for report in reports:
        rows = report["rows"]
        full = next(r for r in rows if r["variant"] == "pytorch" and r["budget"] == 1)
        for r in rows:
            if r["budget"] is None:
                continue
            theirs = next(
                o for o in rows if o["variant"] == "pytorch" and o["budget"] == r["budget"]
            )
            if r["budget"] == 1:
                continue
            cost = theirs["added_ms"][1] / full["step_ms"][1]
            kind = cells["much" if cost >= MUCH else "little"]
            kind.setdefault(r["variant"], []).append(r["to_pytorch"][1])
            side = "pytorch" if r["variant"].startswith("pytorch") else "remat"
            own = next(o for o in rows if o["variant"] == side and o["budget"] == 1)
            for model, predicted in r["predicted_recompute_ms"].items():
                ms = predicted - own["predicted_recompute_ms"][model]
                for whose in ("remat", ""):
                    if r["variant"].startswith(whose):
                        of = points.setdefault((whose or "all", model.partition(":")[0]), [])
                        low, middle, high = r["added_to_own_ms"]
                        of.append((ms, middle, _OF_MEDIANS * (high - low) / report["steps"] ** 0.5))
    found: dict[str, Any] = {
        kind: {
            who: {
                "cells": len(ratios),
                "geometric_mean": round(statistics.geometric_mean(ratios), 4),
                "largest": max(ratios),
                "smallest": min(ratios),
            }
            for who, ratios in by.items()
        }
        for kind, by in cells.items()
    }
    found["predicted"] = {
        f"{whose}, {model}": {
            "plans": len(pairs),
            "spearman": _rank_correlation([a for a, *_ in pairs], [b for _, b, _ in pairs]),
            "spearman_if_exact": _if_exact(pairs),
            "predicted_to_measured": round(
                sum(a for a, *_ in pairs) / sum(b for _, b, _ in pairs), 4
            ),
        }
        for (whose, model), pairs in sorted(points.items(), reverse=True)
    }
    return found


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    return round(float(spearmanr(a, b).statistic), 4)


def _if_exact(pairs: Sequence[tuple[float, float, float]], draws: int = 500) -> float:
    """The rank correlation that predictions have with themselves, measured with the noise of each median."""
    random = Random(0)
    exact = [a for a, *_ in pairs]
    found = [
        _rank_correlation(exact, [random.gauss(a, noise) for a, _, noise in pairs])
        for _ in range(draws)
    ]
    return round(statistics.mean(found), 4)
