"""Define the answers that solvers return, and the verified form of these answers."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field


class Status(enum.Enum):
    """Whether a solution is proven optimal, or is only known to fit the capacity."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


@dataclass(frozen=True, slots=True)
class Answer:
    """A solver's answer with claims, such as a bound, in addition to the chosen indices.

    `remat.solvers.verify.verify` checks the claims.

    Attributes:
        saved: indices of the items (for a graph problem: nodes) to save, in any order.
        bound: a bound that the solver has proven; None if it has none. The bound of a knapsack is an
            upper bound on the value of any choice. The bound of a graph problem is a lower bound on
            the cost of any decision.
        value: the total value of ``saved`` (for a graph problem: the cost), as computed by the
            solver; None if not stated. An answer with a wrong value is refused.
        status: ``OPTIMAL`` if the solver has proven its answer optimal. An answer to a knapsack
            with neither status nor bound counts as ``OPTIMAL`` if the solver declares ``exact``.
        by_clock: whether a time limit ended the search, so that the next run may give another
            answer. A limit on counted work does not set ``by_clock``.
    """

    saved: Iterable[int]
    bound: int | None = None
    value: int | None = field(default=None, kw_only=True)
    status: Status | None = field(default=None, kw_only=True)
    by_clock: bool = field(default=False, kw_only=True)


class ScheduleAnswer(Answer):
    """A solver's answer to a schedule problem with claims, such as a bound, in addition to the schedule.

    Attributes:
        sequence: nodes in the order in which they run.
        bound: a lower bound on the cost of any schedule, proven by the solver; None if the solver
            has proven none.
        by_clock: whether a time limit ended the search, so that the next run may give another
            answer. A limit on counted work does not set ``by_clock``.
    """

    __slots__ = ()

    def __init__(
        self, sequence: Iterable[int], bound: int | None = None, *, by_clock: bool = False
    ) -> None:
        super().__init__(sequence, bound, by_clock=by_clock)

    @property
    def sequence(self) -> Iterable[int]:
        """The nodes in the order in which they run."""
        return self.saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Base class of verified answers, whose value, cost and bytes are computed by remat, not by the solver.

    Attributes:
        bound: a proven bound. For a knapsack, no choice has a greater value. For the other kinds of
            problems, no answer has a lower cost.
        status: ``OPTIMAL`` if it is proven that no better answer exists.
        solver: name of the solver.
        elapsed_s: seconds that the solver took.
        deterministic: False if a time limit ended the search, or if the solver declares that its
            answers may differ from run to run.
        claimed_bound: a bound claimed by a solver that is not built in, if it is tighter than
            ``bound`` and remat could not prove it; otherwise None.
    """

    bound: int
    status: Status
    solver: str
    elapsed_s: float
    deterministic: bool = True
    claimed_bound: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution(Checked):
    """A verified answer to a knapsack problem; see `Checked` for the other attributes.

    Attributes:
        saved: sorted indices of the saved items.
        value: total value of the saved items, as computed by remat; at most ``bound``.
        weight: total weight of the saved items, as computed by remat; at most the capacity.
    """

    saved: tuple[int, ...]
    value: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSolution(Checked):
    """A verified answer to a graph problem; see `Checked` for the other attributes.

    Attributes:
        saved: sorted indices of the saved nodes that backward reads.
        cost: summed cost of the nodes that run a second time, in the problem's unit; at least
            ``bound``. Computed by remat.
        saved_bytes: bytes of the saved nodes, as computed by remat; at most the capacity.
    """

    saved: tuple[int, ...]
    cost: int
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Checked):
    """A verified answer to a schedule problem; see `Checked` for the other attributes.

    Attributes:
        sequence: nodes in the order in which they run.
        cost: summed cost of all runs, in the problem's unit; at least ``bound``. Computed by remat.
        peak_bytes: most bytes alive at one time, as computed by remat; at most the capacity.
        boundary: position in ``sequence`` at which backward begins; the length of ``sequence`` if
            no run belongs to backward.
    """

    sequence: tuple[int, ...]
    cost: int
    peak_bytes: int
    boundary: int
