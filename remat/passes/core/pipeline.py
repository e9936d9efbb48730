"""Pipelines: passes run in order, watched by instruments."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from remat.errors import PassError, ProblemError, RematError
from remat.graph.joint import JointGraph, check_structure
from remat.passes.core.base import Pass
from remat.passes.core.control import Composite
from remat.passes.core.ordering import check_joint_pipeline, check_order, flat
from remat.passes.core.pipeline_text import write_pipeline
from remat.passes.core.state import PassResult, State


class Instrument:
    """Base of instruments: override what you want to see.

    A pipeline calls every instrument at every pass, outer passes before those inside them; ``after``
    and ``failed`` come in reverse order, so that instruments nest like context managers. ``path``
    names the pass with those that it is inside of, outermost first.
    """

    def start(self, pipeline: Pipeline, state: State) -> None:
        """Called before a pipeline runs on ``state``."""

    def should_run(self, p: Pass, state: State, path: tuple[str, ...]) -> bool:
        """Whether the pass is run at all; one instrument that says no is enough."""
        return True

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        """A pass is about to run."""

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        """A pass has run."""

    def failed(self, p: Pass, state: State, path: tuple[str, ...], error: BaseException) -> None:
        """Called after a pass raised or returned a wrong type."""

    def finish(self, result: PassResult | None) -> None:
        """A pipeline has ended; with None it has failed."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline.

    Attributes:
        passes: the passes, in order.
    """

    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.passes, Iterable):
            raise ProblemError(f"a pipeline is made of Pass instances, got {self.passes!r}")
        object.__setattr__(self, "passes", tuple(self.passes))
        for p in self.passes:
            if not isinstance(p, Pass):
                raise ProblemError(f"a pipeline is made of Pass instances, got {p!r}")
        check_order(self.passes)

    def __str__(self) -> str:
        return write_pipeline(self.passes)

    def flat(self) -> Iterator[Pass]:
        """The passes in an order in which they may run, with those inside of others."""
        return flat(self.passes)

    def run(
        self,
        joint: JointGraph | State,
        *,
        in_place: bool = False,
        verify: bool = True,
        instruments: Sequence[Instrument] = (),
    ) -> PassResult:
        """Runs the passes in order.

        Args:
            joint: a joint graph, or the state that another pipeline ended in.
            in_place: work on the caller's graph instead of on a copy of it.
            verify: check that the graphs are whole after each pass that changed something.
            instruments: what watches; see `remat.passes.instruments`.

        Raises:
            PassError: a pass failed, or left a graph that is not whole; the error names it and
                those that ran before. The caller's graph is as it was unless ``in_place``.
        """
        if not isinstance(joint, (JointGraph, State)):
            raise ProblemError(
                f"joint is a {type(joint).__name__}; expected a JointGraph: use remat.capture(model, args)"
            )
        state = joint if isinstance(joint, State) else State(joint=joint)
        if state.forward is None:
            check_joint_pipeline(self.passes)
            if not in_place:
                state = replace(state, joint=state.joint.copy())
        run = _Runner(tuple(instruments), verify=verify)
        result: PassResult | None = None
        with contextlib.ExitStack() as started:
            for instrument in instruments:
                instrument.start(self, state)
                started.callback(lambda finish: finish(result), instrument.finish)
            result = run.sequence(self.passes, state)
        return PassResult(
            state=result.state,
            modified=result.modified,
            detail=", ".join(run.done),
            statistics=result.statistics,
        )


@dataclass(slots=True)
class _Runner:
    """One run of a pipeline: its instruments and the passes done so far."""

    instruments: tuple[Instrument, ...]
    verify: bool
    done: list[str] = field(default_factory=list)

    def sequence(
        self, passes: Iterable[Pass], state: State, path: tuple[str, ...] = ()
    ) -> PassResult:
        modified, statistics = False, Counter[str]()
        for p in passes:
            here = (*path, p.name)
            if not all(i.should_run(p, state, here) for i in self.instruments):
                continue
            watching: list[Instrument] = []
            try:
                for instrument in self.instruments:
                    instrument.before(p, state, here)
                    watching.append(instrument)
                result = self._one(p, state, here)
                while watching:  # one that raises has failed, those before it have not
                    watching[-1].after(p, result, here)
                    watching.pop()
            except BaseException as error:
                for instrument in reversed(watching):
                    instrument.failed(p, state, here, error)
                raise
            state, modified = result.state, modified or result.modified
            statistics.update(result.statistics)
            self.done.append(p.name)
        return PassResult(state=state, modified=modified, statistics=dict(statistics))

    def _one(self, p: Pass, state: State, path: tuple[str, ...]) -> PassResult:
        name = " > ".join(path)
        try:
            if isinstance(p, Composite):
                result = p.run_with(state, lambda inner, s: self.sequence(inner, s, path))
            else:
                result = p.run(state)
        except PassError:
            raise
        except RematError as error:
            # Which pass it was matters less here than what is wrong; the class is kept.
            if not isinstance(p, Composite):
                error.add_note(
                    f"while running pass '{name}' after: {', '.join(self.done) or 'none'}"
                )
            raise
        except Exception as error:
            raise PassError(name, f"{type(error).__name__}: {error}", self.done) from error
        if not isinstance(result, PassResult) or not isinstance(result.state, State):
            raise PassError(
                name,
                f"run() returned {_shown(result)}, expected PassResult with a State; "
                "end it with `return PassResult(state=..., modified=...)`",
                self.done,
            )
        fault = first_fault(result.state.modules) if self.verify and result.modified else None
        if fault is not None:
            raise PassError(name, fault, self.done)
        return result


def first_fault(modules: Mapping[str, fx.GraphModule]) -> str | None:
    """How a pass left a graph that is not whole; None where all are whole."""
    for which, module in modules.items():
        fault = check_structure(module)
        if fault is not None:
            return f"it left a broken {which}: {fault}"
    return None


def _shown(result: object) -> str:
    if isinstance(result, PassResult):
        return f"PassResult with a {type(result.state).__name__}"
    return type(result).__name__
