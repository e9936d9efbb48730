"""`Fixpoint`, the pass that runs other passes repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from remat.errors import ProblemError
from remat.passes.core.base import Pass
from remat.passes.core.state import PassResult, State

#: Function that runs passes in order on a state and returns the combined result.
Runner = Callable[[tuple[Pass, ...], State], PassResult]


def run_plainly(passes: tuple[Pass, ...], state: State) -> PassResult:
    """Run passes in order on a state, without the instruments and checks of a pipeline.

    Returns:
        A result with the state after the last pass, and with whether any pass reported a change.
    """
    modified = False
    for p in passes:
        result = p.run(state)
        state, modified = result.state, modified or result.modified
    return PassResult(state=state, modified=modified)


def as_passes(owner: str, given: object) -> tuple[Pass, ...]:
    """Check that ``given`` consists of passes, and return the passes as a tuple.

    Args:
        owner: name of the object that consists of the passes, for the error message.
        given: an iterable of passes, or a single pass.

    Raises:
        ProblemError: ``given`` contains, or is, an object that is not a pass.
    """
    passes = tuple(given) if isinstance(given, Iterable) else (given,)
    for p in passes:
        if not isinstance(p, Pass):
            raise ProblemError(f"{owner} is made of Pass instances, got {p!r}")
    return passes


@dataclass(frozen=True)
class Fixpoint(Pass):
    """Run the inner passes in rounds until one round changes nothing, or ``limit`` rounds have run.

    In each round of a `Fixpoint`, every inner pass runs once. The instruments of the pipeline also
    observe the inner passes.

    Attributes:
        passes: the inner passes, in order.
        limit: largest number of rounds.
    """

    name: ClassVar[str] = "fixpoint"

    passes: tuple[Pass, ...] = ()
    limit: int = 10

    def __post_init__(self) -> None:
        # A list of passes becomes a tuple, because a pass must be hashable.
        object.__setattr__(self, "passes", as_passes(f"'{self.name}'", self.passes))
        if not self.passes:
            raise ProblemError(f"'{self.name}' is empty: name the passes inside its parentheses")
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 1:
            raise ProblemError(f"'{self.name}' limit is {self.limit!r}; expected 1 round or more")

    def run(self, state: State) -> PassResult:
        return self.run_with(state, run_plainly)

    def run_with(self, state: State, runner: Runner) -> PassResult:
        """Run the inner passes in rounds, and return the combined result; its statistics are the number of rounds.

        Args:
            state: the state to start from.
            runner: function that runs the inner passes once. A pipeline's runner also calls the
                pipeline's instruments around each inner pass; `run_plainly` calls none.
        """
        modified, rounds, is_unchanged = False, 0, False
        while not is_unchanged and rounds < self.limit:
            result = runner(self.passes, state)
            state, is_unchanged = result.state, not result.modified
            modified, rounds = modified or result.modified, rounds + 1
        detail, statistics = f"{rounds} rounds", {"rounds": rounds}
        if not is_unchanged:
            detail, statistics["unsettled"] = f"{detail}, not settled", 1
        return PassResult(state=state, modified=modified, detail=detail, statistics=statistics)
