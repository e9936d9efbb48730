"""Checks that refuse a pipeline in which a pass does nothing or undoes the work of another pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remat.errors import ProblemError
from remat.passes.core.base import Pass, Stage
from remat.passes.core.control import Fixpoint


def flat(passes: Iterable[Pass], rounds: int = 2) -> Iterator[Pass]:
    """Yield passes in a possible order of their runs; replace a `Fixpoint` by up to ``rounds`` of its rounds."""
    for p in passes:
        if not isinstance(p, Fixpoint):
            yield p
            continue
        # Two rounds, because the last inner pass of one round runs before the first inner pass of the next round.
        # One round of a `Fixpoint` inside: with two, a pass inside n nested fixpoints would be yielded 2**n times.
        for _ in range(min(rounds, p.limit)):
            yield from flat(p.passes, rounds=1)


def check_order(passes: tuple[Pass, ...]) -> None:
    """Refuse a pipeline in which a pass undoes the work of an earlier pass.

    Raises:
        ProblemError: a pass comes after a pass named in its ``not_after``, or after a pass of a
            later stage. The message names the pass to move.
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
