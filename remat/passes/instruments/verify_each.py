"""Verify each pass: structure, the reported change, cached analyses and, on request, numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from remat.errors import PassError, ProblemError, summary
from remat.graph.snapshot import Stamp, alike
from remat.passes.core.control import Composite
from remat.passes.core.pipeline import Instrument, first_fault
from remat.passes.core.state import AnalysisCache
from remat.passes.split.functionalize_rng import drawn_again
from remat.running.differences import first_difference
from remat.running.trial import MAX_BYTES, Trial

if TYPE_CHECKING:
    from remat.passes.core.base import Pass
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.core.state import PassResult, State


_BY_IDENTITY: Any = object.__eq__


class VerifyEach(Instrument):
    """Check after every pass that the graphs are valid and that its reported changes are true.

    A pass that says that it changed nothing must not have; one that changes a graph in place does so
    inside of ``state.edit()``; the analyses that it preserves come out the same when they are
    computed anew. With numbers, the graphs are run on random inputs after every pass that changed
    them: outputs, gradients, inputs as they are left and the generator's state must be those of the
    graph that the pipeline began with, bit for bit. Between the pass that splits a graph and the one
    that makes random operators replay, halves that draw twice are let through; at the end they are
    not. A pass that is there to change numbers (`Pass.keeps_numbers`) sets what the next is held to.

    Args:
        numbers: also run the graphs.
        seed: seed of the random inputs.
        max_bytes: refuse to run a graph whose inputs take more.

    Raises:
        PassError: from a run: the pass that broke a rule, and how.
        ProblemError: from a run: numbers were asked for, but this graph cannot be run here.
    """

    def __init__(self, *, numbers: bool = False, seed: int = 0, max_bytes: int = MAX_BYTES) -> None:
        self._numbers, self._seed, self._max_bytes = numbers, seed, max_bytes
        self._trial: Trial | None = None
        self._reference: Mapping[str, Any] = {}
        self._before: list[_Before] = []
        self._done: list[str] = []
        self._draws_twice: tuple[str, str] | tuple[()] = ()

    @property
    def _checks(self) -> str:
        return "numbers" if self._numbers else "structure"

    def start(self, pipeline: Pipeline, state: State) -> None:
        self._before, self._done, self._trial, self._draws_twice = [], [], None, ()
        if not self._numbers:
            return
        self._trial = Trial.of(state.joint, seed=self._seed, max_bytes=self._max_bytes)
        try:
            self._reference = _run(self._trial, state)
        except ProblemError:
            raise
        except Exception as error:
            raise ProblemError(
                f"graph '{state.joint.name}' does not run on random inputs, so its numbers cannot be "
                f"checked: {_describe(error)}; check the structure only"
            ) from error

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        self._before.append(_Before.of(state))

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        before = self._before.pop()
        if isinstance(p, Composite):
            return
        name, state = " > ".join(path), result.state
        graphs = {"joint graph": state.joint.graph_module, **state.modules}
        fault = first_fault(graphs) or before.untold(result) or before.stale(state)
        if fault is None and self._trial is not None and before.is_changed(state):
            fault = self._other_numbers(self._trial, state, p, name)
        if fault is not None:
            raise PassError(name, fault, self._done, self._checks)
        self._done.append(p.name)

    def failed(self, p: Pass, state: State, path: tuple[str, ...], error: BaseException) -> None:
        del self._before[len(path) - 1 :]

    def finish(self, result: PassResult | None) -> None:
        if result is not None and self._draws_twice:
            name, drawn = self._draws_twice
            raise PassError(
                name,
                f"'{drawn}' draws in forward and draws anew in backward, up to the end of the "
                "pipeline: put 'functionalize-rng' behind 'partition'",
                self._done,
                self._checks,
            )

    def _other_numbers(self, trial: Trial, state: State, p: Pass, name: str) -> str | None:
        drawn = _drawn_twice(state)
        self._draws_twice = () if drawn is None else (name, drawn)
        if drawn is not None:
            return None
        try:
            results = _run(trial, state)
        except Exception as error:
            return (
                f"the graph that it left does not run on random inputs any more: {_describe(error)}"
            )
        if not p.keeps_numbers:
            self._reference = results
        difference = first_difference(self._reference, results)
        return None if difference is None else f"it changed the numbers: {difference}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Before:
    """Snapshot of a state before a pass."""

    graphs: tuple[tuple[fx.GraphModule, Stamp, AnalysisCache, int], ...]

    @classmethod
    def of(cls, state: State) -> _Before:
        return cls(
            graphs=tuple(
                (module, Stamp.of(module.graph), known, known.edits)
                for module, known in _modules(state)
            )
        )

    def untold(self, result: PassResult) -> str | None:
        """How the graphs were changed without a word of it, if they were."""
        mine = {id(m): known for m, known in _modules(result.state)}
        for module, stamp, known, edits in self.graphs:
            difference = stamp.difference(Stamp.of(module.graph))
            if difference is None or id(module) not in mine:
                continue
            if not result.modified:
                return f"it says modified=False, but changed the graph: {difference}"
            if mine[id(module)] is known and known.edits == edits:
                return (
                    f"it changed the graph outside of `with state.edit()`: {difference}; analyses "
                    "that are known may be stale"
                )
        if not result.modified and any(id(m) not in self._ids() for m, _ in _modules(result.state)):
            return "it says modified=False, but returns another graph"
        return None

    def is_changed(self, state: State) -> bool:
        """Whether there is anything new to run."""
        after = {id(m) for m, _ in _modules(state)}
        return after != self._ids() or any(
            stamp.difference(Stamp.of(module.graph)) is not None
            for module, stamp, _, _ in self.graphs
        )

    def stale(self, state: State) -> str | None:
        """Which of the analyses that were preserved over a change does not hold any more."""
        edits = {id(known): count for _, _, known, count in self.graphs}
        fresh = dataclasses.replace(
            state, _joint_cache=AnalysisCache(()), _partitioned_cache=AnalysisCache(())
        )
        for known in state.analysis_caches:
            if edits.get(id(known), known.edits) == known.edits:
                continue
            for key, value in known.results():
                if not same_result(value, fresh.get(key)):
                    return (
                        f"it preserves the analysis '{key.name}', which comes out differently for "
                        "the graph that it left: take it out of `preserves`"
                    )
        return None

    def _ids(self) -> set[int]:
        return {id(module) for module, *_ in self.graphs}


def _modules(state: State) -> list[tuple[fx.GraphModule, AnalysisCache]]:
    """The graphs of a state, each with its cached analyses."""
    joint_cache, partitioned_cache = state.analysis_caches
    partitioned = [(m, partitioned_cache) for m in (state.forward, state.backward) if m is not None]
    return [(state.joint.graph_module, joint_cache), *partitioned]


def same_result(one: Any, other: Any) -> bool:
    """Whether two results of an analysis are the same, as far as can be told.

    Dataclasses are compared field by field, also where they do not define equality; objects that
    cannot be compared count as the same.
    """
    return alike(one, other, _same_value)


def _same_value(one: Any, other: Any) -> bool:
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return all(
            same_result(getattr(one, f.name), getattr(other, f.name))
            for f in dataclasses.fields(one)
            if f.compare
        )
    if isinstance(one, torch.Tensor) or type(one).__eq__ is _BY_IDENTITY:
        return True
    return bool(one == other)


def _run(trial: Trial, state: State) -> Mapping[str, Any]:
    if state.forward is None or state.backward is None:
        return trial.run_joint(state.joint)
    return trial.run_graphs(state.forward, state.backward, state.joint.num_fwd_outputs)


def _drawn_twice(state: State) -> str | None:
    """The first random operator that draws in forward and anew later."""
    if state.forward is None or state.backward is None:
        return None
    again = drawn_again(state.forward.graph, state.backward.graph)
    return again[0][0].name if again else None


def _describe(error: Exception) -> str:
    """An error in one line; the interpreter appends the node that it was at."""
    lines = map(str.strip, str(error).splitlines())
    at = next((line for line in lines if line.startswith("While executing")), "")
    return summary(error)[:220] + (f" ({at[:120]})" if at else "")
