"""The memory of a step as a picture: without checkpointing and under a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from remat.report.pictures import write_picture
from remat.sac.estimate.modules import ModuleTree
from remat.sac.solve.choices import ModuleChoice
from remat.sac.solve.peaks import Simulated, simulate
from remat.sac.solve.plan import SACPlan
from remat.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLAIN, _PLANNED, _BUDGET = "#9aa3ad", "#2f5d9e", "#b3372f"


def simulate_plan(tree: ModuleTree, plan: SACPlan) -> Simulated:
    """Follows a step under a plan.

    Raises:
        ProblemError: the plan names a module that is not in the tree.
    """
    places = {m.name: k for k, m in enumerate(tree.modules)}
    decision = {
        places[tree[m.name].name]: ModuleChoice(
            stored=m.stored, kept_bytes=m.stored_bytes, recompute_ps=0
        )
        for m in plan.modules
    }
    return simulate(tree, decision, tree.memory(plan.world_size))


def draw_plan(tree: ModuleTree, plan: SACPlan, path: str | Path, *, title: str) -> None:
    """Draws a step without and with a plan to a file, whole or not at all.

    Raises:
        ProblemError: the path ends with neither ``.svg`` nor ``.png``.
        PlanError: Matplotlib is not installed, or the file cannot be written.
    """
    write_picture(path, lambda: plan_figure(tree, plan, title=title))


def plan_figure(tree: ModuleTree, plan: SACPlan, *, title: str) -> Figure:
    """The picture of `draw_plan` as a figure of its own; nothing global is touched."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    simulated = simulate_plan(tree, plan)
    figure = Figure(figsize=(9.0, 5.0))
    axes = figure.add_axes((0.1, 0.12, 0.87, 0.75))
    moments = range(len(simulated.memory))
    axes.fill_between(
        moments, tree.memory(plan.world_size), color=_PLAIN, alpha=0.4, label="no checkpointing"
    )
    axes.plot(moments, simulated.memory, color=_PLANNED, linewidth=1.2, label="under the plan")
    again = sorted(
        (tree.modules[k].calls[i].back, peak) for (k, i), peak in simulated.reruns.items()
    )
    if again:
        x, y = zip(*again, strict=True)
        axes.plot(x, y, ".", color=_PLANNED, markersize=5, label="while a module runs again")
    axes.axhline(plan.budget_bytes, color=_BUDGET, linewidth=1, linestyle="--", label="budget")
    axes.axvline(tree.forward_end, color="black", linewidth=0.6)
    axes.annotate(
        " backward", (tree.forward_end, 1), xycoords=("data", "axes fraction"), va="top", fontsize=9
    )
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, len(simulated.memory))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: format_bytes(n)))
    axes.set_xlabel("operators")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.text(0.1, 0.93, title, fontsize=11, fontweight="bold")
    return figure
