"""Estimator of one forward pass: statistics, curves, tables and JSON of what each module could recompute."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Self
from urllib.parse import quote

import torch

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.costs import CostModel, Roofline
from remat.sac.estimation.collecting import collect, model_of, runtimes
from remat.sac.estimation.display import (
    draw_tradeoff,
    operators,
    order_data,
    show,
    steps,
    totals,
    tradeoff_data,
)
from remat.sac.estimation.stats import (
    SACGreedyOrderMeta,
    SACStats,
    SACTradeOffStats,
    difference,
)
from remat.sac.estimation.tradeoff import greedy_order, upper_envelope
from remat.sac.run.recording import StepRecorder, without_replays

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
            save_tradeoff_graphs: draw each module to ``tradeoff_graphs/NAME.png``; what no file name may have in it
                is quoted as in addresses: ``a%2Fb.png``.

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
                # A module may be called "a/b", which is no folder.
                self.plot(folder / f"{quote(name, safe='')}.png", name)

    def plot(self, path: str | Path, module: str) -> None:
        """Draws the greedy curve of a module, the lines above it, and the exact frontier.

        Raises:
            ProblemError: the module is not known, or the path ends in neither .svg nor .png.
            PlanError: Matplotlib is not installed, or the picture cannot be written.
        """
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
        print(totals(sac_stats))
        show(operators(sac_stats), ruled=print_tabular)

    def display_sac_tradeoff_stats(
        self,
        greedy_order_meta: SACGreedyOrderMeta,
        sac_stats: SACStats,
        print_tabular: bool = False,
    ) -> None:
        """Prints what has been freed and recomputed after each step of the greedy order."""
        show(steps(greedy_order_meta, sac_stats), ruled=print_tabular)

    def to_json(self) -> str:
        """Everything that was found, as JSON; sets as sorted lists, infinity as null."""
        modules = {
            name: {
                "calls": self.sac_mod_calls[name],
                "stats": asdict(stats),
                "greedy_order": order_data(self.sac_mod_greedy_order_meta[name]),
                "tradeoff": tradeoff_data(self.sac_mod_tradeoff_stats.get(name)),
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
        return json.dumps(data, indent=2, allow_nan=False, default=sorted) + "\n"

    def _stats(self, module: str) -> SACStats:
        if module in self.sac_mod_stats:
            return self.sac_mod_stats[module]
        why = self.sac_mod_unsteady.get(module)
        known = ", ".join(list(self.sac_mod_stats)[:8]) or "none"
        raise ProblemError(why or f"module '{module}' was not estimated; some that were: {known}")

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


class SACEstimator(Estimate):
    """Estimates what selective checkpointing of each module frees, and what time that takes.

    Use it under ``FakeTensorMode``; nothing is allocated and, unless runtimes are measured, nothing
    is run. What belongs to modules with children is recorded, under the name of each::

        with FakeTensorMode():
            model, x = Model(), torch.randn(8, 512)
            with SACEstimator()("operator-level-cost-model") as estimator:
                model(x)
        estimator.display_modulewise_sac_stats(depth=4, print_tabular=True)

    The names are PyTorch's (``torch.distributed._tools.sac_estimator``). What differs: the memory
    of an operator is that of the storages which it allocates, so an in-place operator has none; what
    costs nothing to store is read off the module's real outputs; batch normalisation in training
    works in place on its statistics; an operator that reads memory before another one overwrites it
    is decided with that one; an operator's result counts as kept by autograd if anything in the
    outermost module keeps it.

    The results are the attributes and methods of `Estimate`.

    Args:
        gpu_type: the device of ``"operator-level-cost-model"``, by PyTorch's name for it
            (``"NVIDIA H100"``) or by ours (``"h100"``); an H100 where it is left out.

    Raises:
        ProblemError: no such device is known.
    """

    def __init__(self, gpu_type: str | None = None) -> None:
        super().__init__()
        self._device = None
        if gpu_type is not None:
            self._device = Roofline.parse(
                gpu_type.removeprefix("NVIDIA ").removeprefix("AMD ").lower()
            )
        self._needs_fake = True
        self._contexts = contextlib.ExitStack()

    def __call__(
        self, estimate_mode_type: str, cost: CostModel | None = None, *, fake: bool = True
    ) -> Self:
        """Says how runtimes are found.

        Args:
            estimate_mode_type: ``"operator-level-benchmark"``: every distinct call really runs, on
                tensors made up for it (see `remat.graph.costs.Profile`);
                ``"operator-level-cost-model"``: a roofline, of `gpu_type` on every machine.
            cost: another model in its stead, such as ``Roofline.parse("a100")``.
            fake: False to record a real run. Some models run other operators on fake tensors:
                ``transformers`` looks whether a mask masks anything only where it can.

        Raises:
            ProblemError: no such mode, or the model does not count picoseconds.
        """
        if cost is None and estimate_mode_type == "operator-level-cost-model":
            cost = self._device
        self.mode, self.cost = estimate_mode_type, model_of(estimate_mode_type, cost)
        self._needs_fake = fake
        return self

    def __enter__(self) -> Self:
        """Starts recording; raises as `record` does."""
        self._contexts.enter_context(self.record().forward())
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.close()

    def record(self, given: Iterable[torch.Tensor] = ()) -> StepRecorder:
        """A recorder of another run, whose modules are added to the statistics as they end.

        Args:
            given: tensors that are there before it.

        Raises:
            ProblemError: there is no ``FakeTensorMode``, and a real run was not asked for; or there is
                one, and it was.
        """
        in_fake = torch_compat.active_fake_mode() is not None
        if in_fake and not self._needs_fake:
            raise ProblemError(
                "SACEstimator was asked for a real run (fake=False) within a FakeTensorMode; leave "
                "the mode, or leave out fake=False"
            )
        if self._needs_fake and not in_fake:
            raise ProblemError(
                "SACEstimator was entered without a FakeTensorMode around it; write "
                "'with FakeTensorMode(): …' and make the model and its inputs in there too, or record a "
                "real run by estimator(mode, fake=False)"
            )
        self._earlier = dict(self.sac_mod_stats)
        return StepRecorder(given, self._conclude)

    def _conclude(self, recorder: StepRecorder, position: int) -> None:
        """Turns what was recorded of an outermost module into statistics."""
        spans = [span for span in recorder.spans[position:] if not span.failed]
        first = spans[0].first
        calls = recorder.calls[first:]
        if self._needs_fake:
            returned = (x for span in recorder.spans[position:] for x in span.returned)
            calls = recorder.calls[first:] = without_replays(calls, returned)
        taken = runtimes(calls, self.cost)
        for span in spans:
            if not span.is_leaf:
                ran = calls[span.first - first : span.last - first]
                self._take(span.name, collect(ran, taken, span, recorder.saved))
