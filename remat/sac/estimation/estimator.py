"""Estimator of selective checkpointing from one forward pass, with the interface of PyTorch's ``SACEstimator``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import quote

import torch

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.costs import CostModel
from remat.report.pictures import write_picture
from remat.sac.estimation.collecting import collect, model_of, runtimes
from remat.sac.estimation.display import greedy_order_lines, operator_lines, tradeoff_figure
from remat.sac.estimation.stats import (
    SACGreedyOrderMeta,
    SACStats,
    SACTradeOffStats,
    difference,
)
from remat.sac.estimation.tradeoff import greedy_order, upper_envelope
from remat.sac.run.recording import StepRecorder, without_replays


class SACEstimator:
    """Estimates, for each module of a model, the memory that checkpointing the module frees, and the recompute time.

    Use the estimator under ``FakeTensorMode``. With fake tensors, no memory is allocated, and operators run only if
    their runtimes are measured. The estimator records all modules that have children::

        with FakeTensorMode():
            model, x = Model(), torch.randn(8, 512)
            with SACEstimator()("operator-level-cost-model") as estimator:
                model(x)
        estimator.display_modulewise_sac_stats(depth=4, print_tabular=True)

    The interface is that of ``torch.distributed._tools.sac_estimator``, with these differences:

    * The memory of an operator is the bytes of the storages that it allocates. An in-place operator
      therefore has 0 bytes.
    * Results that the module returns cost nothing to store, because they stay alive anyway. Returned
      results are identified by the storages of the module's outputs.
    * Batch normalisation in training counts as an in-place write to its running statistics.
    * If an operator overwrites a tensor that an earlier operator reads, both results are stored, or both
      operators are recomputed.
    * The result of an operator counts as saved by autograd even if another module saves the result.

    Attributes:
        sac_mod_stats: dict from module name to the statistics of the module's first call in the latest
            run. The outermost module is named by its class, every other by its path: ``Model.layers.0``.
        sac_mod_greedy_order_meta: dict from module name to the module's greedy order: operators by
            freed bytes per recompute time, largest first.
        sac_mod_tradeoff_stats: dict from module name to the module's curve of recompute time over freed memory, and
            straight lines fitted above the curve. Empty until `pwlf_sac_tradeoff_curve` is called.
        sac_mod_unsteady: dict from module name to error message, for modules of which two calls ran different
            operators. Such modules are missing in the three dicts above, and no plan checkpoints them.
        mode: name of the mode in which runtimes are estimated.
        cost: the cost model in use.
    """

    def __init__(self) -> None:
        self._forget()
        self.mode = "operator-level-cost-model"
        self.cost: CostModel = model_of(self.mode)
        self._needs_fake = True
        self._contexts = contextlib.ExitStack()

    def __call__(
        self, estimate_mode_type: str, cost: CostModel | None = None, *, fake: bool = True
    ) -> Self:
        """Set the mode in which runtimes are estimated, and return the estimator.

        Args:
            estimate_mode_type: ``"operator-level-benchmark"`` runs and times every distinct call of an
                operator, on new tensors (see `remat.graph.costs.Profile`). ``"operator-level-cost-model"``
                computes runtimes by a roofline model of an H100, on any machine.
            cost: cost model to use instead of the mode's own, such as ``Roofline.parse("a100")``.
            fake: False to record a run on real tensors, on which some models run other operators than on fake ones.
                For example, ``transformers`` inspects the values of a mask only on real tensors.

        Raises:
            ProblemError: the mode is unknown, or ``cost`` does not count picoseconds.
        """
        self.mode, self.cost = estimate_mode_type, model_of(estimate_mode_type, cost)
        self._needs_fake = fake
        return self

    def __enter__(self) -> Self:
        """Start recording operators until the ``with`` block ends; return the estimator. Errors are as in `record`."""
        self._contexts.enter_context(self.record().forward())
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.close()

    def pwlf_sac_tradeoff_curve(
        self, n_segments: int = 2, save_tradeoff_graphs: bool = False
    ) -> None:
        """Fit up to ``n_segments`` straight lines above each module's greedy curve of recompute time over freed memory.

        Args:
            n_segments: largest number of lines for each module.
            save_tradeoff_graphs: whether to plot the trade-off of each module to the file
                ``tradeoff_graphs/NAME.png``, with the module's name percent-encoded.

        Raises:
            ProblemError: ``n_segments`` is below 1.
            PlanError: plots are requested, and Matplotlib is missing or a plot cannot be written.
        """
        for name, stats in self.sac_mod_stats.items():
            order = self.sac_mod_greedy_order_meta[name]
            self.sac_mod_tradeoff_stats[name] = upper_envelope(stats, order, n_segments)
        if save_tradeoff_graphs:
            folder = Path("tradeoff_graphs")
            folder.mkdir(exist_ok=True)
            for name, fitted in self.sac_mod_tradeoff_stats.items():
                draw = partial(tradeoff_figure, fitted, name)
                # A module may be named "a/b", which must not become a folder.
                write_picture(folder / f"{quote(name, safe='')}.png", draw)

    def display_modulewise_sac_stats(self, depth: int = 2, print_tabular: bool = False) -> None:
        """For each module, print a table of operators, and a table of the greedy order in which to recompute them.

        Args:
            depth: depth of the deepest modules to print; the outermost module has depth 1.
            print_tabular: an argument of PyTorch's method, without effect: columns are always aligned.
        """
        for name, stats in self.sac_mod_stats.items():
            if name.count(".") < depth:
                print(f"Module: {name}")
                self.display_sac_stats(stats, print_tabular)
                print(f"AC Trade-off for Module: {name} MSPS = Memory/Runtime")
                order = self.sac_mod_greedy_order_meta[name]
                self.display_sac_tradeoff_stats(order, stats, print_tabular)

    def display_sac_stats(self, sac_stats: SACStats, print_tabular: bool = False) -> None:
        """Print a table of a module's operators; ``print_tabular`` has no effect."""
        print(
            f"Total Memory: {sum(sac_stats.memory)} B Total Runtime: {sum(sac_stats.runtimes):.6g} ms "
            f"Store Random: {sac_stats.force_store_random}"
        )
        print(*operator_lines(sac_stats), sep="\n")

    def display_sac_tradeoff_stats(
        self,
        greedy_order_meta: SACGreedyOrderMeta,
        sac_stats: SACStats,
        print_tabular: bool = False,
    ) -> None:
        """Print a module's operators in greedy order; ``print_tabular`` has no effect."""
        print(*greedy_order_lines(greedy_order_meta, sac_stats), sep="\n")

    def record(self, existing: Iterable[torch.Tensor] = ()) -> StepRecorder:
        """Return a recorder that replaces the statistics of this estimator by those of the calls in one run.

        Args:
            existing: tensors that exist before the run.

        Raises:
            ProblemError: a ``FakeTensorMode`` is active exactly if ``fake=False`` was given.
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
        self._forget()
        return StepRecorder(existing, self._conclude)

    def _forget(self) -> None:
        """Begin with empty statistics."""
        self.sac_mod_stats: dict[str, SACStats] = {}
        self.sac_mod_greedy_order_meta: dict[str, SACGreedyOrderMeta] = {}
        self.sac_mod_tradeoff_stats: dict[str, SACTradeOffStats] = {}
        self.sac_mod_unsteady: dict[str, str] = {}

    def _conclude(self, recorder: StepRecorder, position: int) -> None:
        """Add the statistics of the outermost module call at ``position`` in ``recorder.spans``, and of inner calls."""
        spans = [span for span in recorder.spans[position:] if not span.failed]
        first = spans[0].first
        calls = recorder.calls[first:]
        # Only fake tensors replay views; see `without_replays`.
        if self._needs_fake:
            returned = (x for span in recorder.spans[position:] for x in span.returned)
            calls = recorder.calls[first:] = without_replays(calls, returned)
        ms = runtimes(calls, self.cost)
        for span in spans:
            if not span.is_leaf:
                ran = calls[span.first - first : span.last - first]
                self._take(span.name, collect(ran, ms, span, recorder.saved))

    def _take(self, name: str, stats: SACStats) -> None:
        """Add the statistics of one module call, or drop the module if its calls in a run differ in operators."""
        if name in self.sac_mod_unsteady:
            return
        first_call = self.sac_mod_stats.get(name)
        if first_call is None:
            self.sac_mod_stats[name] = stats
            self.sac_mod_greedy_order_meta[name] = greedy_order(stats)
        elif changed := difference(first_call, stats):
            del self.sac_mod_stats[name], self.sac_mod_greedy_order_meta[name]
            self.sac_mod_unsteady[name] = (
                f"module '{name}' is called more than once and {changed} its first call ran; "
                "checkpoint what calls it, or what it calls"
            )
