"""Writes the tables of the benchmarks into the README and the pages: ``python docs/benchmark_tables.py``.

A page has a table where it says ``<!-- table: NAME -->``, up to ``<!-- end of table -->``. What stands
between is made of `benchmarks/results`; a test fails where it is not what these files say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "saved-tensor-hooks.md",
)
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Record = dict[str, Any]
Rows = list[Sequence[str]]
MIB = 1 << 20


def read(name: str) -> Record:
    """What a benchmark has written down."""
    record: Record = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def span(values: Iterable[float], digits: int = 2) -> str:
    """The smallest and the largest of some values."""
    low, high = min(values := list(values)), max(values)
    texts = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return texts[0] if texts[0] == texts[1] else "–".join(texts)


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share else "0 %"


class Gradients:
    """Gradients of one lowering by one partitioner, over all models and budgets."""

    def __init__(self, record: Record, lower: str, partitioner: str) -> None:
        who = (lower, partitioner)
        self.rows = [r for r in record["rows"] if (r["lower"], r["partitioner"]) == who]
        self.models = len(self.rows)
        self.bad = sum(bool(r["wrong_at"] or r["failed"]) for r in self.rows)
        self.worst = max(r["worst"] for r in self.rows)


def gradients() -> str:
    rows: Rows = []
    for name, torch in (("gradients", "2.13"), ("gradients-2.15", "2.15")):
        record = read(name)
        for lower in ("eager", "inductor"):
            sides = [Gradients(record, lower, who) for who in ("pytorch", "remat")]
            cells = [x for of in sides for x in (f"{of.bad} of {of.models}", f"{of.worst:.2g}")]
            rows.append((torch, lower, *cells))
    head = ("wrong or refused", "worst error")
    sides = [f"{who}: {what}" for who in ("PyTorch", "remat") for what in head]
    return markdown(("version", "lowering", *sides), rows)


def quality() -> str:
    record = read("plan_quality")
    rows: Rows = []
    for cost in ("roofline", "roofline-fused", "flops"):
        of = record["summary"][cost]
        rows.append(
            (
                f"`{cost}`",
                f"{of['architectures']} architectures, {of['cells']} cells",
                f"{of['geomean_ratio']:.2f}",
                f"{of['worst_ratio']:.2f}",
                percent(of["worst_gap"]),
                f"{100 * of['share_within_0.1%']:.0f} %",
            )
        )
    head = ("cost model", "measured on", "geometric mean", "worst", "largest gap", "within 0.1 %")
    return markdown(head, rows)


def flops() -> str:
    record = read("flops")
    solvers = list(record["worst"])
    rows: Rows = [
        (name, f"{row['ratio']:g}", *(f"{row[s]:.2f}" for s in solvers))
        for name, found in record["nets"].items()
        for row in found
    ]
    return markdown(("net", "budget of PyTorch", *(f"`{s}`" for s in solvers)), rows)


def architectures() -> str:
    rows: Rows = []
    for name, of in sorted(read("plan_quality")["architectures"].items()):
        if "cells" not in of:
            continue
        ratios = [c["ratio"] for c in of["cells"]["roofline"]]
        (whole,) = of["whole"]
        rows.append(
            (
                name,
                f"{of['joint_nodes']:,}",
                f"{geometric_mean(max(r, 1e-3) for r in ratios):.2f}",
                f"{max(ratios):.2f}",
                f"{whole['ratio']:.2f}",
            )
        )
    head = ("architecture", "joint nodes", "cost, geometric mean", "worst", "time to plan")
    return markdown(head, rows)


def deep() -> str:
    record = read("plan_quality")
    rows: Rows = [
        (
            name,
            f"{of['joint_nodes']:,}",
            f"{plan['budget']:g}",
            f"{plan['plan_s']:.0f} s",
            percent(plan["gap"]),
        )
        for name, of in record["architectures"].items()
        for plan in of.get("plans", ())
    ]
    return markdown(("architecture", "joint nodes", "budget", "planned in", "gap"), rows)


def partition() -> str:
    rows: Rows = []
    for of in read("partition")["rows"]:
        if "pytorch" not in of:  # too large to wait for
            continue
        theirs, ours = (of[who]["collection off"]["seconds"] for who in ("pytorch", "ours"))
        shown = f"{theirs:.2f} s", f"{ours:.2f} s", f"{theirs / ours:.1f}×"
        rows.append((str(of["layers"]), f"{of['joint_nodes']:,}", f"{of['budget']:g}", *shown))
    return markdown(("layers", "joint nodes", "budget", "PyTorch", "remat", "faster"), rows)


def step() -> str:
    rows: Rows = []
    labels = {
        "remat": "remat at PyTorch's bytes",
        "remat peak": "remat at PyTorch's measured peak",
        "pytorch again": "PyTorch beside itself",
    }
    for model in read("step")["models"]:
        for r in model["rows"]:
            if r["variant"] in labels and r["budget"] != 1:
                low, middle, high = r["to_pytorch"]
                time = f"{middle:.2f} ({low:.2f}–{high:.2f})"
                cells = labels[r["variant"]], time, f"{r['peak_to_pytorch']:.2f}"
                rows.append((model["model"], f"{r['budget']:g}", *cells))
    return markdown(("model", "budget", "who", "step time", "peak"), rows)


def memory() -> str:
    peak, compiled, fit = read("peak"), read("compiled_memory"), read("fit")
    budgets = {c["budget"] for c in peak["cells"]}
    models = {c["model"] for c in peak["cells"]}
    cells = sum(len(m["budgets"]) + len(m["peaks"]) for m in compiled["models"].values())
    return markdown(
        ("figure", "measured on", "off by at most"),
        [
            (
                "simulated peak against the storages that were alive, eager lowering",
                f"{len(models)} models × {len(budgets)} budgets",
                percent(peak["largest_error"]),
            ),
            (
                "peak known once Inductor has compiled, against the allocator",
                f"{len(compiled['models'])} models, {cells} plans",
                percent(compiled["largest_known_off"]),
            ),
            (
                "peak expected before that",
                f"{len(compiled['models'])} models, {cells} plans",
                percent(compiled["largest_expected_off"]),
            ),
            (
                "peak of the whole step, optimizer included (`remat fit`)",
                f"{len(fit['models'])} models, {sum(map(len, fit['models'].values()))} steps",
                percent(fit["largest_off"]),
            ),
        ],
    )


def peak_plans() -> str:
    record = read("peak_plans")
    rows = [(kind, f"{mean:.2f}") for kind, mean in record["geometric_means"].items()]
    rows.append(("the worst single plan", f"{record['largest_ratio']:.2f}"))
    return markdown(("steps", "recompute cost at the same peak"), rows)


def schedules() -> str:
    rows: Rows = []
    for r in read("schedules")["rows"]:
        if r["published"] is None:
            continue
        found = "none found" if r["increase"] is None else f"{r['increase']:.2f} %"
        name = r["graph"].partition("_w")[0].partition(" ")[0]
        rows.append((name, str(r["nodes"]), f"{r['share']:g}", f"{r['published']:g} %", found))
    return markdown(("graph", "nodes", "peak", "best published", "remat"), rows)


def knapsacks() -> str:
    rows: Rows = []
    for r in read("solvers")["shared"]:
        if r["family"] == "all":
            name = r["solver"]
            whose = f"PyTorch's {name[6:]}" if name.startswith("torch-") else f"`{name}`"
            shown = f"{100 * r['proven']:.1f} %", str(r["infeasible"])
            rows.append((whose, *shown, f"{1e3 * r['median_s']:,.1f} ms"))
    return markdown(("solver", "proven within a second", "answers above capacity", "median"), rows)


def checkpointing() -> str:
    rows: Rows = []
    for r in read("sac")["rows"]:
        theirs = r["theirs"]
        said = f"{theirs['recompute_ms']:.1f} ms" if theirs["fits"] else "above the budget"
        ours, measured = r["again_ms"]
        shown = said, f"{ours:.1f} ms", f"{measured:.1f} ms"
        rows.append((r["model"], f"{r['share']:g}", *shown))
    head = ("model", "share of the peak", "PyTorch's `sac_milp`", "remat", "remat, measured")
    return markdown(head, rows)


def checkpointing_large() -> str:
    large = read("sac")["large_program"]
    rows: Rows = []
    for r in large["budgets"]:
        theirs = r["theirs"]
        kept = "" if theirs["fits"] else ", above the budget"
        cells = f"{theirs['solve_s']:.0f} s{kept}", f"{r['solve_s'][0]:.1f} s"
        rows.append((f"{r['share']:g}", *cells))
    return markdown(("share of the peak", "PyTorch's `sac_milp`", "remat"), rows)


def hooks() -> str:
    rows: Rows = []
    found = read("hooks")["rows"]
    bare = {r["budget"]: r for r in found if not r["hooks"] and r["by"] == "remat"}
    for r in found:
        of, own = bare[r["budget"]], r["by"] == "remat"
        saved = f"{r['saved'] / MIB:.1f} MiB", f"{r['saved'] / of['saved']:.3f}"
        fell = 1 - r["measured"] / of["measured"]
        rows.append(
            (
                f"{r['budget']:g}",
                (f"`{r['hooks']}`" if r["hooks"] else "none") + ("" if own else ", by PyTorch"),
                *(saved if own else ("", "")),
                f"{r['measured'] / MIB:.1f} MiB",
                f"{100 * fell:.1f} %" if r is not of else "",
                f"{r['error']:.1e}" if r is not of else "",
            )
        )
    head = ("budget", "hooks", "saved", "share", "peak", "falls by", "gradient error")
    return markdown(head, rows)


def model_types() -> str:
    rows: Rows = []
    types = read("model_types")["types"]
    for lower in ("eager", "inductor"):
        found = [of[lower]["rows"] for of in types.values() if lower in of]
        ours = [[r for r in rows if r["budget"] is not None] for rows in found]
        good = sum(all(not r["wrong"] and r["failed"] is None for r in rows) for rows in ours)
        rows.append((lower, str(len(found)), str(good), str(sum(map(len, ours)))))
    return markdown(("lowering", "types measured", "right in every case", "cases"), rows)


def frontier() -> str:
    rows = read("frontier")["rows"]
    ratios = [r["ratio"] for r in rows]
    worse = sum(r["score"] > r["pytorch_score"] for r in rows)
    cells = (str(len(rows)), f"{min(ratios):.0f}–{max(ratios):.0f}×", str(worse))
    return markdown(("instances", "faster than a sweep of 100 runs", "worse knees"), [cells])


def first_step() -> str:
    """A first step, forward and backward, with empty caches."""
    record = read("compile_time")
    rows = [
        (
            m["model"],
            *(f"{median(m['seconds'][side]):.1f} s" for side in ("inductor", "remat")),
            f"{m['ratio']:.2f}",
        )
        for m in record["models"]
    ]
    rows.append(("geometric mean", "", "", f"{record['geometric_mean']:.2f}"))
    return markdown(("model", "plain Inductor", f"remat at {record['budget']}", "ratio"), rows)


def predictions() -> str:
    """Predicted against measured extra time, by cost model."""
    rows = []
    for name, p in read("step")["summary"]["predicted"].items():
        whose, _, model = name.partition(", ")
        rows.append(
            (
                f"`{model}`",
                "all" if whose == "all" else "those that remat compiled",
                str(p["plans"]),
                f"{p['spearman']:.2f}",
                f"{p['spearman_if_exact']:.2f}",
                f"{p['predicted_to_measured']:.2f}",
            )
        )
    head = ("cost model", "plans", "count", "rank correlation", "if exact", "total to measured")
    return markdown(head, rows)


def pages() -> str:
    """What `remat explain --html` writes of large steps, with a slider over the frontier."""
    rows = [
        (
            name,
            f"{p['nodes']:,}",
            f"{p['bytes'] / 1e6:.1f} MB",
            f"{p['written_s']:.0f} s",
            f"{p['median_drawn_ms'] / 1e3:.1f} s",
        )
        for name, p in read("explorer")["pages"].items()
    ]
    return markdown(("step", "nodes", "page", "written in", "drawn in"), rows)


def summary() -> str:
    """The few figures of the README."""
    record = read("gradients")
    bad = {
        who: [Gradients(record, lower, who) for lower in ("eager", "inductor")]
        for who in ("pytorch", "remat")
    }
    of = read("plan_quality")["summary"]
    rows = [
        (r["variant"], r["to_pytorch"][1])
        for model in read("step")["models"]
        for r in model["rows"]
        if r["budget"] not in (None, 1)
    ]
    same, peak = ([x for who, x in rows if who == name] for name in ("remat", "remat peak"))
    models = bad["remat"][0].models
    return markdown(
        ("", "PyTorch", "remat"),
        [
            (
                f"of {models} models, those with a wrong or refused gradient at some budget; under Inductor",
                *("; ".join(str(g.bad) for g in bad[who]) for who in ("pytorch", "remat")),
            ),
            (
                f"modelled recompute cost at the same saved bytes, {of['roofline']['architectures']} "
                "architectures at real size",
                "1",
                f"{of['roofline']['geomean_ratio']:.2f} (worst {of['roofline']['worst_ratio']:.2f})",
            ),
            (
                "the same, priced by what a fusing compiler moves",
                "1",
                f"{of['roofline-fused']['geomean_ratio']:.2f} (worst "
                f"{of['roofline-fused']['worst_ratio']:.2f})",
            ),
            ("time to plan", "1", f"{of['whole']['geomean_ratio']:.2f}"),
            (
                "measured step time under Inductor on a CPU, at the same saved bytes",
                "1",
                f"{geometric_mean(same):.2f} ({span(same)})",
            ),
            (
                "measured step time at the same measured peak",
                "1",
                f"{geometric_mean(peak):.2f} ({span(peak)})",
            ),
            (
                "simulated peak against the storages that were alive",
                "",
                f"off by {percent(read('peak')['largest_error'])} at most",
            ),
        ],
    )


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "gradients": gradients,
    "quality": quality,
    "flops": flops,
    "architectures": architectures,
    "partition": partition,
    "step": step,
    "memory": memory,
    "peak-plans": peak_plans,
    "schedules": schedules,
    "knapsacks": knapsacks,
    "checkpointing": checkpointing,
    "checkpointing-large": checkpointing_large,
    "deep": deep,
    "hooks": hooks,
    "model-types": model_types,
    "frontier": frontier,
    "first-step": first_step,
    "pages": pages,
    "predictions": predictions,
}


def filled(text: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        KeyError: a table that the page names is none of `TABLES`.
    """
    return PLACE.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
        print(f"written: {page.relative_to(ROOT)}")
