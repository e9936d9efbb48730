"""Estimator of selective checkpointing from one forward pass, with the interface of PyTorch's ``SACEstimator``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

import torch
from torch import nn

from remat import torch_compat
from remat.graph.costs import CostModel
from remat.report.pictures import figure_of, write_picture
from remat.sac.estimation.collecting import collect, model_of, runtimes
from remat.sac.estimation.stats import (
    SACGreedyOrderMeta,
    SACStats,
    SACTradeOffStats,
    difference,
    group,
)
from remat.sac.estimation.tradeoff import greedy_order, upper_envelope
from remat.sac.run.recording import StepRecorder, without_replays
from remat.units import columns, format_bytes, some_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Largest number of operator names in a row of a table.
_NAMED = 4
#: Colours in the plot: greedy curve, and lines fitted above this curve.
_GREEDY, _LINES = "#2f5d9e", "#d06a1b"


class SACEstimator:
    """Estimates, for each module of a model, the memory that checkpointing the module frees, and the recompute time.

    Under ``FakeTensorMode``, no memory is allocated, and operators run only if their runtimes are measured. Some models
    run other operators on real tensors than on fake ones. For example, ``transformers`` inspects the values of a mask
    only on real tensors. The estimator records all modules that have children::

        with FakeTensorMode():
            model, x = Model(), torch.randn(8, 512)
            with SACEstimator()("operator-level-cost-model") as estimator:
                model(x)
        estimator.display_modulewise_sac_stats(depth=4, print_tabular=True)

    The interface is that of ``torch.distributed._tools.sac_estimator``, with these differences:

    * The memory of an operator is the bytes of the storages that it allocates. By this definition, the memory of an
      in-place operator is 0 bytes.
    * Results that the module returns cost nothing to store, because they stay alive anyway. Returned
      results are identified by the storages of the module's outputs.
    * Batch normalisation in training counts as an in-place write to its running statistics.
    * If an operator overwrites a tensor that an earlier operator reads, both results are stored, or both
      operators are recomputed.
    * The result of an operator counts as saved by autograd even if another module saves the result.

    Attributes:
        sac_mod_stats: dict from module name to the statistics of the module's first call in the latest
            ``with`` block. The outermost module is named by its class, every other by its path: ``Model.layers.0``.
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
        self._contexts = contextlib.ExitStack()

    def __call__(self, estimate_mode_type: str, cost: CostModel | None = None) -> Self:
        """Set the mode in which runtimes are estimated, and return the estimator.

        Args:
            estimate_mode_type: ``"operator-level-benchmark"`` runs and times every distinct call of an
                operator, on new tensors (see `remat.graph.costs.Profile`). ``"operator-level-cost-model"``
                computes runtimes by a roofline model of an H100, on any machine.
            cost: cost model to use instead of the mode's own, such as ``Roofline.parse("a100")``.

        Raises:
            ProblemError: the mode is unknown, or ``cost`` does not count picoseconds.
        """
        self.mode, self.cost = estimate_mode_type, model_of(estimate_mode_type, cost)
        return self

    def __enter__(self) -> Self:
        """Start recording operators until the ``with`` block ends; return the estimator."""
        self._contexts.enter_context(self.recording())
        return self

    def __exit__(self, *error: object) -> None:
        # The error would otherwise not reach `recording`, which computes no statistics of a run that failed.
        self._contexts.__exit__(*error)  # type: ignore[arg-type]

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
        titles = "Op Idx", "Op Name", "Runtime (ms)", "Memory (B)"
        rows = [(*titles, "View-like", "Random", "Saved", "In-place with")]
        views, random_ops = set(sac_stats.view_like_ops), set(sac_stats.rand_ops)
        saved, first_ops = set(sac_stats.saved_autograd_ops), dict(sac_stats.inplace_ops)
        for i, name in enumerate(sac_stats.func_names):
            figures = f"{sac_stats.runtimes[i]:.6f}", str(sac_stats.memory[i])
            view, random, kept = ("yes" if i in ops else "" for ops in (views, random_ops, saved))
            rows.append((str(i), name, *figures, view, random, kept, str(first_ops.get(i, ""))))
        print(*columns(rows, left=(1, 4, 5, 6, 7)), sep="\n")

    def display_sac_tradeoff_stats(
        self,
        greedy_order_meta: SACGreedyOrderMeta,
        sac_stats: SACStats,
        print_tabular: bool = False,
    ) -> None:
        """Print a module's operators in greedy order, with cumulative freed bytes and recompute time.

        In the table, operators that are always recomputed come first, and operators that are always stored come last.
        ``print_tabular`` has no effect.
        """
        grouping = group(sac_stats)
        members = {item.ops[0]: item.ops for item in (*grouping.free, *grouping.stored)}
        entries: list[tuple[tuple[int, ...], str, str]]
        entries = [((i,), "", "recomputed") for i in sorted(greedy_order_meta.recomputed_ops)]
        entries += [(members[c.op_idx], f"{c.msps:.2e}", "") for c in greedy_order_meta.msps_meta]
        entries += [(members[head], "", "stored") for head in sorted(greedy_order_meta.stored_ops)]
        memory, runtime = sum(sac_stats.memory) or 1, sum(sac_stats.runtimes) or 1
        titles = "Op Idx", "Op Names", "Discarded", "Discarded (B)"
        rows = [(*titles, "Recomputed", "Recomputed (ms)", "MSPS", "Always")]
        # Bytes and time in a row are cumulative, as if all operators up to this row were recomputed.
        freed, spent = 0, 0.0
        for ops, msps, always in entries:
            freed += sum(sac_stats.memory[i] for i in ops)
            spent += sum(sac_stats.runtimes[i] for i in ops)
            names = some_of(list(dict.fromkeys(sac_stats.func_names[i] for i in ops)), _NAMED)
            discarded = f"{freed / memory:.4f}", str(freed)
            recomputed = f"{spent / runtime:.4f}", f"{spent:.6f}"
            rows.append((" ".join(map(str, ops)), names, *discarded, *recomputed, msps, always))
        print(*columns(rows, left=(1, 7)), sep="\n")

    @contextlib.contextmanager
    def recording(
        self, existing: Iterable[torch.Tensor] = (), *models: nn.Module
    ) -> Iterator[StepRecorder]:
        """Record the forward in a ``with`` block, then replace this estimator's statistics by those of the block.

        Args:
            existing: tensors that exist before the run.
            models: models whose modules are named before they are called; see `watching`.
        """
        self._forget()
        is_fake = torch_compat.active_fake_mode() is not None
        recorder = StepRecorder(existing)
        with recorder.forward(*models):
            yield recorder
        # Only fake tensors replay views; see `without_replays`.
        if is_fake:
            returned = (x for span in recorder.spans for x in span.returned)
            recorder.calls = without_replays(recorder.calls, returned)
        ms = runtimes(recorder.calls, self.cost)
        for span in recorder.spans:
            if not span.is_leaf and not span.failed:
                ran = recorder.calls[span.first : span.last]
                self._take(span.name, collect(ran, ms, span, recorder.saved))

    def _forget(self) -> None:
        """Begin with empty statistics."""
        self.sac_mod_stats: dict[str, SACStats] = {}
        self.sac_mod_greedy_order_meta: dict[str, SACGreedyOrderMeta] = {}
        self.sac_mod_tradeoff_stats: dict[str, SACTradeOffStats] = {}
        self.sac_mod_unsteady: dict[str, str] = {}

    def _take(self, name: str, stats: SACStats) -> None:
        """Add the statistics of one module call; drop the module if two of its calls in a run differ in operators."""
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


def tradeoff_figure(fitted: SACTradeOffStats, title: str) -> Figure:
    """Return a plot of a module's trade-off: greedy curve, and lines fitted above the curve."""
    figure, axes = figure_of((8.0, 5.0), (0.1, 0.13, 0.86, 0.74), title)
    # The curve has stairs, because freeing one more byte means recomputing the whole next candidate.
    x, y = zip(*fitted.tradeoff_curve.items(), strict=True)
    axes.step(x, y, where="pre", color=_GREEDY, marker="o", markersize=3, label="greedy")
    lines = zip(pairwise(fitted.fit_breaks), fitted.slopes, fitted.intercepts, strict=True)
    for k, ((a, b), slope, intercept) in enumerate(lines):
        ends = [slope * a + intercept, slope * b + intercept]
        axes.plot([a, b], ends, color=_LINES, label=None if k else "upper envelope")
    axes.set_xlabel(f"memory discarded, share of {format_bytes(fitted.sac_memory)}")
    axes.set_ylabel(f"runtime recomputed, share of {fitted.sac_runtime:.4g} ms")
    axes.legend(frameon=False, loc="upper left")
    return figure
