"""Plot of a step's memory without checkpointing and under a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.report.pictures import GREY, INK, Scale, draw_budget, figure_of, show_bytes
from remat.sac.estimation.modules import ModuleTree
from remat.sac.solve.choices import ModuleChoice
from remat.sac.solve.peaks import Simulated, simulate
from remat.sac.solve.plan import SACPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLANNED = "#2f5d9e"


def simulate_plan(tree: ModuleTree, plan: SACPlan) -> Simulated:
    """Simulate the memory of a step under a plan; see `simulate`.

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


def plan_figure(tree: ModuleTree, plan: SACPlan, *, title: str) -> Figure:
    """Return a plot of a step's memory without checkpointing and under a plan.

    Raises:
        ProblemError: the plan names a module that is not in the tree.
    """
    simulated = simulate_plan(tree, plan)
    figure, axes = figure_of((9.0, 5.0), (0.1, 0.12, 0.87, 0.75), title)
    plain = tree.memory(plan.world_size)
    again = sorted(
        (tree.modules[k].calls[i].back, peak) for (k, i), peak in simulated.reruns.items()
    )
    drawn = [plain.max(initial=0), simulated.memory.max(initial=0), *(peak for _, peak in again)]
    # A budget far above the curves would squeeze them, so it is not drawn.
    highest = int(max(*drawn, plan.budget_bytes if plan.budget_bytes < 2 * max(drawn) else 0))
    scale = Scale.of(highest, "B")
    moments = range(len(simulated.memory))
    axes.fill_between(moments, plain / scale.size, color=GREY, alpha=0.4, label="no checkpointing")
    axes.plot(
        moments,
        simulated.memory / scale.size,
        color=_PLANNED,
        linewidth=1.2,
        label="under the plan",
    )
    if again:
        x, y = zip(*again, strict=True)
        axes.plot(
            x,
            [peak / scale.size for peak in y],
            ".",
            color=_PLANNED,
            markersize=5,
            label="while a module runs again",
        )
    if plan.budget_bytes <= highest:
        draw_budget(axes, plan.budget_bytes, scale)
    axes.axvline(tree.forward_end, color=INK, linewidth=0.8)
    axes.annotate(
        " backward", (tree.forward_end, 1), xycoords=("data", "axes fraction"), va="top", fontsize=9
    )
    show_bytes(axes, 1.05 * highest, scale)
    axes.set_xlim(0, len(simulated.memory))
    axes.set_xlabel("operators run")
    axes.legend(frameon=False, loc="upper right")
    return figure
