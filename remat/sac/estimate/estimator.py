"""One forward pass over fake tensors, and what each module of it could recompute (SPEC C)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch._guards import active_fake_mode

from remat.errors import ProblemError
from remat.graph.costs import CostModel
from remat.sac.estimate.checks import check_fake
from remat.sac.estimate.collecting import collect
from remat.sac.estimate.results import Estimate
from remat.sac.estimate.runtimes import model_of, runtimes
from remat.sac.run.module_calls import ModuleCall, in_backward, watching
from remat.sac.run.recording import Recorder, storages, tensors_in
from remat.sac.run.replays import without_replays


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """One call of a module: its operators, and the storages behind what it returned."""

    name: str
    begin: int
    end: int
    outputs: frozenset[int]
    no_tensor: bool


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
    """

    def __init__(self) -> None:
        super().__init__()
        self._needs_fake = True
        self._recorder = Recorder()
        self._spans: list[_Span] = []
        self._saved: set[int] = set()
        self._returned: list[torch.Tensor] = []
        self._contexts = contextlib.ExitStack()

    def __call__(
        self, estimate_mode_type: str, cost: CostModel | None = None, *, fake: bool = True
    ) -> Self:
        """Says how runtimes are found.

        Args:
            estimate_mode_type: ``"operator-level-benchmark"``: every distinct call really runs, on
                tensors made up for it (see `remat.graph.costs.Profile`);
                ``"operator-level-cost-model"``: a roofline, of an H100 on every machine.
            cost: another model in its stead, such as ``Roofline.parse("a100")``.
            fake: False to record a real run, which keeps all that it computes to the end of the
                block. Some models run other operators on fake tensors: ``transformers`` looks
                whether a mask masks anything only where it can.

        Raises:
            ProblemError: no such mode, or the model does not count picoseconds.
        """
        self.mode, self.cost = estimate_mode_type, model_of(estimate_mode_type, cost)
        self._needs_fake = fake
        return self

    def __enter__(self) -> Self:
        """Starts recording.

        Raises:
            ProblemError: there is no ``FakeTensorMode`` around it, and a real run was not asked for;
                or there is one, and it was.
        """
        if not self._needs_fake and active_fake_mode() is not None:
            raise ProblemError(
                "SACEstimator was asked for a real run (fake=False) within a FakeTensorMode; leave "
                "the mode, or leave out fake=False"
            )
        if self._needs_fake and active_fake_mode() is None:
            raise ProblemError(
                "SACEstimator was entered without a FakeTensorMode around it; write "
                "'with FakeTensorMode(): …' and make the model and its inputs in there too, or record a "
                "real run by estimator(mode, fake=False)"
            )
        self._clear()
        self._begin()
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(watching(self._around))
            contexts.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
            )
            contexts.enter_context(self._recorder)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.close()
        self._clear()

    def _clear(self) -> None:
        self._recorder = Recorder()
        self._spans, self._saved, self._returned = [], set(), []

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        self._saved.update(key for key, _, _ in storages(self._recorder.fake(x)))
        return x

    def _around(self, call: ModuleCall) -> Any:
        """Runs the forward of a module, and remembers which operators were its."""
        if in_backward():
            return call.run()
        recorder = self._recorder
        if not recorder.inside:
            check_fake(call.name, call.module)
            for earlier in (recorder.calls, self._spans, self._returned):
                earlier.clear()
        begin = len(recorder.calls)
        recorder.inside.append(call.name)
        try:
            out = call.run()
        finally:
            recorder.inside.pop()
        returned = tensors_in(out)
        self._returned += returned
        if not call.is_leaf:
            outputs = frozenset(k for t in returned for k, _, _ in storages(t))
            self._spans.append(
                _Span(
                    name=call.name,
                    begin=begin,
                    end=len(recorder.calls),
                    outputs=outputs,
                    no_tensor=not tensors_in((call.args, call.kwargs)),
                )
            )
        if not recorder.inside:
            self._conclude()
        return out

    def _conclude(self) -> None:
        """Turns what was recorded of an outermost module into statistics."""
        calls = self._recorder.calls
        if self._needs_fake:
            calls = without_replays(calls, self._returned)
        taken = runtimes(calls, self.cost)
        for span in sorted(self._spans, key=lambda s: (s.begin, -s.end)):
            stats = collect(
                calls[span.begin : span.end],
                taken,
                outputs=span.outputs,
                saved=self._saved,
                no_tensor=span.no_tensor,
            )
            self._take(span.name, stats)
