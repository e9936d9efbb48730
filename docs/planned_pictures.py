"""The pictures of the site that show real plans; `pictures.py` draws them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
from drawing import Chart, Drawing, Point
from torch import nn

import remat
from remat.cli.hf import build
from remat.graph.costs import Flops, Roofline, RooflineFused
from remat.planning.frontier import Frontier

MIB = 1 << 20
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def knee() -> Drawing:
    """The frontier of one step, and where more memory starts to buy little."""
    warnings.simplefilter("ignore")
    example = build("gpt2", ["n_layer=4", "n_embd=512", "n_head=8"], batch=8, seq=512)
    joint = remat.capture(example.model, example.args, example.kwargs)
    found = remat.frontier(joint, cost="roofline:h100")
    d = Drawing(
        860, 360, "A frontier: the cheapest plan for every number of saved bytes, and its knee"
    )
    chart = frontier_chart(d, found, (70, 66, 560, 234), cost=1e6)
    chart.axes("saved bytes, MiB", "computed again, µs", *ticks(chart))
    at = found.knee()
    x, y = chart.at(at.saved_bytes / MIB, at.recompute_cost / 1e6)
    d.arrow((x + 90, y - 60), (x + 8, y - 8), color="blue")
    d.text(x + 94, y - 62, "the knee", "t-blue head")
    d.text(650, 90, "left of it every byte", "small")
    d.text(650, 108, "saves much time;", "small")
    d.text(650, 126, "right of it, little", "small")
    d.text(650, 170, "grey: proven that", "small")
    d.text(650, 188, "no plan is in there", "small")
    d.text(70, 26, "A GPT-2 of 4 layers, every budget at once", "head")
    return d


def frontier_chart(
    d: Drawing, found: Frontier, place: tuple[float, float, float, float], cost: float
) -> Chart:
    """The curve of a frontier above the region that is proven empty."""
    points: list[Point] = [(p.saved_bytes / MIB, p.recompute_cost / cost) for p in found.points]
    chart = Chart(d, place, 1.03 * max(x for x, _ in points), 1.05 * max(y for _, y in points))
    bound = [(b / MIB, c / cost) for b, c in found.bound]
    bound = [(b, c) for b, c in bound if b <= chart.right]
    edge = [(0.0, chart.top), (bound[0][0], chart.top), *bound, (chart.right, bound[-1][1])]
    d.area([chart.at(*p) for p in (*edge, (chart.right, 0), (0, 0))])
    chart.curve([*points, (chart.right, points[-1][1])], "blue", steps=True)
    knee = found.knee()
    d.dot(*chart.at(knee.saved_bytes / MIB, knee.recompute_cost / cost), "blue")
    return chart


def ticks(chart: Chart) -> tuple[list[float], list[float]]:
    """Round numbers along both axes."""
    found = []
    for end in (chart.right, chart.top):
        step = next(s * 10**e for e in range(-3, 6) for s in (1, 2, 5) if end / (s * 10**e) <= 6)
        found.append([step * k for k in range(int(end / step) + 1)])
    return found[0], found[1]


def step_memory() -> Drawing:
    """Bytes alive over the tutorial's step, without remat and within a peak."""
    without, within = plans = planned((1.0, "peak:177MiB"))
    d = Drawing(860, 350, "Memory of one training step, without remat and with it")
    chart = memory(d, plans, ("grey", "blue"))
    d.text(70, 26, "Memory of one training step: a GPT on a CPU, the tutorial’s", "head")
    y = chart.at(0, 177)[1]
    d.line([(70, y), (630, y)], "blue", dashed=True)
    d.text(82, y - 8, "budget: 177 MiB", "t-blue")
    for plan, name, color in ((without, "without remat", "grey"), (within, "with remat", "blue")):
        y = chart.at(0, plan.peak_bytes / MIB)[1]
        d.text(638, y + 5, name, f"t-{color} head")
        more = plan.before_after.more or 0.0
        step = f", step {more:+.1%}" if plan is within else ""
        d.text(638, y + 24, f"peak {plan.peak_bytes // MIB} MiB{step}", f"t-{color}")
    return d


def bytes_and_peak() -> Drawing:
    """What each kind of budget bounds, on one step."""
    plans = planned((0.2,))
    d = Drawing(
        860,
        350,
        "Saved bytes are what crosses from forward to backward; the peak is the highest moment",
    )
    chart = memory(d, plans, ("blue",))
    (plan,) = plans
    sums = plan.timeline.nbytes()
    middle = plan.timeline.boundary
    d.text(70, 26, "One step under budget 0.2: 20 % of the activations’ bytes", "head")
    own = sum(p.nbytes for p in tutorial().build()[0].parameters()) / MIB
    x, low = chart.at(1, own)
    high = chart.at(1, own + plan.saved_bytes / MIB)[1]
    d.curve([(x, low), (x, high)], "orange")
    d.text(90, 92, f"saved: {plan.saved_bytes / MIB:.0f} MiB", "t-orange head")
    d.text(90, 110, "what a budget in bytes bounds", "small")
    d.arrow((285, 105), (x - 4, (low + high) / 2), color="orange", dashed=True)
    top = max(range(len(sums)), key=sums.__getitem__)
    at = top / middle if top < middle else 1 + (top - middle) / (len(sums) - middle)
    x, y = chart.at(at, sums[top] / MIB)
    d.dot(x, y, "blue")
    d.text(638, y, f"peak: {sums[top] / MIB:.0f} MiB", "t-blue head")
    d.text(638, y + 18, "what a Peak bounds", "small")
    return d


def planned(budgets: Sequence[float | str]) -> list[remat.Plan]:
    """Plans for the step of the tutorial."""
    warnings.simplefilter("ignore")
    model, args, _ = tutorial().build()
    joint = remat.capture(model, args, lower="eager")
    return [remat.plan(joint, budget, cost="roofline:epyc") for budget in budgets]


def tutorial() -> ModuleType:
    """The tutorial's program as a module."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import tutorial

    return tutorial


def memory(d: Drawing, plans: Sequence[remat.Plan], colors: Sequence[str]) -> Chart:
    """Bytes alive at each moment under some plans; both halves are stretched to one width."""
    chart = Chart(d, (70, 66, 560, 229), 2, 1.1 * max(p.peak_bytes for p in plans) / MIB)
    chart.axes("", "bytes alive, MiB", (), ticks(chart)[1])
    for plan, color in zip(plans, colors, strict=True):
        sums, middle = plan.timeline.nbytes(), plan.timeline.boundary
        at = [
            k / middle if k < middle else 1 + (k - middle) / (len(sums) - middle)
            for k in range(len(sums))
        ]
        chart.curve([(x, y / MIB) for x, y in zip(at, sums, strict=True)], color, steps=True)
    d.line([chart.at(1, 0), chart.at(1, chart.top)], dashed=True)
    for x, name in ((0.5, "forward"), (1.5, "backward")):
        d.text(chart.at(x, 0)[0], 320, name, "small", anchor="middle")
    return chart


def costs() -> Drawing:
    """What the operators of one layer cost under three models, as shares of the layer's cost."""
    layers = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1)
    model, x = nn.Sequential(*layers).to("meta"), torch.empty(8192, 1024, device="meta")
    joint = remat.capture(model, (x,))
    names = "layer norm", "matrix product", "gelu", "dropout"
    rows = {name: dict.fromkeys(names, 0) for name in ("flops", "roofline", "roofline-fused")}
    models = Flops(), Roofline(), RooflineFused()
    part = names[0]
    for node in joint.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        part = {"addmm": names[1], "inductor_seeds_default": names[3]}.get(node.name, part)
        if part == names[1] and node.name != "addmm":
            part = names[2]
        if any(n.name.startswith("tangents") for n in node.all_input_nodes):
            break
        for (_, row), cost in zip(rows.items(), models, strict=True):
            row[part] += cost.cost(node)
    d = Drawing(860, 270, "The same layer under three cost models")
    d.text(40, 34, "Where one layer’s time goes, by three cost models", "head")
    colors = dict(zip(names, ("green", "blue", "orange", "grey"), strict=True))
    for k, (name, row) in enumerate(rows.items()):
        y, at = 60 + 56 * k, 190.0
        d.text(176, y + 23, name, "mono", anchor="end")
        for what, cost in row.items():
            width = 620 * cost / sum(row.values())
            d.box(at, y, width, 36, [""], colors[what])
            if width > 60:
                d.text(
                    at + width / 2,
                    y + 23,
                    f"{100 * cost / sum(row.values()):.0f} %",
                    anchor="middle",
                )
            at += width
    for k, what in enumerate(names):
        d.box(190 + 155 * k, 236, 16, 16, [""], colors[what])
        d.text(213 + 155 * k, 249, what, "small")
    return d


def hand_written() -> Drawing:
    """Time added to a step over its peak, for steps that people write by hand and for plans; by model."""
    rows = json.loads((RESULTS / "hand_written.json").read_text())["rows"]
    models = list(dict.fromkeys(row["workload"] for row in rows if "ratio" in row))
    d = Drawing(860, 100 + 240 * -(-len(models) // 3), "Step time over peak, by hand and planned")
    d.text(40, 30, "The same peak, by hand and planned: what recomputing adds to the step", "head")
    for x, color, name in ((40, "orange", "by hand"), (140, "blue", "remat’s plan")):
        d.dot(x + 6, 53, color, 5)
        d.text(x + 18, 58, name, "small")
    for k, model in enumerate(models):
        whole = next(r for r in rows if r["workload"] == model and r["side"] == "graph")
        # Steps that offload everything wait so long for copies that the others could not be told apart.
        cells = [r for r in rows if r["workload"] == model and "greedy_ms" in r]
        least = whole["step_ms"]
        added = [100 * (r["ms"] / least - 1) for r in cells]
        place = (60.0 + 270 * (k % 3), 110.0 + 240 * (k // 3), 210.0, 150.0)
        chart = Chart(d, place, 100, 1.1 * max(added))
        chart.axes("peak, % of budget 1", f"{model}: step, +%", (0, 50, 100), ticks(chart)[1])
        for row, more in zip(cells, added, strict=True):
            x = 100 * row["peak_bytes"] / whole["budget_1_peak_bytes"]
            ours = 100 * (row["plan_ms"] / least - 1)
            d.line([chart.at(x, more), chart.at(x, ours)])
            d.dot(*chart.at(x, more), "orange", 4)
            d.dot(*chart.at(x, ours), "blue", 4)
    return d


PLANNED: dict[str, Callable[[], Drawing]] = {
    "pictures/frontier.svg": knee,
    "pictures/bytes-and-peak.svg": bytes_and_peak,
    "pictures/tutorial-step.svg": step_memory,
    "pictures/costs.svg": costs,
    "pictures/hand-written.svg": hand_written,
}
