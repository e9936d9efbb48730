"""What is known about the modules of a model: curves, tables, pictures, JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from remat.errors import ProblemError
from remat.graph.costs import CostModel
from remat.sac.estimate import display as tables
from remat.sac.estimate.checks import difference
from remat.sac.estimate.greedy import greedy_order
from remat.sac.estimate.runtimes import model_of
from remat.sac.estimate.stats import SACGreedyOrderMeta, SACStats, SACTradeOffStats
from remat.sac.estimate.tradeoff import upper_envelope

#: Version of the JSON form.
JSON_VERSION = 1


class Estimate:
    """The statistics of modules, and what follows from them.

    Attributes:
        sac_mod_stats: module name to its statistics, of its first call. The outermost module is
            called by its class, others by their place in it: ``Model.layers.0``.
        sac_mod_greedy_order_meta: module name to the greedy order.
        sac_mod_tradeoff_stats: module name to the trade-off; filled by `pwlf_sac_tradeoff_curve`.
        sac_mod_calls: module name to how often it was called.
        sac_mod_unsteady: module name to why there is no plan for it: its calls run different
            operators. Such modules are in none of the above.
        mode: how runtimes are found.
        cost: the cost model in use.
    """

    def __init__(self) -> None:
        self.sac_mod_stats: dict[str, SACStats] = {}
        self.sac_mod_greedy_order_meta: dict[str, SACGreedyOrderMeta] = {}
        self.sac_mod_tradeoff_stats: dict[str, SACTradeOffStats] = {}
        self.sac_mod_calls: dict[str, int] = {}
        self.sac_mod_unsteady: dict[str, str] = {}
        self.mode = "operator-level-cost-model"
        self.cost: CostModel = model_of(self.mode)
        self._earlier: dict[str, SACStats] = {}

    def pwlf_sac_tradeoff_curve(
        self, n_segments: int = 2, save_tradeoff_graphs: bool = False
    ) -> None:
        """Fits at most so many straight lines above the greedy curve of each module.

        Args:
            n_segments: the most lines.
            save_tradeoff_graphs: draw each module to ``tradeoff_graphs/NAME.png``.

        Raises:
            ProblemError: ``n_segments`` is below 1.
            PlanError: a picture was asked for, and Matplotlib is not installed, or it cannot be
                written.
        """
        for name, stats in self.sac_mod_stats.items():
            order = self.sac_mod_greedy_order_meta[name]
            self.sac_mod_tradeoff_stats[name] = upper_envelope(stats, order, n_segments)
        if save_tradeoff_graphs:
            folder = Path("tradeoff_graphs")
            folder.mkdir(exist_ok=True)
            for name in self.sac_mod_stats:
                self.plot(folder / f"{name}.png", name)

    def plot(self, path: str | Path, module: str) -> None:
        """Draws the greedy curve of a module, the lines above it, and the exact frontier.

        Raises:
            ProblemError: the module is not known, or the path ends in neither .svg nor .png.
            PlanError: Matplotlib is not installed, or the picture cannot be written.
        """
        from remat.sac.estimate.drawing import draw_tradeoff

        stats = self._stats(module)
        fitted = self.sac_mod_tradeoff_stats.get(module)
        if fitted is None:
            fitted = upper_envelope(stats, self.sac_mod_greedy_order_meta[module])
        draw_tradeoff(stats, fitted, path, title=module)

    def display_modulewise_sac_stats(self, depth: int = 2, print_tabular: bool = False) -> None:
        """Prints both tables for each module; the outermost module has depth 1."""
        for name, stats in self.sac_mod_stats.items():
            if name.count(".") < depth:
                print(f"Module: {name}")
                self.display_sac_stats(stats, print_tabular)
                print(f"AC Trade-off for Module: {name} MSPS = Memory/Runtime")
                order = self.sac_mod_greedy_order_meta[name]
                self.display_sac_tradeoff_stats(order, stats, print_tabular)

    def display_sac_stats(self, sac_stats: SACStats, print_tabular: bool = False) -> None:
        """Prints the operators of a module; with ``print_tabular``, with rules between them."""
        print(tables.totals(sac_stats))
        tables.show(tables.operators(sac_stats), ruled=print_tabular)

    def display_sac_tradeoff_stats(
        self,
        greedy_order_meta: SACGreedyOrderMeta,
        sac_stats: SACStats,
        print_tabular: bool = False,
    ) -> None:
        """Prints what has been freed and recomputed after each step of the greedy order."""
        tables.show(tables.steps(greedy_order_meta, sac_stats), ruled=print_tabular)

    def to_json(self) -> str:
        """Everything that was found, as JSON; sets as sorted lists, infinity as null."""
        modules = {
            name: {
                "calls": self.sac_mod_calls[name],
                "stats": asdict(stats),
                "greedy_order": tables.order_data(self.sac_mod_greedy_order_meta[name]),
                "tradeoff": tables.tradeoff_data(self.sac_mod_tradeoff_stats.get(name)),
            }
            for name, stats in self.sac_mod_stats.items()
        }
        data = {
            "remat_sac_estimate": JSON_VERSION,
            "mode": self.mode,
            "cost": str(self.cost),
            "modules": modules,
            "unsteady": self.sac_mod_unsteady,
        }
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def _stats(self, module: str) -> SACStats:
        if module in self.sac_mod_stats:
            return self.sac_mod_stats[module]
        why = self.sac_mod_unsteady.get(module)
        known = ", ".join(list(self.sac_mod_stats)[:8]) or "none"
        raise ProblemError(why or f"module '{module}' was not estimated; some that were: {known}")

    def _begin(self) -> None:
        """From now on, it is another run."""
        self._earlier = dict(self.sac_mod_stats)

    def _take(self, name: str, stats: SACStats) -> None:
        """Adds one call of a module.

        Raises:
            ProblemError: it ran other operators in an earlier run.
        """
        earlier = self._earlier.get(name)
        if earlier is not None:
            changed = difference(earlier, stats)
            if changed is not None:
                raise ProblemError(
                    f"module '{name}' {changed} it was estimated with before; expected the same "
                    "model: use a new SACEstimator for another one"
                )
        self.sac_mod_calls[name] = self.sac_mod_calls.get(name, 0) + 1
        if name in self.sac_mod_unsteady:
            return
        known = self.sac_mod_stats.get(name)
        if known is None or earlier is not None:
            self.sac_mod_stats[name] = stats
            self.sac_mod_greedy_order_meta[name] = greedy_order(stats)
            self._earlier.pop(name, None)
            return
        changed = difference(known, stats)
        if changed is not None:
            del self.sac_mod_stats[name], self.sac_mod_greedy_order_meta[name]
            self.sac_mod_tradeoff_stats.pop(name, None)
            self.sac_mod_unsteady[name] = (
                f"module '{name}' is called more than once and {changed} its first call ran; "
                "checkpoint what calls it, or what it calls"
            )
