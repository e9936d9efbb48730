"""Pipelines that run passes in order, and the instruments that observe each pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from torch import fx

from remat.errors import PassError, ProblemError, RematError
from remat.graph.joint import JointGraph, check_structure
from remat.passes.core.base import Pass
from remat.passes.core.control import Fixpoint, as_passes
from remat.passes.core.ordering import check_order, flat
from remat.passes.core.pipeline_text import write_pipeline
from remat.passes.core.state import PassResult, State

#: Function that runs a pass or a pipeline, and the instruments inside the calling one, on a state.
Run = Callable[[State], PassResult]


class Instrument:
    """Base class of instruments, which run code around a pipeline and around every pass of the pipeline.

    A subclass overrides `around_pass`, `around_pipeline` or both. Each method gets a function ``run``, and returns the
    result of ``run(state)``. The first instrument of a run is the outermost: its argument ``run`` calls the second
    instrument, and so on.

    Attributes:
        only_inner: if True, `around_pass` is called for the inner passes of a `Fixpoint`, and not for the
            `Fixpoint` itself.
    """

    only_inner: ClassVar[bool] = False

    def around_pipeline(self, pipeline: Pipeline, state: State, run: Run) -> PassResult:
        """Run a pipeline on ``state`` by ``run(state)``, and return the result."""
        return run(state)

    def around_pass(self, p: Pass, state: State, path: tuple[str, ...], run: Run) -> PassResult:
        """Run the pass ``p`` on ``state`` by ``run(state)``, and return the result.

        If the pass or the check of its result fails, ``run`` raises. To skip the pass, return
        ``PassResult(state=state, modified=False)`` without a call of ``run``.

        Args:
            p: the pass.
            state: the state on which the pass is to run.
            path: the names of the passes that enclose ``p``, outermost first, and then the name of ``p``.
            run: function that runs the pass.
        """
        return run(state)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Sequence of passes in a valid order; the method `run` runs the passes.

    Attributes:
        passes: the passes, in order.

    Raises:
        ProblemError: an item is not a `Pass`, or `check_order` refuses the order.
    """

    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", as_passes("a pipeline", self.passes))
        check_order(self.passes)

    def __str__(self) -> str:
        return write_pipeline(self.passes)

    def flat(self) -> Iterator[Pass]:
        """Yield this pipeline's passes in a possible order of their runs; replace a `Fixpoint` by its inner passes."""
        return flat(self.passes)

    def run(
        self,
        joint: JointGraph | State,
        *,
        in_place: bool = False,
        verify: bool = True,
        instruments: Sequence[Instrument] = (),
    ) -> PassResult:
        """Run the passes of this pipeline in order.

        Args:
            joint: a joint graph, or the final state of another pipeline.
            in_place: whether to change the caller's joint graph instead of a copy. A state that is
                already partitioned is always changed in place.
            verify: whether to check the structure of the graphs after each pass that reports a
                change.
            instruments: observers of the run; see `remat.passes.instruments`.

        Returns:
            The final state; whether any pass reported a change; the names of the passes that ran,
            as ``detail``; and the sums of the passes' statistics.

        Raises:
            PassError: a pass raised an exception that is not a `RematError`, returned a wrong type,
                or left a graph with an invalid structure. The message names the pass and the passes
                that ran before.
            RematError: a pass raised this error; a note on the error names the pass.
            ProblemError: ``joint`` is no joint graph and no state.
        """
        if not isinstance(joint, (JointGraph, State)):
            raise ProblemError(
                f"joint is a {type(joint).__name__}; expected a JointGraph: use remat.capture(model, args)"
            )
        state = joint if isinstance(joint, State) else State(joint=joint)
        if state.forward is None and not in_place:
            state = replace(state, joint=state.joint.copy())
        runner = _Runner(tuple(instruments), verify=verify)
        run: Run = partial(runner.sequence, self.passes)
        for instrument in reversed(instruments):
            run = partial(instrument.around_pipeline, self, run=run)
        return replace(
            run(state), detail=", ".join(runner.completed), statistics=dict(runner.statistics)
        )


@dataclass(slots=True)
class _Runner:
    """One run of a pipeline, with the names of completed passes and the sums of the passes' statistics."""

    instruments: tuple[Instrument, ...]
    verify: bool
    completed: list[str] = field(default_factory=list)
    statistics: Counter[str] = field(default_factory=Counter)

    def sequence(
        self, passes: Iterable[Pass], state: State, path: tuple[str, ...] = ()
    ) -> PassResult:
        """Run passes in order, call the instruments around each pass, and return the combined result."""
        modified = False
        for p in passes:
            here = (*path, p.name)
            run: Run = partial(self._one, p, path=here)
            for instrument in reversed(self.instruments):
                if not (instrument.only_inner and isinstance(p, Fixpoint)):
                    run = partial(instrument.around_pass, p, path=here, run=run)
            result = run(state)
            state, modified = result.state, modified or result.modified
        return PassResult(state=state, modified=modified)

    def _one(self, p: Pass, state: State, path: tuple[str, ...]) -> PassResult:
        """Run one pass, and check the type of its result and, if ``verify`` is True, the structure of graphs."""
        name = " > ".join(path)
        try:
            if isinstance(p, Fixpoint):
                result = p.run_with(state, lambda inner, s: self.sequence(inner, s, path))
            else:
                result = p.run(state)
        except PassError:  # already names the failed pass, usually an inner one
            raise
        except RematError as error:
            # Not wrapped in a PassError, because callers tell causes apart by the error's class.
            # A `Fixpoint` adds no note, because the inner pass has added one with the whole path.
            if not isinstance(p, Fixpoint):
                error.add_note(
                    f"while running pass '{name}' after: {', '.join(self.completed) or 'none'}"
                )
            raise
        except Exception as error:
            raise PassError(name, f"{type(error).__name__}: {error}", self.completed) from error
        if not isinstance(result, PassResult) or not isinstance(result.state, State):
            raise PassError(
                name,
                f"run() returned {_shown(result)}, expected PassResult with a State; "
                "end it with `return PassResult(state=..., modified=...)`",
                self.completed,
            )
        fault = first_fault(result.state.modules) if self.verify and result.modified else None
        if fault is not None:
            raise PassError(name, fault, self.completed)
        self.statistics.update(result.statistics)
        self.completed.append(p.name)
        return result


def first_fault(modules: Mapping[str, fx.GraphModule]) -> str | None:
    """Return a description of the fault in the first graph with an invalid structure; None if all graphs are valid.

    Args:
        modules: the graphs after a pass, by the name that the message uses.
    """
    for which, module in modules.items():
        fault = check_structure(module)
        if fault is not None:
            return f"it left a broken {which}: {fault}"
    return None


def _shown(result: object) -> str:
    if isinstance(result, PassResult):
        return f"PassResult with a {type(result.state).__name__}"
    return type(result).__name__
