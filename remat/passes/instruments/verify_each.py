"""Instrument that checks each pass: graphs, reported changes, cached analyses and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import fx

from remat.errors import PassError, ProblemError, summary
from remat.graph.capture.snapshot import Stamp, alike
from remat.passes.core.base import Pass
from remat.passes.core.pipeline import Instrument, Pipeline, Run, first_fault
from remat.passes.core.state import AnalysisCache, PassResult, State
from remat.passes.split.functionalize_rng import drawn_again
from remat.running.differences import first_difference
from remat.running.trial import Trial

#: The ``__eq__`` of classes that define none. This method compares identities, so a result False does not
#: prove a change.
_BY_IDENTITY: Any = object.__eq__


class VerifyEach(Instrument):
    """Instrument that checks the graphs, and the changes that a pass reports, after every pass.

    The instrument checks the structure of the graphs, and these rules:

    - A pass that returns ``modified=False`` has not changed a graph.
    - A pass changes the joint graph in place only inside ``state.edit()``.
    - An analysis that an edit preserves gives the same result when the analysis is computed again.
    - With ``numbers=True``, the changed graphs give bitwise the same results on random inputs as the
      joint graph before the first pass. The compared results are outputs, gradients, final values of
      the inputs, and the state of the random generator.

    After partitioning, a repeated run of a random operator draws new numbers until a later pass makes
    the run replay the first draw; until then, results are not compared. With ``numbers=True``, a random
    operator that still draws anew at the end of the pipeline is an error. After a pass with
    ``keeps_numbers=False``, the results of later passes are compared with the results of this pass.

    Args:
        numbers: whether to run the graphs and compare results.

    Raises:
        PassError: during a run, if a pass broke a rule; the message names the pass and the rule.
        ProblemError: during a run with ``numbers=True``, if the graph cannot be run on this
            machine.
    """

    only_inner: ClassVar[bool] = True  # the inner passes are checked one by one

    def __init__(self, *, numbers: bool = False) -> None:
        self._numbers = numbers
        #: Name of the checks, as in reproducers and in the option ``--verify-each``.
        self._checks = "numbers" if numbers else "structure"
        self._trial: Trial | None = None
        self._reference: Mapping[str, Any] = {}
        self._completed: list[str] = []
        self._draws_twice: tuple[str, str] | tuple[()] = ()

    def around_pipeline(self, pipeline: Pipeline, state: State, run: Run) -> PassResult:
        self._completed, self._trial, self._draws_twice = [], None, ()
        if self._numbers:
            self._trial = Trial.of(state.joint)
            try:
                self._reference = _run(self._trial, state)
            except ProblemError:
                raise
            except Exception as error:
                raise ProblemError(
                    f"graph '{state.joint.name}' does not run on random inputs, so its numbers cannot "
                    f"be checked: {_describe(error)}; check the structure only"
                ) from error
        result = run(state)
        self._refuse_draws()
        return result

    def _refuse_draws(self) -> None:
        """Raise an error if a random operator draws anew in backward after all passes."""
        if self._draws_twice:
            name, drawn = self._draws_twice
            raise PassError(
                name,
                f"'{drawn}' draws in forward and draws anew in backward, up to the end of the "
                "pipeline: put 'functionalize-rng' behind 'partition'",
                self._completed,
                self._checks,
            )

    def around_pass(self, p: Pass, state: State, path: tuple[str, ...], run: Run) -> PassResult:
        before, name = _Before.of(state), " > ".join(path)
        result = run(state)
        after = result.state
        graphs = {"joint graph": after.joint.graph_module, **after.modules}
        fault = first_fault(graphs) or before.untold(result) or before.stale(after)
        if fault is None and self._trial is not None and result.modified:
            fault = self._other_numbers(self._trial, after, p, name)
        if fault is not None:
            raise PassError(name, fault, self._completed, self._checks)
        self._completed.append(p.name)
        return result

    def _other_numbers(self, trial: Trial, state: State, p: Pass, name: str) -> str | None:
        """Run a state's graphs on random inputs; return how the results differ from the reference, or None if equal."""
        drawn = _drawn_twice(state)
        self._draws_twice = () if drawn is None else (name, drawn)
        if drawn is not None:  # results would differ, because no pass has added the replays yet
            return None
        try:
            results = _run(trial, state)
        except Exception as error:
            return (
                f"the graph that it left does not run on random inputs any more: {_describe(error)}"
            )
        # The results after a pass that may change numbers are the new reference.
        if not p.keeps_numbers:
            self._reference = results
        difference = first_difference(self._reference, results)
        return None if difference is None else f"it changed the numbers: {difference}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Before:
    """A state's graphs, analysis cache and number of edits, as they were before a pass ran."""

    graphs: tuple[tuple[fx.GraphModule, Stamp], ...]
    cache: AnalysisCache
    edits: int

    @classmethod
    def of(cls, state: State) -> _Before:
        """Record a state's graphs, analysis cache and number of edits before a pass runs."""
        graphs = tuple((module, Stamp.of(module.graph)) for module in _modules(state))
        return cls(graphs=graphs, cache=state.cache, edits=state.cache.edits)

    def untold(self, result: PassResult) -> str | None:
        """Return a message if a pass changed a graph without reporting it, or outside `State.edit`; otherwise None."""
        state = result.state
        own = {id(module) for module in _modules(state)}
        for module, stamp in self.graphs:
            difference = stamp.difference(Stamp.of(module.graph))
            if difference is None or id(module) not in own:  # a replaced graph no longer matters
                continue
            if not result.modified:
                return f"it says modified=False, but changed the graph: {difference}"
            is_joint = module is state.joint.graph_module
            if is_joint and state.cache is self.cache and state.cache.edits == self.edits:
                return (
                    f"it changed the graph outside of `with state.edit()`: {difference}; analyses "
                    "that are known may be stale"
                )
        if not result.modified and not own <= {id(module) for module, _ in self.graphs}:
            return "it says modified=False, but returns another graph"
        return None

    def stale(self, state: State) -> str | None:
        """Return a message if the result of a preserved analysis is stale after a pass; otherwise None."""
        # If the pass did not edit this graph, every cached result is still right.
        if state.cache is not self.cache or state.cache.edits == self.edits:
            return None
        fresh = dataclasses.replace(state, cache=AnalysisCache(()))
        for key, value in state.cache.results.items():
            if not same_result(value, fresh.get(key)):
                return (
                    f"it preserves the analysis '{key.name}', which comes out differently for "
                    "the graph that it left: take it out of `preserves`"
                )
        return None


def _modules(state: State) -> list[fx.GraphModule]:
    """Return the graph modules of a state: the joint graph and, after partitioning, forward and backward."""
    modules = (state.joint.graph_module, state.forward, state.backward)
    return [module for module in modules if module is not None]


def same_result(result: Any, other: Any) -> bool:
    """Return whether two results of an analysis are equal; parts that cannot be compared count as equal."""
    # Dataclasses are compared field by field, even if they do not define equality. Tensors, and objects that only
    # compare by identity, count as equal.
    return alike(result, other, _same_value)


def _same_value(value: Any, other: Any) -> bool:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(
            same_result(getattr(value, f.name), getattr(other, f.name))
            for f in dataclasses.fields(value)
            if f.compare
        )
    if isinstance(value, torch.Tensor) or type(value).__eq__ is _BY_IDENTITY:
        return True
    return bool(value == other)


def _run(trial: Trial, state: State) -> Mapping[str, Any]:
    if state.forward is None or state.backward is None:
        return trial.run_joint(state.joint)
    return trial.run_graphs(state.forward, state.backward, state.joint.num_fwd_outputs)


def _drawn_twice(state: State) -> str | None:
    """Return the name of a random operator that draws in forward and draws anew in a later run, or None."""
    if state.forward is None or state.backward is None:
        return None
    again = drawn_again(state.forward.graph, state.backward.graph)
    return again[0][0].name if again else None


def _describe(error: Exception) -> str:
    """Return an error as one line of text, with the graph's node that ran when the error occurred."""
    # `fx.Interpreter` appends the node in a line that begins with "While executing".
    lines = map(str.strip, str(error).splitlines())
    at = next((line for line in lines if line.startswith("While executing")), "")
    return summary(error)[:220] + (f" ({at[:120]})" if at else "")
