"""The pass manager: passes run in order, watched by instruments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remat.errors import PassError, ProblemError, RematError
from remat.graph.joint import JointGraph
from remat.graph.structure import check_structure
from remat.passes.analysis import Analysis
from remat.passes.base import Pass, PassResult, Stage, State
from remat.passes.control import Composite, When
from remat.passes.instrument import Instrument
from remat.passes.partition import Partition
from remat.passes.pipeline_text import read_pipeline, write_pipeline


@dataclass(frozen=True, slots=True)
class PassManager:
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
        _check_order(list(self.flat()))
        _check_partitions(self.passes)

    def __str__(self) -> str:
        return write_pipeline(self.passes)

    def flat(self) -> Iterator[Pass]:
        """The passes in an order in which they may run, with those inside of others."""
        return _flat(self.passes)

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
            _check_halves(self.passes)
            if not in_place:
                state = replace(state, joint=state.joint.copy())
        run = _Run(tuple(instruments), verify=verify)
        result: PassResult | None = None
        try:
            for instrument in instruments:
                instrument.start(self, state)
            result = run.sequence(self.passes, state)
        finally:
            for instrument in reversed(instruments):
                instrument.finish(result)
        return PassResult(
            state=result.state,
            modified=result.modified,
            detail=", ".join(run.done),
            statistics=result.statistics,
        )

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        passes: Mapping[str, type[Pass]] | None = None,
        analyses: Mapping[str, type[Analysis[Any]]] | None = None,
        read: Mapping[str, Callable[[str], Any]] | None = None,
    ) -> PassManager:
        """Reads a pipeline: names separated by commas, options and nested passes in parentheses.

        Args:
            text: for example ``"fixpoint(dce,cse),min-cut(ban-reductions=false),partition"``.
            passes: the passes that may be named; our own where None.
            analyses: the analyses that may be named; our own where None.
            read: how to read options that are neither numbers, booleans nor text, by option name.

        Raises:
            ProblemError: the text cannot be read, or the order is refused; where it can, the
                message points at the column.
        """
        from remat.passes import builtin_analyses, builtin_passes

        if passes is None:
            passes = {p.name: p for p in builtin_passes()}
        if analyses is None:
            analyses = {a.name: a for a in builtin_analyses()}
        return cls(read_pipeline(text, passes=passes, analyses=analyses, read=read or {}))


def run_plainly(passes: tuple[Pass, ...], state: State) -> PassResult:
    """Runs passes without instruments or checks."""
    return _Run((), verify=False).sequence(passes, state)


@dataclass(slots=True)
class _Run:
    """One run of a pipeline: what watches it, and what has been done so far."""

    instruments: tuple[Instrument, ...]
    verify: bool
    done: list[str] = field(default_factory=list)

    def sequence(
        self, passes: Iterable[Pass], state: State, path: tuple[str, ...] = ()
    ) -> PassResult:
        modified = False
        statistics: dict[str, int] = {}
        for p in passes:
            here = (*path, p.name)
            if not all(i.should_run(p, state, here) for i in self.instruments):
                continue
            for instrument in self.instruments:
                instrument.before(p, state, here)
            try:
                result = self._one(p, state, here)
                for instrument in reversed(self.instruments):
                    instrument.after(p, result, here)
            except BaseException as error:
                for instrument in reversed(self.instruments):
                    instrument.failed(p, state, here, error)
                raise
            state, modified = result.state, modified or result.modified
            for key, count in result.statistics.items():
                statistics[key] = statistics.get(key, 0) + count
            self.done.append(p.name)
        return PassResult(state=state, modified=modified, statistics=statistics)

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
        if self.verify and result.modified:
            self._check(name, result.state)
        return result

    def _check(self, name: str, state: State) -> None:
        """Checks that the graphs are whole."""
        for which, module in (
            ("joint graph", state.joint.graph_module if state.forward is None else None),
            ("forward", state.forward),
            ("backward", state.backward),
        ):
            fault = None if module is None else check_structure(module)
            if fault is not None:
                raise PassError(name, f"it left a broken {which}: {fault}", self.done)


def _shown(result: object) -> str:
    if isinstance(result, PassResult):
        return f"PassResult with a {type(result.state).__name__}"
    return type(result).__name__


def _flat(passes: Iterable[Pass]) -> Iterator[Pass]:
    """The passes in an order in which they may run, with those inside of others."""
    for p in passes:
        if isinstance(p, Composite):
            yield from _flat(p.order)
        else:
            yield p


def check_partitioned(manager: PassManager) -> None:
    """Refuses a pipeline for a joint graph in which a pass stands before what it works on.

    Raises:
        ProblemError: a pass works on the two halves, and nothing before it partitions.
    """
    always = {id(p) for p in _unconditional(manager.passes)}
    for p in manager.flat():
        if p.stage is Stage.PARTITION:
            return
        if p.stage is Stage.SPLIT and id(p) in always:
            raise ProblemError(
                f"pass '{p.name}' works on forward and backward, and nothing before it partitions a joint "
                "graph into them, so it can do nothing; put 'partition' before it"
            )


def _check_order(passes: list[Pass]) -> None:
    """Refuses an order in which a pass undoes the work of another.

    Raises:
        ProblemError: there is such a pass; the message says why it may not stand there.
    """
    reached: Pass | None = None
    before: list[str] = []
    for p in passes:
        for name in before:
            if name in p.not_after:
                raise ProblemError(
                    f"pass '{p.name}' stands after '{name}': {p.not_after[name]}; put it before"
                )
        if p.stage is not Stage.ANY:
            if reached is not None and p.stage < reached.stage:
                raise ProblemError(
                    f"pass '{p.name}' ({p.stage.name.lower()} stage) stands after "
                    f"'{reached.name}' ({reached.stage.name.lower()} stage), whose work it would "
                    "undo; put it before"
                )
            reached = p
        before.append(p.name)


def _check_halves(passes: tuple[Pass, ...]) -> None:
    """Refuses to run a pipeline on a joint graph that works on forward and backward only.

    Raises:
        ProblemError: it is one, and could do nothing.
    """
    flat = list(_flat(passes))
    if flat and all(p.stage is Stage.SPLIT for p in flat):
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(p.name for p in flat))
        raise ProblemError(
            f"this pipeline can do nothing: {names} work on forward and backward, and nothing here "
            "partitions the joint graph into them; put 'partition' before, or run it on the state of "
            "a result that is partitioned"
        )


def _check_partitions(passes: tuple[Pass, ...]) -> None:
    """Refuses a pipeline that partitions twice.

    Raises:
        ProblemError: it is one; the message says why.
    """
    if sum(isinstance(p, Partition) for p in _unconditional(passes)) > 1:
        raise ProblemError(
            "pass 'partition' stands twice, and a graph is split once: a second one could do nothing; "
            "leave it out"
        )


def _unconditional(passes: Iterable[Pass]) -> Iterator[Pass]:
    """The passes that run whatever the graph is; those that are repeated stand once."""
    for p in passes:
        if isinstance(p, Composite):
            if not isinstance(p, When):
                yield from _unconditional(p.passes)
        else:
            yield p
