"""Orders of passes in which one would undo the work of another, or could do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remat.errors import ProblemError
from remat.passes.core.base import Pass, Stage
from remat.passes.core.control import Composite


def flat(passes: Iterable[Pass]) -> Iterator[Pass]:
    """The passes in an order in which they may run, with those inside of others.

    What is repeated comes twice, since its last pass may be followed by its first.
    """
    for p in passes:
        if not isinstance(p, Composite):
            yield p
        elif p.repeats:
            yield from 2 * tuple(_each(p.passes))
        else:
            yield from flat(p.passes)


def _each(passes: Iterable[Pass]) -> Iterator[Pass]:
    """Each pass once, with those inside of others."""
    for p in passes:
        if isinstance(p, Composite):
            yield from _each(p.passes)
        else:
            yield p


def check_order(passes: tuple[Pass, ...]) -> None:
    """Refuses an order in which a pass undoes the work of another, and a second partition.

    Raises:
        ProblemError: there is such a pass; the message says why it may not stand there.
    """
    reached: Pass | None = None
    before: list[str] = []
    for p in flat(passes):
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
    if sum(p.stage is Stage.PARTITION for p in _each(passes)) > 1:
        raise ProblemError(
            "pass 'partition' stands twice, and a graph is split once: a second one could do nothing; "
            "leave it out"
        )


def check_partitioned(passes: tuple[Pass, ...]) -> None:
    """Refuse a pipeline with a pass on forward and backward before any 'partition'.

    Raises:
        ProblemError: a pass works on forward and backward, and no earlier pass partitions.
    """
    for p in flat(passes):
        if p.stage is Stage.PARTITION:
            return
        if p.stage is Stage.SPLIT:
            raise ProblemError(
                f"pass '{p.name}' works on forward and backward, and nothing before it partitions a joint "
                "graph into them, so it can do nothing; put 'partition' before it"
            )


def check_joint_pipeline(passes: tuple[Pass, ...]) -> None:
    """Refuse to run a pipeline on a joint graph if all its passes work on forward and backward.

    Raises:
        ProblemError: all passes work on forward and backward, so the pipeline could do nothing.
    """
    found = list(flat(passes))
    if found and all(p.stage is Stage.SPLIT for p in found):
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(p.name for p in found))
        raise ProblemError(
            f"this pipeline can do nothing: {names} work on forward and backward, and nothing here "
            "partitions the joint graph into them; put 'partition' before, or run it on the state of "
            "a result that is partitioned"
        )
