"""The tables of the benchmarks, in Markdown: for the pages of `docs`, and for the terminal after a run.

A page has a table where it says ``<!-- table: NAME -->``, up to ``<!-- end of table -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

RESULTS = Path(__file__).parent / "results"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MIB = 1 << 20

Record = dict[str, Any]
#: Records by the name of the experiment.
Records = Mapping[str, Record]
Cells = Iterable[Sequence[str]]


class Kept(dict[str, Record]):
    """Records by experiment: those that are given, else those that are kept in `results`."""

    def __missing__(self, name: str) -> Record:
        record: Record = json.loads((RESULTS / f"{name.replace('-', '_')}.json").read_text())
        self[name] = record
        return record


def filled(text: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        KeyError: a table that the page names is none of `TABLES`.
    """
    records = Kept()
    return PLACE.sub(lambda m: m[1] + TABLES[m[2]](records) + m[3], text)


def markdown(head: Sequence[str], cells: Cells) -> str:
    lines = [head, ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def span(values: Sequence[float], digits: int = 2) -> str:
    """The smallest and the largest of some values."""
    texts = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return texts[0] if texts[0] == texts[1] else "–".join(texts)


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share else "0 %"


def rows_of(record: Record, *sides: str) -> list[Record]:
    """The rows of some sides; of all sides if none is named."""
    return [row for row in record["rows"] if not sides or row["side"] in sides]


def by_workload(rows: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    return found


def wrong_models(rows: Sequence[Record]) -> int:
    """The number of models with a wrong or refused gradient."""
    return sum(bool(row["wrong_at"] or row["failed"]) for row in rows)


def gradients(records: Records) -> str:
    cells = []
    for name in ("gradients", "gradients-2.15"):
        version = ".".join(records[name]["torch"].split(".")[:2])
        for lower in ("eager", "inductor"):
            sides = [rows_of(records[name], f"{who} {lower}") for who in ("pytorch", "remat")]
            if all(sides):
                figures = (
                    text
                    for rows in sides
                    for text in (
                        f"{wrong_models(rows)} of {len(rows)}",
                        f"{max(row['worst'] for row in rows):.2g}",
                    )
                )
                cells.append((version, lower, *figures))
    head = ("wrong or refused", "worst error")
    return markdown(
        (
            "version",
            "lowering",
            *(f"{who}: {what}" for who in ("PyTorch", "remat") for what in head),
        ),
        cells,
    )


def model_types(records: Records) -> str:
    cells = []
    for lower in ("eager", "inductor"):
        types = by_workload(rows_of(records["model-types"], f"remat {lower}"))
        good = sum(
            all(not r["wrong"] and r["failed"] is None for r in rows) for rows in types.values()
        )
        cases = sum(map(len, types.values()))
        cells.append((lower, str(len(types)), str(good), str(cases)))
    return markdown(("lowering", "types measured", "right in every case", "cases"), cells)


def quality(records: Records) -> str:
    cells = []
    for cost in ("roofline", "roofline-fused", "flops"):
        of = records["plan-quality"]["summary"].get(cost)
        if of is None:
            continue
        cells.append(
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
    return markdown(head, cells)


def flops(records: Records) -> str:
    rows = records["flops"]["rows"]
    solvers = list(dict.fromkeys(row["side"] for row in rows))
    cells = []
    for name, of in by_workload(rows).items():
        for budget in dict.fromkeys(row["budget"] for row in of):
            ratios = {row["side"]: row["ratio"] for row in of if row["budget"] == budget}
            cells.append((name, f"{budget:g}", *(f"{ratios[s]:.2f}" for s in solvers)))
    return markdown(("net", "budget of PyTorch", *(f"`{s}`" for s in solvers)), cells)


def architectures(records: Records) -> str:
    cells = []
    for name, rows in sorted(by_workload(records["plan-quality"]["rows"]).items()):
        sides = {
            side: [r for r in rows if r["side"] == side] for side in ("graph", "whole", "roofline")
        }
        if not sides["roofline"]:
            continue
        ratios = [row["ratio"] for row in sides["roofline"]]
        cells.append(
            (
                name,
                f"{sides['graph'][0]['joint_nodes']:,}",
                f"{geometric_mean(max(r, 1e-3) for r in ratios):.2f}",
                f"{max(ratios):.2f}",
                *(f"{row['ratio']:.2f}" for row in sides["whole"][:1]),
            )
        )
    head = ("architecture", "joint nodes", "cost, geometric mean", "worst", "time to plan")
    return markdown(head, cells)


def deep(records: Records) -> str:
    rows = records["plan-quality"]["rows"]
    nodes = {row["workload"]: row["joint_nodes"] for row in rows if row["side"] == "graph"}
    cells = [
        (
            row["workload"],
            f"{nodes[row['workload']]:,}",
            f"{row['budget']:g}",
            f"{row['plan_s']:.0f} s",
            percent(row["gap"]),
        )
        for row in rows
        if row["side"] == "deep"
    ]
    return markdown(("architecture", "joint nodes", "budget", "planned in", "gap"), cells)


def partition(records: Records) -> str:
    rows = records["partition"]["rows"]
    ours = {(r["workload"], r["budget"]): r for r in rows if r["side"] == "remat"}
    cells = []
    for row in rows:
        if row["side"] == "pytorch":
            beside = ours[row["workload"], row["budget"]]
            theirs_s, ours_s = (r["collection off"]["seconds"] for r in (row, beside))
            shown = f"{theirs_s:.2f} s", f"{ours_s:.2f} s", f"{theirs_s / ours_s:.1f}×"
            cells.append(
                (str(row["layers"]), f"{row['joint_nodes']:,}", f"{row['budget']:g}", *shown)
            )
    return markdown(("layers", "joint nodes", "budget", "PyTorch", "remat", "faster"), cells)


#: The sides of `step` that are shown. "remat tuned" is in the kept results; its option is gone.
STEP_SIDES = {
    "remat": "remat at PyTorch's bytes",
    "remat peak": "remat at PyTorch's measured peak",
    "pytorch again": "PyTorch beside itself",
}


def step(records: Records) -> str:
    cells = []
    for row in rows_of(records["step"], *STEP_SIDES):
        if row["budget"] != 1:
            low, middle, high = row["to_pytorch"]
            time = f"{middle:.2f} ({low:.2f}–{high:.2f})"
            shown = STEP_SIDES[row["side"]], time, f"{row['peak_to_pytorch']:.2f}"
            cells.append((row["workload"], f"{row['budget']:g}", *shown))
    return markdown(("model", "budget", "who", "step time", "peak"), cells)


def predictions(records: Records) -> str:
    """Predicted against measured extra time, by cost model."""
    cells = []
    for name, found in records["step"]["summary"]["predicted"].items():
        whose, _, model = name.partition(", ")
        cells.append(
            (
                f"`{model}`",
                "all" if whose == "all" else "those that remat compiled",
                str(found["plans"]),
                f"{found['spearman']:.2f}",
                f"{found['spearman_if_exact']:.2f}",
                f"{found['predicted_to_measured']:.2f}",
            )
        )
    head = ("cost model", "plans", "count", "rank correlation", "if exact", "total to measured")
    return markdown(head, cells)


def first_step(records: Records) -> str:
    """A first step, forward and backward, beside plain Inductor's: with empty caches, and with full ones."""
    record = records["compile-time"]
    cells = []
    for name, rows in by_workload(record["rows"]).items():
        by_side = {row["side"]: row for row in rows}
        ours = (by_side["remat"], by_side["peak"])
        cells.append(
            (
                name,
                f"{by_side['inductor']['seconds']:.1f} s",
                *(f"{row['ratio']:.2f}" for row in ours),
                *(f"{row['warm_ratio']:.2f}" for row in ours),
            )
        )
    sides = [record["summary"][side] for side in ("remat", "peak")]
    means = (f"{s[key]:.2f}" for key in ("geometric_mean", "warm_geometric_mean") for s in sides)
    cells.append(("geometric mean", "", *means))
    head = ("model", "plain Inductor", "ratio 0.5", "peak", "ratio 0.5, warm", "peak, warm")
    return markdown(head, cells)


def memory(records: Records) -> str:
    peak, compiled, fit = (records[name] for name in ("peak", "compiled-memory", "fit"))
    ratios = rows_of(peak, "ratio")
    budgets, models = ({row[key] for row in ratios} for key in ("budget", "workload"))
    nets = len(by_workload(compiled["rows"]))
    plans = f"{nets} models, {len(rows_of(compiled, 'ratio', 'within'))} plans"
    steps = f"{len(by_workload(fit['rows']))} models, {len(fit['rows'])} steps"
    return markdown(
        ("figure", "measured on", "off by at most"),
        [
            (
                "simulated peak against the storages that were alive, eager lowering",
                f"{len(models)} models × {len(budgets)} budgets",
                percent(peak["summary"]["largest_error"]),
            ),
            (
                "peak known once Inductor has compiled, against the allocator",
                plans,
                percent(compiled["summary"]["largest_known_off"]),
            ),
            (
                "peak expected before that",
                plans,
                percent(compiled["summary"]["largest_expected_off"]),
            ),
            (
                "peak of the whole step, optimizer included (`remat fit`)",
                steps,
                percent(fit["summary"]["largest_off"]),
            ),
        ],
    )


def peak_plans(records: Records) -> str:
    summary = records["peak-plans"]["summary"]
    cells = [(kind, f"{mean:.2f}") for kind, mean in summary["geometric_means"].items()]
    cells.append(("the worst single plan", f"{summary['largest_ratio']:.2f}"))
    return markdown(("steps", "recompute cost at the same peak"), cells)


def hand_written(records: Records) -> str:
    """What people write by hand: how its step compares with that of the plan within the same peak."""
    rows = [row for row in rows_of(records["hand-written"]) if "ratio" in row]
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        side = row["side"] if row["budget"] is None else f"{row['side']} {row['budget']:g}"
        cell = f"{row['ratio']:.2f} at {row['peak_bytes'] / 2**30:.1f} GiB"
        found.setdefault(side, {})[row["workload"]] = cell
    models = list(by_workload(rows))
    greedy = (
        [r["greedy_ratio"] for r in rows if r["workload"] == model and "greedy_ratio" in r]
        for model in models
    )
    cells = [(side, *(of.get(model, "–") for model in models)) for side, of in found.items()]
    cells.append(("the solver `greedy`, mean", *(f"{geometric_mean(each):.2f}" for each in greedy)))
    return markdown(("step by hand / plan", *models), cells)


def chunks(records: Records) -> str:
    """A chunked loss beside the whole one, at the same share of the peak."""
    cells = [
        (
            row["workload"],
            f"{row['side']}, `Peak({row['budget']})`",
            f"{row['peak_ratio']:.2f}",
            f"{row['step_ratio']:.2f}",
        )
        for row in rows_of(records["chunked-loss"], "modelled", "measured")
    ]
    return markdown(("model", "figures", "peak, chunked / whole", "step, chunked / whole"), cells)


def reports(records: Records) -> str:
    """Public reports about PyTorch's partitioner."""
    sides = records["reports"]["summary"]
    about: dict[str, tuple[str, Callable[[float], str]]] = {
        "197838": ("peak at budget 0, divided by that at budget 1", "{:.2f}".format),
        "193193": ("peak of blocks that run twice, divided by eager PyTorch's", "{:.2f}".format),
        "190758": ("gradients that belong to another dropout mask", percent),
    }
    cells = [
        (
            f"[{n}](https://github.com/pytorch/pytorch/issues/{n})",
            what,
            *(text(sides[side][n]) for side in ("pytorch", "remat")),
        )
        for n, (what, text) in about.items()
    ]
    return markdown(("report", "figure", "PyTorch", "remat"), cells)


def schedules(records: Records) -> str:
    cells = []
    for row in records["schedules"]["rows"]:
        if row["published"] is not None:
            found = "none found" if row["increase"] is None else f"{row['increase']:.2f} %"
            name = row["workload"].partition("_w")[0].partition(" ")[0]
            shown = f"{row['budget']:g}", f"{row['published']:g} %", found
            cells.append((name, str(row["nodes"]), *shown))
    return markdown(("graph", "nodes", "peak", "best published", "remat"), cells)


def frontier(records: Records) -> str:
    rows = records["frontier"]["rows"]
    worse = sum(row["score"] > row["pytorch_score"] for row in rows)
    cells = str(len(rows)), f"{span([row['ratio'] for row in rows], 0)}×", str(worse)
    return markdown(("instances", "faster than a sweep of 100 runs", "worse knees"), [cells])


def knapsacks(records: Records) -> str:
    cells = []
    for row in records["solvers"]["rows"]:
        if row.get("shared") and row["family"] == "all":
            name = row["side"]
            whose = f"PyTorch's {name[6:]}" if name.startswith("torch-") else f"`{name}`"
            shown = f"{100 * row['proven']:.1f} %", str(row["infeasible"])
            cells.append((whose, *shown, f"{1e3 * row['median_s']:,.1f} ms"))
    return markdown(("solver", "proven within a second", "answers above capacity", "median"), cells)


def checkpointing(records: Records) -> str:
    cells = []
    for row in rows_of(records["sac"], "step"):
        theirs = row["theirs"]
        said = f"{theirs['recompute_ms']:.1f} ms" if theirs["fits"] else "above the budget"
        ours, measured = row["again_ms"]
        shown = said, f"{ours:.1f} ms", f"{measured:.1f} ms"
        cells.append((row["workload"], f"{row['budget']:g}", *shown))
    head = ("model", "share of the peak", "PyTorch's `sac_milp`", "remat", "remat, measured")
    return markdown(head, cells)


def checkpointing_large(records: Records) -> str:
    cells = []
    for row in rows_of(records["sac"], "program"):
        theirs = row["theirs"]
        kept = "" if theirs["fits"] else ", above the budget"
        shown = f"{theirs['solve_s']:.0f} s{kept}", f"{row['solve_s'][0]:.1f} s"
        cells.append((f"{row['budget']:g}", *shown))
    return markdown(("share of the peak", "PyTorch's `sac_milp`", "remat"), cells)


def hooks(records: Records) -> str:
    rows = records["hooks"]["rows"]
    plain = {row["budget"]: row for row in rows if row["side"] == "none"}
    cells = []
    for row in rows:
        of, (name, _, by) = plain[row["budget"]], row["side"].partition(" by ")
        saved = f"{row['saved'] / MIB:.1f} MiB", f"{row['saved'] / of['saved']:.3f}"
        cells.append(
            (
                f"{row['budget']:g}",
                (name if row is of else f"`{name}`") + (f", by {by}" if by else ""),
                *(("", "") if by else saved),
                f"{row['measured'] / MIB:.1f} MiB",
                "" if row is of else f"{100 * (1 - row['measured'] / of['measured']):.1f} %",
                "" if row is of else f"{row['error']:.1e}",
            )
        )
    head = ("budget", "hooks", "saved", "share", "peak", "falls by", "gradient error")
    return markdown(head, cells)


def pages(records: Records) -> str:
    """The pages that `remat explain --html` writes of large steps, with a slider over the frontier."""
    cells = [
        (
            row["workload"],
            f"{row['nodes']:,}",
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['written_s']:.0f} s",
            f"{row['median_drawn_ms'] / 1e3:.1f} s",
        )
        for row in records["explorer"]["rows"]
    ]
    return markdown(("step", "nodes", "page", "written in", "drawn in"), cells)


def summary(records: Records) -> str:
    """The few figures of the README."""
    of = {name: records[name] for name in ("gradients", "plan-quality", "step", "peak")}
    wrong = {
        who: [
            wrong_models(rows_of(of["gradients"], f"{who} {lower}"))
            for lower in ("eager", "inductor")
        ]
        for who in ("pytorch", "remat")
    }
    models = len(rows_of(of["gradients"], "remat eager"))
    quality = of["plan-quality"]["summary"]
    same, peak = (
        [row["to_pytorch"][1] for row in rows_of(of["step"], side) if row["budget"] != 1]
        for side in ("remat", "remat peak")
    )

    def mean_and_worst(cost: str) -> str:
        return f"{quality[cost]['geomean_ratio']:.2f} (worst {quality[cost]['worst_ratio']:.2f})"

    return markdown(
        ("", "PyTorch", "remat"),
        [
            (
                f"of {models} models, those with a wrong or refused gradient at some budget; under Inductor",
                *("; ".join(map(str, wrong[who])) for who in ("pytorch", "remat")),
            ),
            (
                "modelled recompute cost at the same saved bytes, "
                f"{quality['roofline']['architectures']} architectures at real size",
                "1",
                mean_and_worst("roofline"),
            ),
            (
                "the same, priced by what a fusing compiler moves",
                "1",
                mean_and_worst("roofline-fused"),
            ),
            ("time to plan", "1", f"{quality['whole']['geomean_ratio']:.2f}"),
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
                f"off by {percent(of['peak']['summary']['largest_error'])} at most",
            ),
        ],
    )


TABLES: dict[str, Callable[[Records], str]] = {
    "summary": summary,
    "gradients": gradients,
    "model-types": model_types,
    "quality": quality,
    "flops": flops,
    "architectures": architectures,
    "deep": deep,
    "partition": partition,
    "step": step,
    "predictions": predictions,
    "first-step": first_step,
    "memory": memory,
    "peak-plans": peak_plans,
    "hand-written": hand_written,
    "chunked-loss": chunks,
    "reports": reports,
    "schedules": schedules,
    "frontier": frontier,
    "knapsacks": knapsacks,
    "checkpointing": checkpointing,
    "checkpointing-large": checkpointing_large,
    "hooks": hooks,
    "pages": pages,
}
