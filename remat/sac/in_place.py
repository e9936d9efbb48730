"""What operators take where they stand: timed while real steps run, not one by one.

An operator that is timed by itself finds its arguments in the cache and memory for its result that was
just freed. In a step, and when a module runs again, neither need be so; what is bound by memory then
takes several times as long.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from remat.graph.measure import as_before, run_backward, run_forward
from remat.sac.calls import LifeTable
from remat.sac.lifetimes import Span, loss_only
from remat.sac.recording import tensors_in
from remat.sac.region import context_fn
from remat.sac.skipped import is_skipped
from remat.sac.stats import SACStats

#: Steps that are timed, after one that is not.
STEPS = 7
#: Operators in the region that shows what running again takes by itself, and runs of it.
_CHAIN, _RUNS = 100, 9


def time_steps(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[tuple[str, float]]:
    """Name and milliseconds of each operator of forward, in order, without those that are skipped.

    The median of some steps, each with its backward, on the CPU.

    Returns:
        Nothing at all if the steps did not run the same operators.
    """
    named = dict(kwargs or {})
    given = [*model.parameters(), *model.buffers(), *tensors_in((tuple(args), named))]
    runs: list[_Timer] = []
    for _ in range(STEPS + 1):
        with as_before(given, torch.device("cpu")):
            timer = _Timer()
            run_backward(run_forward(functools.partial(_timed, timer, model), args, named))
        runs.append(timer)
    names = runs[0].names
    if any(run.names != names for run in runs):
        return []
    spent = zip(*(run.seconds for run in runs[1:]), strict=True)
    return [(n, 1e3 * statistics.median(s)) for n, s in zip(names, spent, strict=True)]


def in_place(
    stats: Mapping[str, SACStats],
    run: Mapping[str, Span | None],
    table: LifeTable,
    steps: Sequence[tuple[str, float]],
    spans: Sequence[Span],
) -> dict[str, SACStats]:
    """Statistics with the runtimes that operators took where they stand.

    Modules with the same operators get the same, the median of theirs: so they stay equal.

    Args:
        stats: by module.
        run: by module, the call that the statistics are of; None if it has no backward.
        table: when each operator ran.
        steps: what `time_steps` says.
        spans: all calls.

    Returns:
        The modules that runtimes are known of; none if the steps ran other operators.
    """
    order = [op for span in spans if span.parent < 0 for op in span.ops]
    if not steps or [name for _, name in order] != [name for name, _ in steps]:
        return {}
    taken = {moment: ms for (moment, _), (_, ms) in zip(order, steps, strict=True)}
    alike: dict[Any, dict[str, list[float]]] = defaultdict(dict)
    for name, of in stats.items():
        span = run.get(name)
        moments = None if span is None else table.moments(span, of)
        if moments is not None:
            kind = tuple(of.func_names), tuple(of.memory)
            alike[kind][name] = [taken[t] for t in moments]
    found: dict[str, SACStats] = {}
    for group in alike.values():
        typical = [statistics.median(each) for each in zip(*group.values(), strict=True)]
        found.update((name, replace(stats[name], runtimes=typical)) for name in group)
    return found


def _timed(timer: _Timer, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with timer:
        return loss_only(model)(*args, **kwargs)


class _Timer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the time of every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.seconds: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter()
        out = func(*args, **kwargs)
        spent = time.perf_counter() - start
        if not is_skipped(func):
            self.seconds.append(spent)
            self.names.append(str(func))
        return out


@functools.cache
def overhead_ms() -> float:
    """Milliseconds by which an operator takes longer in a region that runs again, on this CPU.

    Policies and what PyTorch does about them run in Python, and not in the operator's own time. It is
    measured on a chain of operators that have next to nothing to do, half of them stored.
    """
    once, again = [], []
    for _ in range(_RUNS):
        x = torch.ones(1, requires_grad=True)
        spent: list[float] = []
        region = functools.partial(_chain, spent)
        out = checkpoint(region, x, use_reentrant=False, context_fn=context_fn(_every_other))
        out.backward()
        again.append(spent[-1])
        timer = _Timer()
        with timer:
            _chain([], x)
        once.append(sum(timer.seconds))
    # What is stored is not run: half of the plain time is missing in the second.
    return max(0.0, 1e3 * (statistics.median(again) - statistics.median(once) / 2) / _CHAIN)


def _chain(spent: list[float], x: torch.Tensor) -> torch.Tensor:
    start = time.perf_counter()
    try:
        for _ in range(_CHAIN // 2):
            x = (x * 1.001).sin()
        return x
    finally:  # running again ends in an exception
        spent.append(time.perf_counter() - start)


def _every_other(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    stored = op is torch.ops.aten.mul.Tensor
    return CheckpointPolicy.MUST_SAVE if stored else CheckpointPolicy.MUST_RECOMPUTE
