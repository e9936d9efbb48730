"""Checks that refuse a pipeline in which a pass does nothing or undoes the work of another pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remat.errors import ProblemError
from remat.passes.core.base import Pass, Stage
from remat.passes.core.control import Fixpoint


def flat(passes: Iterable[Pass]) -> Iterator[Pass]:
    """Yield passes in a possible order of their runs; instead of a `Fixpoint`, yield its inner passes."""
    # The inner passes of a `Fixpoint` are yielded twice if its ``limit`` allows several rounds. The last inner pass
    # of one round then runs before the first inner pass of the next round.
    for p in passes:
        if not isinstance(p, Fixpoint):
            yield p
        elif p.limit > 1:
            # `_each` repeats no pass. With `flat`, a pass inside n nested fixpoints would be
            # yielded 2**n times.
            yield from 2 * tuple(_each(p.passes))
        else:
            yield from flat(p.passes)


def _each(passes: Iterable[Pass]) -> Iterator[Pass]:
    """Yield each pass once; instead of a `Fixpoint`, yield its inner passes."""
    for p in passes:
        if isinstance(p, Fixpoint):
            yield from _each(p.passes)
        else:
            yield p


def check_order(passes: tuple[Pass, ...]) -> None:
    """Refuse a pipeline that partitions the joint graph twice, or in which a pass undoes the work of an earlier pass.

    Raises:
        ProblemError: a pass comes after a pass named in its ``not_after``, or after a pass of a
            later stage; or ``partition`` occurs twice. The message names the pass to move or remove.
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
    # `_each` instead of `flat`, because `flat` yields a pass inside a `Fixpoint` twice.
    if sum(p.stage is Stage.PARTITION for p in _each(passes)) > 1:
        raise ProblemError(
            "pass 'partition' stands twice, and a graph is split once: a second one could do nothing; "
            "leave it out"
        )


def check_partitioned(passes: tuple[Pass, ...]) -> None:
    """Refuse a pipeline in which a pass of `Stage.SPLIT` comes before the pass ``partition``.

    Raises:
        ProblemError: a pass works on the forward and backward graphs, and no earlier pass
            partitions the joint graph.
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
    """Refuse to run a pipeline on a joint graph if all passes of the pipeline need forward and backward graphs.

    Raises:
        ProblemError: all passes belong to `Stage.SPLIT`, so the pipeline would do nothing.
    """
    late = list(flat(passes))
    if late and all(p.stage is Stage.SPLIT for p in late):
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(p.name for p in late))
        raise ProblemError(
            f"this pipeline can do nothing: {names} work on forward and backward, and nothing here "
            "partitions the joint graph into them; put 'partition' before, or run it on the state of "
            "a result that is partitioned"
        )
