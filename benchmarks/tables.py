"""The tables of the benchmarks, in Markdown: for the pages of `docs`, and for the terminal after a run.

A page has a table where it says ``<!-- table: NAME -->``, up to ``<!-- end of table -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Row, geometric_mean, grouped

RESULTS = Path(__file__).parent / "results"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MIB = 1 << 20

#: Records by the name of the experiment.
Records = Mapping[str, Row]
#: By its head, what a column shows of a row: a format of the row's entries, or a function of the row.
Columns = Mapping[str, str | Callable[[Row], str]]


class Kept(dict[str, Row]):
    """Records by experiment: those that are given, else those that are kept in `results`."""

    def __missing__(self, name: str) -> Row:
        record: Row = json.loads((RESULTS / f"{name.replace('-', '_')}.json").read_text())
        self[name] = record
        return record


def filled(text: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        KeyError: a table that the page names is none of `TABLES`.
    """
    records = Kept()
    return PLACE.sub(lambda m: m[1] + TABLES[m[2]](records) + m[3], text)


def markdown(head: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(columns: Columns, rows: Iterable[Row]) -> str:
    """A line for each row."""
    shows = [show.format_map if isinstance(show, str) else show for show in columns.values()]
    return markdown(list(columns), [[show(row) for show in shows] for row in rows])


def lines(
    experiment: str,
    columns: Columns,
    *sides: str,
    shown: Callable[[Row], bool] = lambda row: True,
) -> Callable[[Records], str]:
    """Makes a table with a line for each row of some sides; a row has the figures of its graph too."""

    def make(records: Records) -> str:
        graphs = {row["workload"]: row for row in rows_of(records[experiment], "graph")}
        rows = filter(shown, rows_of(records[experiment], *sides))
        return table(columns, [graphs.get(row["workload"], {}) | row for row in rows])

    return make


def span(values: Sequence[float], digits: int = 2) -> str:
    """The smallest and the largest of some values."""
    texts = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return texts[0] if texts[0] == texts[1] else "–".join(texts)


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share else "0 %"


def rows_of(record: Row, *sides: str) -> list[Row]:
    """The rows of some sides; of all sides if none is named."""
    return [row for row in record["rows"] if not sides or row["side"] in sides]


def wrong_models(rows: Sequence[Row]) -> int:
    """The number of models with a wrong or refused gradient."""
    return sum(bool(row["wrong_at"] or row["failed"]) for row in rows)


def gradients(records: Records) -> str:
    cells = []
    for name in ("gradients", "gradients-2.15"):
        version = ".".join(records[name]["torch"].split(".")[:2])
        for lower in ("eager", "inductor"):
            sides = [rows_of(records[name], f"{who} {lower}") for who in ("pytorch", "remat")]
            if all(sides):
                wrong = (f"{wrong_models(rows)} of {len(rows)}" for rows in sides)
                worst = (f"{max(row['worst'] for row in rows):.2g}" for rows in sides)
                figures = (text for pair in zip(wrong, worst, strict=True) for text in pair)
                cells.append((version, lower, *figures))
    figures = ("wrong or refused", "worst error")
    head = (f"{who}: {what}" for who in ("PyTorch", "remat") for what in figures)
    return markdown(("version", "lowering", *head), cells)


def model_types(records: Records) -> str:
    cells = []
    for lower in ("eager", "inductor"):
        types = grouped(rows_of(records["model-types"], f"remat {lower}"))
        good = sum(
            all(not r["wrong"] and r["failed"] is None for r in rows) for rows in types.values()
        )
        cases = sum(map(len, types.values()))
        cells.append((lower, str(len(types)), str(good), str(cases)))
    return markdown(("lowering", "types measured", "right in every case", "cases"), cells)


def quality(records: Records) -> str:
    summary = records["plan-quality"]["summary"]
    columns: Columns = {
        "cost model": "`{cost}`",
        "measured on": "{architectures} architectures, {cells} cells",
        "geometric mean": "{geomean_ratio:.2f}",
        "worst": "{worst_ratio:.2f}",
        "largest gap": lambda of: percent(of["worst_gap"]),
        "within 0.1 %": lambda of: f"{100 * of['share_within_0.1%']:.0f} %",
    }
    costs = (cost for cost in ("roofline", "roofline-fused", "flops") if cost in summary)
    return table(columns, [{"cost": cost, **summary[cost]} for cost in costs])


def flops(records: Records) -> str:
    rows = records["flops"]["rows"]
    solvers = list(dict.fromkeys(row["side"] for row in rows))
    cells = []
    for name, of in grouped(rows).items():
        for budget in dict.fromkeys(row["budget"] for row in of):
            ratios = {row["side"]: row["ratio"] for row in of if row["budget"] == budget}
            cells.append((name, f"{budget:g}", *(f"{ratios[s]:.2f}" for s in solvers)))
    return markdown(("net", "budget of PyTorch", *(f"`{s}`" for s in solvers)), cells)


def architectures(records: Records) -> str:
    columns: Columns = {
        "architecture": "{workload}",
        "joint nodes": "{joint_nodes:,}",
        "cost, geometric mean": lambda row: (
            f"{geometric_mean(max(r, 1e-3) for r in row['ratios']):.2f}"
        ),
        "worst": lambda row: f"{max(row['ratios']):.2f}",
        "time to plan": "{ratio:.2f}",
    }
    found = []
    for _, rows in sorted(grouped(records["plan-quality"]["rows"]).items()):
        facts = {key: row[key] for row in rows if row["side"] in ("graph", "whole") for key in row}
        if ratios := [row["ratio"] for row in rows if row["side"] == "roofline"]:
            found.append({**facts, "ratios": ratios})
    return table(columns, found)


def partition(records: Records) -> str:
    pairs: dict[Any, Row] = {}
    for row in records["partition"]["rows"]:
        pair = pairs.setdefault((row["workload"], row["budget"]), {})
        pair |= row | {row["side"]: row["collection off"]["seconds"]}
    columns: Columns = {
        "layers": "{layers}",
        "joint nodes": "{joint_nodes:,}",
        "budget": "{budget:g}",
        "PyTorch": "{pytorch:.2f} s",
        "remat": "{remat:.2f} s",
        "faster": lambda pair: f"{pair['pytorch'] / pair['remat']:.1f}×",
    }
    return table(columns, [pair for pair in pairs.values() if "pytorch" in pair])


def step(records: Records) -> str:
    """Time and peak of remat's steps beside PyTorch's: a line for each model and budget."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows_of(records["step"], "pytorch again", "remat", "remat peak"):
        low, median, high = row["to_pytorch"]
        key = row["workload"], f"{row['budget']:g}"
        cells.setdefault(key, []).append(f"{median:.2f} ({low:.2f}–{high:.2f})")
        cells[key].append(f"{row['peak_to_pytorch']:.2f}")
    head = ("PyTorch again", "peak", "at its bytes", "peak", "at its peak", "peak")
    shown = [(*key, *texts) for key, texts in cells.items() if key[1] != "1"]
    return markdown(("model", "budget", *head), shown)


def default(records: Records) -> str:
    """Time and peak of steps without a budget beside plain Inductor's: a line for each model."""
    cells: dict[str, list[str]] = {}
    for row in rows_of(records["default"], "pytorch again", "remat"):
        low, median, high = row["to_pytorch"]
        cells.setdefault(row["workload"], []).append(f"{median:.2f} ({low:.2f}–{high:.2f})")
        if row["side"] == "remat":
            cells[row["workload"]].append(f"{row['peak_to_pytorch']:.2f}")
    summary = records["default"]["summary"]
    cells["geometric mean"] = ["", f"{summary['mean_step']:.2f}", f"{summary['mean_peak']:.2f}"]
    head = ("model", "Inductor again", "remat", "remat's peak")
    return markdown(head, [(name, *texts) for name, texts in cells.items()])


def predictions(records: Records) -> str:
    """Predicted against measured extra time, by cost model."""
    whose = {"all": "all", "remat": "those that remat compiled"}
    columns: Columns = {
        "cost model": lambda found: f"`{found['name'].partition(', ')[2]}`",
        "plans": lambda found: whose[found["name"].partition(", ")[0]],
        "count": "{plans}",
        "rank correlation": "{spearman:.2f}",
        "if exact": "{spearman_if_exact:.2f}",
        "total to measured": "{predicted_to_measured:.2f}",
        "error, of the step": lambda found: percent(found["error_of_step"]),
    }
    predicted = records["step"]["summary"]["predicted"]
    return table(columns, [{"name": name, **found} for name, found in predicted.items()])


def first_step(records: Records) -> str:
    """A first step, forward and backward, beside plain Inductor's: with empty caches, and with full ones."""
    record = records["compile-time"]
    sides = ("pytorch", "remat", "peak")
    cells = []
    for name, rows in grouped(record["rows"]).items():
        by_side = {row["side"]: row for row in rows}
        ratios = (f"{by_side[side][key]:.2f}" for key in ("ratio", "warm_ratio") for side in sides)
        cells.append((name, f"{by_side['inductor']['seconds']:.1f} s", *ratios))
    keys = ("geometric_mean", "warm_geometric_mean")
    means = (f"{record['summary'][side][key]:.2f}" for key in keys for side in sides)
    cells.append(("geometric mean", "", *means))
    of = ("PyTorch's 0.5", "ratio 0.5", "peak")
    head = ("model", "plain Inductor", *of, *(f"{what}, warm" for what in of))
    return markdown(head, cells)


def memory(records: Records) -> str:
    peak, compiled, fit = (records[name] for name in ("peak", "compiled-memory", "fit"))
    ratios = rows_of(peak, "ratio")
    budgets, models = ({row[key] for row in ratios} for key in ("budget", "workload"))
    nets = len(grouped(compiled["rows"]))
    plans = f"{nets} models, {len(rows_of(compiled, 'ratio', 'within'))} plans"
    steps = f"{len(grouped(fit['rows']))} models, {len(fit['rows'])} steps"
    figures = {
        "simulated peak against the storages that were alive, eager lowering": (
            f"{len(models)} models × {len(budgets)} budgets",
            peak["summary"]["largest_error"],
        ),
        "peak known once Inductor has compiled, against the allocator": (
            plans,
            compiled["summary"]["largest_known_off"],
        ),
        "peak expected before that": (plans, compiled["summary"]["largest_expected_off"]),
        "peak of the whole step, optimizer included (`remat fit`)": (
            steps,
            fit["summary"]["largest_off"],
        ),
    }
    cells = [(figure, on, percent(off)) for figure, (on, off) in figures.items()]
    return markdown(("figure", "measured on", "off by at most"), cells)


def peak_plans(records: Records) -> str:
    summary = records["peak-plans"]["summary"]
    means = {**summary["geometric_means"], "the worst single plan": summary["largest_ratio"]}
    cells = [(kind, f"{mean:.2f}") for kind, mean in means.items()]
    return markdown(("steps", "recompute cost at the same peak"), cells)


def networks(records: Records) -> str:
    """Costs of plans within shares of the peak, with their bounds: a line for each network, and the means."""
    record = records["networks"]
    summary, cells = record["summary"], []
    shares = list(summary["cost_within_share"])
    for name, rows in grouped(rows_of(record, "graph", "remat", "least")).items():
        (graph,) = rows_of({"rows": rows}, "graph")
        plans = rows_of({"rows": rows}, "remat")
        least = min(row["share"] for row in rows if row.get("share"))
        facts = f"{graph['nodes']:,}", f"{graph['peak_bytes'] / 2**30:.1f} GiB"
        of_eager = f"{graph['peak_bytes'] / graph['eager_bytes']:.2f}"
        seconds = [row["seconds"] for row in plans if row["cost"] is not None]
        planned = f"{span(seconds, 0)} s" if seconds else "–"
        cells.append((name, *facts, of_eager, *map(_costs, plans), f"{least:.2f}", planned))
    means = []
    for share in shares:
        cost, bound = (summary[f"{what}_within_share"][share] for what in ("cost", "bound"))
        means.append(
            f"{_percent(cost['mean'])} ({_percent(bound['mean'])}), {cost['networks']} of 9"
        )
    cells.append(("mean", "", "", "", *means, "", ""))
    facts = "network", "joint nodes", "peak", "of eager PyTorch's"
    return markdown((*facts, *shares, "least share found", "planned in"), cells)


def _costs(row: Row) -> str:
    """The cost of a plan with its bound, or why there is no plan."""
    if row["cost"] is not None:
        return f"{_percent(row['cost'])} ({_percent(row['bound'])})"
    return "impossible" if "infeasible" in row["why"] else "none found"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def networks_within(records: Records) -> str:
    """The least peaks found within a cost, as shares: a line for each network, and the means."""
    record = records["networks"]
    cells = []
    for name, rows in grouped(rows_of(record, "within")).items():
        cells.append((name, *(f"{r[key]:.2f}" for key in ("share", "of_eager") for r in rows)))
    summary = record["summary"]
    means = (summary["share_within_cost"], summary["share_of_eager_within_cost"])
    cells.append(("mean", *(f"{found['mean']:.2f}" for of in means for found in of.values())))
    costs = [f"{100 * float(cost):g} %" for cost in means[0]]
    of_eager = (f"of eager PyTorch's, {cost}" for cost in costs)
    return markdown(("network", *costs, *of_eager), cells)


def hand_written(records: Records) -> str:
    """What people write by hand: how its step compares with that of the plan within the same peak."""
    rows = [row for row in rows_of(records["hand-written"]) if "ratio" in row]
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        side = row["side"] if row["budget"] is None else f"{row['side']} {row['budget']:g}"
        cell = f"{row['ratio']:.2f} at {row['peak_bytes'] / 2**30:.1f} GiB"
        found.setdefault(side, {})[row["workload"]] = cell
    models = grouped(rows)
    greedy = (
        geometric_mean(row["greedy_ratio"] for row in of if "greedy_ratio" in row)
        for of in models.values()
    )
    cells = [(side, *(of.get(model, "–") for model in models)) for side, of in found.items()]
    cells.append(("the solver `greedy`, mean", *(f"{mean:.2f}" for mean in greedy)))
    return markdown(("step by hand / plan", *models), cells)


def reports(records: Records) -> str:
    """Public reports about PyTorch's partitioner."""
    sides = records["reports"]["summary"]
    about: dict[str, tuple[str, Callable[[float], str]]] = {
        "197838": ("peak at budget 0, divided by that at budget 1", "{:.2f}".format),
        "193193": ("peak of blocks that run twice, divided by eager PyTorch's", "{:.2f}".format),
        "190758": ("gradients that belong to another dropout mask", percent),
    }
    cells = []
    for number, (what, text) in about.items():
        link = f"[{number}](https://github.com/pytorch/pytorch/issues/{number})"
        values = (sides[side][number] for side in ("pytorch", "remat"))
        cells.append((link, what, *("" if value is None else text(value) for value in values)))
    return markdown(("report", "figure", "PyTorch", "remat"), cells)


def frontier(records: Records) -> str:
    rows = records["frontier"]["rows"]
    worse = sum(row["score"] > row["pytorch_score"] for row in rows)
    cells = str(len(rows)), f"{span([row['ratio'] for row in rows], 0)}×", str(worse)
    return markdown(("instances", "faster than a sweep of 100 runs", "worse knees"), [cells])


def hooks(records: Records) -> str:
    rows = records["hooks"]["rows"]
    plain = {row["budget"]: row for row in rows if row["side"] == "none"}
    cells = []
    for row in rows:
        of, (name, _, by) = plain[row["budget"]], row["side"].partition(" by ")
        saved = f"{row['saved'] / MIB:.1f} MiB", f"{row['saved'] / of['saved']:.3f}"
        falls = f"{100 * (1 - row['measured'] / of['measured']):.1f} %", f"{row['error']:.1e}"
        cells.append(
            (
                f"{row['budget']:g}",
                (name if row is of else f"`{name}`") + (f", by {by}" if by else ""),
                *(("", "") if by else saved),
                f"{row['measured'] / MIB:.1f} MiB",
                *(("", "") if row is of else falls),
            )
        )
    head = ("budget", "hooks", "saved", "share", "peak", "falls by", "gradient error")
    return markdown(head, cells)


def summary(records: Records) -> str:
    """The few figures of the README."""
    of = {name: records[name] for name in ("gradients", "plan-quality", "step", "peak")}
    wrong = [
        "; ".join(
            str(wrong_models(rows_of(of["gradients"], f"{who} {lower}")))
            for lower in ("eager", "inductor")
        )
        for who in ("pytorch", "remat")
    ]
    models = len(rows_of(of["gradients"], "remat eager"))
    quality = of["plan-quality"]["summary"]
    costs = (quality["roofline"], quality["roofline-fused"])
    modelled, fused = (f"{c['geomean_ratio']:.2f} (worst {c['worst_ratio']:.2f})" for c in costs)
    times = (
        [row["to_pytorch"][1] for row in rows_of(of["step"], side) if row["budget"] != 1]
        for side in ("remat", "remat peak")
    )
    same_bytes, same_peak = (f"{geometric_mean(each):.2f} ({span(each)})" for each in times)
    off = percent(of["peak"]["summary"]["largest_error"])
    nets = f"{quality['roofline']['architectures']} architectures at real size"
    cells = {
        f"of {models} models, those with a wrong or refused gradient at some budget; under Inductor": wrong,
        f"modelled recompute cost at the same saved bytes, {nets}": ("1", modelled),
        "the same, priced by what a fusing compiler moves": ("1", fused),
        "time to plan": ("1", f"{quality['whole']['geomean_ratio']:.2f}"),
        "measured step time under Inductor on a CPU, at the same saved bytes": ("1", same_bytes),
        "measured step time at the same measured peak": ("1", same_peak),
        "simulated peak against the storages that were alive": ("", f"off by {off} at most"),
    }
    rows = [(what, *figures) for what, figures in cells.items()]
    return markdown(("", "PyTorch", "remat"), rows)


TABLES: dict[str, Callable[[Records], str]] = {
    "summary": summary,
    "gradients": gradients,
    "model-types": model_types,
    "quality": quality,
    "flops": flops,
    "architectures": architectures,
    "deep": lines(
        "plan-quality",
        {
            "architecture": "{workload}",
            "joint nodes": "{joint_nodes:,}",
            "budget": "{budget:g}",
            "planned in": "{plan_s:.0f} s",
            "gap": lambda row: percent(row["gap"]),
        },
        "deep",
    ),
    "partition": partition,
    "step": step,
    "default": default,
    "predictions": predictions,
    "first-step": first_step,
    "memory": memory,
    "peak-plans": peak_plans,
    "hand-written": hand_written,
    "networks": networks,
    "networks-within": networks_within,
    "report-steps": lines(
        "report-steps",
        {
            "layers": lambda row: row["workload"].split("(")[1].split()[0],
            "budget of PyTorch": "{budget:g}",
            "its recomputing": lambda row: percent(row["recomputing"]),
            "step of remat / PyTorch, same peak": lambda row: "{:.2f}".format(row["step_at_1"]),
            "at 67.2 % of the peak": lambda row: (
                "–" if row["step_at_0.672"] is None else "{:.2f}".format(row["step_at_0.672"])
            ),
        },
    ),
    "chunked-loss": lines(
        "chunked-loss",
        {
            "model": "{workload}",
            "figures": "{side}, `Peak({budget})`",
            "peak, chunked / whole": "{peak_ratio:.2f}",
            "step, chunked / whole": "{step_ratio:.2f}",
        },
        *("modelled", "measured"),
    ),
    "reports": reports,
    "schedules": lines(
        "schedules",
        {
            "graph": lambda row: row["workload"].partition("_w")[0].partition(" ")[0],
            "nodes": "{nodes}",
            "peak": "{budget:g}",
            "best published": lambda row: (
                "–" if row["published"] is None else f"{row['published']:g} %"
            ),
            "remat": lambda row: (
                "none found" if row["increase"] is None else f"{row['increase']:.2f} %"
            ),
        },
        "auto",
    ),
    "frontier": frontier,
    "knapsacks": lines(
        "solvers",
        {
            "solver": lambda row: re.sub("`torch-(.*)`", r"PyTorch's \1", f"`{row['side']}`"),
            "proven within a second": lambda row: f"{100 * row['proven']:.1f} %",
            "answers above capacity": "{infeasible}",
            "median": lambda row: f"{1e3 * row['median_s']:,.1f} ms",
        },
        shown=lambda row: row.get("shared") and row["family"] == "all",
    ),
    "checkpointing": lines(
        "sac",
        {
            "model": "{workload}",
            "share of the peak": "{budget:g}",
            "PyTorch's `sac_milp`": lambda row: (
                f"{row['theirs']['recompute_ms']:.1f} ms"
                if row["theirs"]["fits"]
                else "above the budget"
            ),
            "remat": "{again_ms[0]:.1f} ms",
            "remat, measured": "{again_ms[1]:.1f} ms",
        },
        "step",
    ),
    "checkpointing-large": lines(
        "sac",
        {
            "share of the peak": "{budget:g}",
            "PyTorch's `sac_milp`": lambda row: (
                f"{row['theirs']['solve_s']:.0f} s"
                + ("" if row["theirs"]["fits"] else ", above the budget")
            ),
            "remat": "{solve_s[0]:.1f} s",
        },
        "program",
    ),
    "hooks": hooks,
    "pages": lines(
        "explorer",
        {
            "step": "{workload}",
            "nodes": "{nodes:,}",
            "page": lambda row: f"{row['bytes'] / 1e6:.1f} MB",
            "written in": "{written_s:.0f} s",
            "drawn in": lambda row: f"{row['median_drawn_ms'] / 1e3:.1f} s",
        },
    ),
}
