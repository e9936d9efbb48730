"""Plans and schedules within a peak, and frontiers: modelled, nothing runs.

``peak-plans``: plans within a peak, beside the best of a sweep over budgets in bytes at the same peak. The budget of a row is a
share of the range from the least peak of the sweep to that of budget 1. ``recomputed`` and ``gap`` are shares of the
cost of all nodes once.

``large-steps``: seconds to plan steps of many thousand nodes by their peak, without capture.

``schedules``: published rematerialisation graphs, and drawn ones of the same family. A budget is a share of the peak of
the graph's own order, rounded up; ``increase`` is that of the summed cost, in percent. The folder in
`REMAT_SCHEDULES` holds the published graphs as instance files; without it, graphs of the layered family are drawn.

``frontier``: the whole memory–runtime frontier of a knapsack and its knee, beside PyTorch's sweep of a hundred solver runs. Both knees
are scored alike: distance from no memory and no recomputation, both scaled to the frontier between the same least and
greatest budget.

``offloading``: plans within a peak that may offload over a link, beside those that save and recompute alone. The side is the link.

``explorer``: pages of large steps, each with the frontier behind its slider. Bytes of the file, seconds to write it, and milliseconds
until Chromium, without a window, has drawn it.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import remat
from benchmarks.experiment import INSTANCES, Case, Experiment, Row, grid, timed
from benchmarks.figures import above, geometric_mean, ratio_of
from benchmarks.workloads import ARCHITECTURES, REAL_AND_SMALL, captured
from remat.errors import BudgetError
from remat.passes.core.state import Costs
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry
from remat.solvers.knapsack.frontier import knapsack_frontier
from remat.solvers.run import run
from remat.solvers.schedule.problem import evaluate_schedule, least_peak
from remat.testing.steps import layered

COST = "roofline:h100"
#: The means of `peak-plans` are taken over these.
KINDS = {
    "transformers": (
        *("llama-7b", "llama-70b", "gpt2-xl", "bert-large", "t5-large", "vit-huge"),
        *("mixtral-8x7b", "gemma2-9b", "whisper-medium", "swin-base"),
    ),
    "small transformers": ("llama-small", "gpt2-small", "bert-small", "t5-small", "vit-small"),
    "convolutions": ("resnet-50", "resnet-101", "densenet-201", "unet"),
    "small convolutions": ("resnet-small",),
}
#: The best increase published, in percent, by a part of the graph's name and the share: of Checkmate's
#: MILP (Jain et al. 2020), MOCCASIN (Bartan et al. 2023) and FastSA.
PUBLISHED: dict[str, dict[float, float | None]] = {
    "layered_n100": {0.9: 0.0, 0.8: 0.3, 0.7: 2.2},
    "layered_n250": {0.9: 0.0, 0.8: 0.0, 0.7: 2.6},
    "layered_n500": {0.9: 0.0, 0.8: 2.3, 0.7: None},
    "layered_n1000": {0.9: 0.4, 0.8: 2.5, 0.7: 7.4},
    "fcn_8": {0.9: 0.0, 0.8: 0.1, 0.7: 3.0},
    "ResNet50": {0.9: 0.1, 0.8: 0.3, 0.7: 0.8},
}
#: Nodes and width of the drawn graphs.
DRAWN = {100: 0.27, 250: 0.43, 500: 0.36, 1000: 0.39}
LEAST, MOST = 0.001, 0.5  # budgets of the knee, as shares of all bytes


def measure_peak_plans(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name)
    sweep_s, _, swept = timed(lambda: remat.frontier(joint, by="saved", cost=COST))
    full = remat.plan(joint, 1, cost=COST)  # the process knows the operators afterwards
    least = min(point.peak_bytes for point in swept.points)
    once = sum(prepare(joint).get(Costs(registry().cost_model(COST))))
    yield Case(workload=name, side="graph").row(
        nodes=len(joint.graph.nodes),
        budget_1_peak_bytes=full.peak_bytes,
        least_swept_bytes=least,
        sweep_s=round(sweep_s, 2),
    )
    for case in cases:
        peak = int(least + case.budget * (full.peak_bytes - least))
        within = [p.recompute_cost for p in swept.points if p.peak_bytes <= peak]
        seconds, _, plan = timed(lambda peak=peak: remat.plan(joint, remat.Peak(peak), cost=COST))
        assert plan.peak_bytes <= peak
        yield case.row(
            peak_bytes=peak,
            swept_cost=min(within),
            cost=plan.recompute_cost,
            bound=plan.recompute_bound,
            ratio=round(ratio_of(plan.recompute_cost, min(within)), 4),
            recomputed=round(plan.recompute_cost / once, 5),
            gap=round(plan.gap / once, 5),
            seconds=round(seconds, 2),
        )


def summarise_peak_plans(rows: list[Row]) -> Row:
    """Geometric means by kind, ratios below 0.1 counted as 0.1; the median gap and the worst ratio."""
    plans = [row for row in rows if row["side"] == "remat"]
    kinds = {
        kind: [row["ratio"] for row in plans if row["workload"] in names]
        for kind, names in KINDS.items()
    }
    return {
        "geometric_means": {
            kind: round(geometric_mean(ratios, 0.1), 4) for kind, ratios in kinds.items() if ratios
        },
        "median_gap": statistics.median(row["gap"] for row in plans),
        "largest_ratio": max(row["ratio"] for row in plans),
    }


def measure_large_steps(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name)
    for case in cases:
        if case.side == "frontier":
            seconds, _, frontier = timed(lambda: remat.frontier(joint, by="peak", cost=COST))
            found = {"points": len(frontier.points)}
        else:
            budget = remat.Peak(case.budget)
            seconds, _, plan = timed(lambda budget=budget: remat.plan(joint, budget, cost=COST))
            names = ("peak_bytes", "recompute_cost", "recompute_bound")
            found = {name: getattr(plan, name) for name in names}
        yield case.row(nodes=len(joint.graph.nodes), seconds=round(seconds, 1), **found)


def schedule_problems() -> dict[str, Callable[[], Any]]:
    """What makes each graph: a file of the folder of published graphs, or a draw."""
    if folder := os.environ.get("REMAT_SCHEDULES"):
        paths = sorted(Path(folder).glob("*.json"))
        return {path.stem: lambda path=path: remat.load_instance(path).problem for path in paths}
    return {
        f"drawn n{nodes}": functools.partial(layered, nodes, width=width, seed=nodes)
        for nodes, width in DRAWN.items()
    }


def measure_schedules(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    problem = schedule_problems()[name]()
    given = evaluate_schedule(problem, range(len(problem)))
    published = next((v for k, v in PUBLISHED.items() if k in name), {})
    for case in cases:
        found: Row = {
            "nodes": len(problem),
            "given_peak_bytes": given.peak_bytes,
            "published": published.get(case.budget),
            "increase": None,
            "bound": 0.0,
        }
        within = problem.within(math.ceil(case.budget * given.peak_bytes))
        solver = registry().solver(case.side)
        try:
            seconds, processor_s, schedule = timed(functools.partial(run, solver, within))
        except BudgetError as error:
            found |= {"why": str(error), "least_bytes": least_peak(problem)[0]}
        else:
            found |= {
                "increase": 100 * (schedule.cost / given.cost - 1),
                "bound": 100 * (schedule.bound / given.cost - 1),
                "peak_bytes": schedule.peak_bytes,
                "runs": len(schedule.sequence),
                "seconds": seconds,
                "processor_s": processor_s,
            }
        yield case.row(**found)


def measure_frontier(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    from torch._functorch._activation_checkpointing import graph_info_provider, knapsack_evaluator
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

    made = remat.load_instance(INSTANCES / f"knapsack_{name}.json")
    weights, values = made.problem.weights, made.problem.values
    total = sum(weights)
    problem = remat.KnapsackProblem(weights, values, total)

    def median_of_5(run: Callable[[], Any]) -> tuple[float, Any]:
        runs = [timed(run) for _ in range(5)]
        return statistics.median(seconds for seconds, _, _ in runs), runs[-1][2]

    frontier_s, frontier = median_of_5(lambda: knapsack_frontier(problem))
    names = [f"n{i}" for i in range(len(weights))]
    facts = {
        "graph_nodes_in_order": names,
        "graph_edges": [],
        "all_recomputable_banned_nodes": names,
        "recorded_knapsack_input_memories": [w / total for w in weights],
        "recorded_knapsack_input_runtimes": [float(v) for v in values],
    }
    ours = remat.KnapsackEvaluator(remat.GraphInfoProvider(**facts))
    theirs = knapsack_evaluator.KnapsackEvaluator(graph_info_provider.GraphInfoProvider(**facts))
    knee_s, mine = median_of_5(
        lambda: ours.get_knee_point_memory_budget(max_mem_budget=MOST, min_mem_budget=LEAST)
    )
    sweep_s, _, swept = timed(
        lambda: theirs.get_knee_point_memory_budget(dp_knapsack, MOST, LEAST, 100)
    )
    low, high = (frontier.best_within(int(end * total)) for end in (LEAST, MOST))

    def score(budget: float) -> float:
        i = frontier.best_within(int(budget * total * (1 + 1e-9)))
        axes = (frontier.weights, low), (frontier.values, high)
        return math.hypot(*((of[i] - of[end]) / (of[high] - of[low]) for of, end in axes))

    for case in cases:
        yield case.row(
            items=len(weights),
            points=len(frontier),
            tolerance=frontier.tolerance,
            frontier_seconds=frontier_s,
            knee_seconds=knee_s,
            pytorch_knee_seconds=sweep_s,
            ratio=sweep_s / knee_s,
            score=score(mine),
            pytorch_score=score(swept),
        )


def measure_offloading(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name, "eager")
    for case in cases:
        budget = remat.Peak(case.budget)
        plan = functools.partial(remat.plan, joint, budget, cost=COST)
        _, without_s, without = timed(plan)
        _, with_s, offloading = timed(functools.partial(plan, offload=case.side))
        added = offloading.recompute_cost + offloading.exposed_time
        assert added <= without.recompute_cost
        yield case.row(
            nodes=len(joint.graph.nodes),
            peak_bytes=offloading.peak_bytes,
            step=offloading.step_cost,
            without=without.recompute_cost,
            bound=offloading.recompute_bound,
            ratio=round(ratio_of(added, without.recompute_cost), 4),
            exposed_time=offloading.exposed_time,
            offloaded_bytes=offloading.host_bytes,
            without_s=round(without_s, 1),
            with_s=round(with_s, 1),
            **{"with": added},
        )


def summarise_offloading(rows: list[Row]) -> Row:
    ratios = [max(row["ratio"], 1e-3) for row in rows if row["without"]]
    return {
        "geometric_mean_of_added_time": round(geometric_mean(ratios), 4) if ratios else None,
        "largest_ratio": max(ratios, default=None),
    }


def measure_pages(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name, "eager")
    plan, frontier = remat.plan(joint, 0.5), remat.frontier(joint)
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            written_s = timed(lambda path=path: frontier.explore(path, plan))[0]
            drawn = drawn_ms(path)
            yield case.row(
                nodes=len(joint.graph.nodes),
                points=len(frontier.points),
                bytes=path.stat().st_size,
                written_s=round(written_s, 1),
                drawn_ms=[round(ms) for ms in drawn],
                median_drawn_ms=round(statistics.median(drawn)),
            )


def drawn_ms(path: Path, times: int = 3) -> list[float]:
    """Milliseconds from the start of loading to the first frame with everything in it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    browser, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver_path is None:
        raise RuntimeError("chromium and chromedriver draw pages, and are not both installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    found = []
    with webdriver.Chrome(options=options, service=Service(driver_path)) as driver:
        for _ in range(times):
            driver.get("about:blank")
            driver.get(path.as_uri())
            wait = WebDriverWait(driver, 60)
            drawn = wait.until(lambda d: d.execute_script("return window.rematDrawnMs"))
            found.append(float(drawn))
    return found


KNAPSACKS = sorted(path.stem.removeprefix("knapsack_") for path in INSTANCES.glob("knapsack_*"))
SHARES = (0.9, 0.8, 0.7)

EXPERIMENTS = {
    "peak-plans": Experiment(
        about="plans within a peak, beside a sweep over budgets in bytes",
        cases=grid(REAL_AND_SMALL, (0.75, 0.5, 0.25, 0.1)),
        quick=grid(("llama-small", "resnet-small"), (0.5, 0.1)),
        measure=measure_peak_plans,
        summarise=summarise_peak_plans,
        missed=lambda summary: above(summary, {"largest_ratio": 1.001}),
    ),
    "large-steps": Experiment(
        about="seconds to plan steps of many thousand nodes by their peak",
        cases=(
            Case(workload="gpt2-80-layers", side="frontier"),
            Case(workload="gpt2-190-layers", budget=0.5, side="plan"),
        ),
        quick=(Case(workload="gpt2-4-layers", budget=0.5, side="plan"),),
        measure=measure_large_steps,
    ),
    "schedules": Experiment(
        about="schedules of published graphs within a peak, beside the published figures",
        cases=grid(schedule_problems(), SHARES, ("auto",)),
        quick=grid(list(schedule_problems())[:1], SHARES[1:2], ("auto",)),
        measure=measure_schedules,
    ),
    "frontier": Experiment(
        about="the knee of the frontier at once, beside PyTorch's sweep",
        cases=grid(KNAPSACKS, sides=("knee",)),
        quick=grid(KNAPSACKS[:2], sides=("knee",)),
        measure=measure_frontier,
    ),
    "offloading": Experiment(
        about="time that plans within a peak add to the step, with and without offloading",
        cases=grid(ARCHITECTURES, (0.5, 0.25, 0.1), ("25GB/s",)),
        quick=grid(("resnet-50",), (0.25,), ("25GB/s",)),
        measure=measure_offloading,
        summarise=summarise_offloading,
    ),
    "explorer": Experiment(
        about="pages of large steps: size, seconds to write, milliseconds to draw in Chromium",
        cases=grid(("llama-7b", "bert-large", "resnet-50"), sides=("page",)),
        quick=grid(("llama-small",), sides=("page",)),
        measure=measure_pages,
        tables=("pages",),
    ),
}
