"""Time that modules take when they run again, measured in the backward of real steps.

An operator timed by itself finds its arguments in the cache, and memory for its result that was
just freed. When a module runs again in backward, neither may be the case. Between its operators,
memory is freed and Python code runs: the module's own, and PyTorch's bookkeeping of stored results.
Together this can take as long as the operators themselves.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint

from remat import torch_compat
from remat.errors import PolicyError
from remat.running.measure import run_backward, run_forward
from remat.sac.policies.compose import PolicyLike
from remat.sac.policies.region import context_fn
from remat.sac.run.fakes import left_as_found
from remat.sac.run.lifetimes import given_tensors, loss_only
from remat.sac.run.module_calls import in_backward, set_forward
from remat.sac.run.operators import is_skipped

#: Timed steps, after a warm-up step.
STEPS = 7
#: Operators in the chain that measures the overhead of a context, and runs of the chain.
_CHAIN, _RUNS = 100, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Measured times of one module that ran again in backward.

    Attributes:
        ops: (name, milliseconds) of each operator in order, without skipped operators. The
            milliseconds are the time saved if the operator's result is stored. They include the
            time in which memory is freed before the operator.
        overhead_ms: milliseconds that the rerun takes if the results of all operators are stored.
    """

    ops: tuple[tuple[str, float], ...]
    overhead_ms: float

    def runtimes(self, names: Sequence[str], otherwise: Sequence[float]) -> list[float]:
        """Return the milliseconds of operators, which are matched to `ops` by name and order.

        Args:
            names: names of a module's operators, in order.
            otherwise: milliseconds of the operators in ``names``, used for those that `ops` lacks.
        """
        found = list(otherwise)
        ran = [name for name, _ in self.ops]
        for block in SequenceMatcher(None, names, ran, autojunk=False).get_matching_blocks():
            for k in range(block.size):
                found[block.a + k] = self.ops[block.b + k][1]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reruns:
    """Measured times of steps in which modules ran again.

    Attributes:
        forward_ms: milliseconds of forward's operators.
        modules: dict from module name to the module's times. Modules whose operators differ between
            steps are left out.
    """

    forward_ms: float
    modules: dict[str, Rerun]


def time_reruns(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> Reruns | None:
    """Time steps on the CPU in which modules run again.

    Times are medians of `STEPS` steps in which the modules store nothing, and of `STEPS` steps in
    which they store every result. Buffers, gradients and random states are restored afterwards.

    Args:
        model: the model.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        names: names of the modules to checkpoint, as in ``model.named_modules()``. None of these
            modules may contain another one.

    Returns:
        The times; None if one of the modules fails when it runs again.
    """
    named = dict(kwargs or {})
    given = given_tensors(model, args, named)
    watch = _Watch()
    try:
        for stored in (False, True):
            with _checkpointed(model, names, watch, _everything if stored else []):
                for k in range(STEPS + 1):
                    with left_as_found(given), watch.step(stored, counts=k > 0):
                        run_backward(run_forward(loss_only(model), args, named))
    except (CheckpointError, PolicyError):
        return None
    return watch.found()


@contextlib.contextmanager
def _checkpointed(
    model: nn.Module, names: Sequence[str], watch: _Watch, policy: PolicyLike
) -> Iterator[None]:
    """Checkpoint modules within the ``with`` block, and pass their calls to ``watch.call``.

    Args:
        model: the model.
        names: names of the modules, as in ``model.named_modules()``.
        watch: object that times the modules when they run again.
        policy: checkpointing policy of each module.
    """
    with contextlib.ExitStack() as undo:
        for name in names:
            module = model.get_submodule(name)
            again = functools.partial(watch.call, name, module.forward)
            contexts = context_fn(policy, module=name)
            run = functools.partial(checkpoint, again, use_reentrant=False, context_fn=contexts)
            undo.callback(set_forward(module, run))
        yield


def _everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return PREFER_SAVE for every operator; the function is a policy."""
    return CheckpointPolicy.PREFER_SAVE


class _Watch:
    """Collect the times of forward's operators and of modules that run again in backward."""

    def __init__(self) -> None:
        self._timing_ms = timing_ms()
        self._stored = self._counts = False
        self._timer = _Timer()
        self._forward: list[float] = []
        self._again: dict[str, list[Sequence[tuple[str, float, float]]]] = {}
        self._overheads: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def step(self, stored: bool, counts: bool) -> Iterator[None]:
        """Time one step in the ``with`` block.

        Args:
            stored: whether the modules store every result; otherwise they store none.
            counts: whether the step's times are collected; False for a warm-up step.
        """
        self._stored, self._counts = stored, counts
        self._timer = _Timer()
        # Not with stored results: the timer's own time would count as overhead.
        with contextlib.nullcontext() if stored else self._timer:
            yield
        if counts and not stored:
            self._forward.append(self._timer.forward_ms)

    def call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module's forward, and return its result; if backward is running, also time it."""
        if not in_backward():
            return forward(*args, **kwargs)
        self._timer.again = []
        start = time.perf_counter()
        try:
            return forward(*args, **kwargs)
        finally:  # PyTorch ends a rerun by an exception once all saved tensors are there again
            if self._counts and self._stored:
                spent = 1e3 * (time.perf_counter() - start)
                self._overheads.setdefault(name, []).append(spent)
            elif self._counts:  # an entry for the start, so that the first operator has a gap, too
                self._again.setdefault(name, []).append([("", start, start), *self._timer.again])

    def found(self) -> Reruns:
        """Return the medians of all collected times."""
        return Reruns(
            forward_ms=statistics.median(self._forward),
            modules={
                name: self._typical(runs, statistics.median(self._overheads[name]))
                for name, runs in self._again.items()
                if len({tuple(op for op, _, _ in run) for run in runs}) == 1
                and name in self._overheads
            },
        )

    def _typical(
        self, runs: Sequence[Sequence[tuple[str, float, float]]], overhead_ms: float
    ) -> Rerun:
        """Return the median times of a module over several reruns of the same operators.

        Args:
            runs: for each rerun, (name, begin, end) of each operator in seconds. The first entry is
                no operator: it marks the start of the rerun.
            overhead_ms: milliseconds of a rerun if every result is stored.
        """
        steps = range(1, len(runs[0]))
        alone = [statistics.median(1e3 * (run[k][2] - run[k][1]) for run in runs) for k in steps]
        gaps = [statistics.median(1e3 * (run[k][1] - run[k - 1][2]) for run in runs) for k in steps]
        gaps = [max(0.0, gap - self._timing_ms) for gap in gaps]
        # Part of the time between operators is overhead, which remains if every result is stored. The rest
        # is mostly the freeing of memory, and is attributed to the operators.
        share = max(0.0, 1.0 - overhead_ms / sum(gaps)) if any(gaps) else 0.0
        names = (name for name, _, _ in runs[0][1:])
        taken = (ms + share * gap for ms, gap in zip(alone, gaps, strict=True))
        return Rerun(ops=tuple(zip(names, taken, strict=True)), overhead_ms=overhead_ms)


class _Timer(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that times every operator that runs.

    The mode is entered before PyTorch's checkpointing modes. These modes answer operators with
    stored results themselves, so that such operators do not reach the timer.

    Attributes:
        forward_ms: milliseconds of all operators of forward.
        again: (name, begin, end) of each operator of the module that currently runs again; begin
            and end are in seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward_ms = 0.0
        self.again: list[tuple[str, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter()
        out = func(*args, **kwargs)
        end = time.perf_counter()
        if not in_backward():
            self.forward_ms += 1e3 * (end - start)
        elif not is_skipped(func):
            self.again.append((str(func), start, end))
        return out


@functools.cache
def timing_ms() -> float:
    """Return the milliseconds that `_Timer` adds to an operator, measured on this CPU."""
    return _slower_ms(_Timer)


@functools.cache
def policy_ms() -> float:
    """Return the milliseconds that a policy adds to an operator in forward, measured on this CPU."""
    return _slower_ms(lambda: context_fn([])()[0])


def _slower_ms(make: Callable[[], contextlib.AbstractContextManager[Any]]) -> float:
    """Return the milliseconds that a context manager adds to a short operator in its block.

    Args:
        make: function that returns a new context manager.
    """
    x = torch.ones(1)
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_RUNS):
        for inside in took:
            with make() if inside else contextlib.nullcontext():
                start = time.perf_counter()
                for _ in range(_CHAIN):
                    x.sin()
                took[inside].append(time.perf_counter() - start)
    # Minima, because interruptions only add time. Noise may make the difference negative.
    return max(0.0, 1e3 * (min(took[True]) - min(took[False])) / _CHAIN)
