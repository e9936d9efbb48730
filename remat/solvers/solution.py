"""Answers of solvers, and their verified form."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar


class Status(enum.Enum):
    """How much is known about a solution."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a solver with more than indices. Every claim in it is verified.

    Attributes:
        saved: indices of the items (for a graph problem: nodes) to save, in any order.
        bound: for a knapsack an upper bound on the value of any choice, for a graph problem a lower
            bound on the cost of any decision, as far as the solver has proven one.
        value: what the solver takes ``saved`` to be worth (for a graph problem: to cost); it must
            be right.
        status: ``OPTIMAL`` if the solver has proven its answer optimal. Without a status and
            without a bound, a solver that declares ``exact`` is taken to say ``OPTIMAL``.
        by_clock: a clock, not counted work, ended the search, so that the next run may differ.
    """

    saved: Iterable[int]
    bound: int | None = None
    value: int | None = field(default=None, kw_only=True)
    status: Status | None = field(default=None, kw_only=True)
    by_clock: bool = field(default=False, kw_only=True)

    @property
    def choice(self) -> Iterable[int]:
        """What is chosen, whatever the kind of problem."""
        return self.saved


@dataclass(frozen=True, slots=True)
class ScheduleAnswer:
    """Answer of a solver to a step problem with more than the sequence.

    Attributes:
        sequence: nodes in the order in which they run.
        bound: a lower bound on the cost of any schedule, as far as the solver has proven one.
        by_clock: a clock, not counted work, ended the search, so that the next run may differ.
    """

    value: ClassVar[None] = None
    status: ClassVar[None] = None

    sequence: Iterable[int]
    bound: int | None = None
    by_clock: bool = field(default=False, kw_only=True)

    @property
    def choice(self) -> Iterable[int]:
        """What is chosen, whatever the kind of problem."""
        return self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Verified figures of an answer to any problem; none is taken from the solver.

    Attributes:
        bound: proven here: no choice is worth more, or no decision and no schedule costs less.
        status: ``OPTIMAL`` if it is proven here that nothing better exists.
        solver: name of the solver.
        elapsed_s: seconds the solver took.
        deterministic: False if a clock ended the search or the solver does not promise to repeat.
        claimed_bound: the bound that a solver from outside claims, where it is tighter than
            ``bound`` and nobody here has proven it; otherwise None.
    """

    bound: int
    status: Status
    solver: str
    elapsed_s: float
    deterministic: bool = True
    claimed_bound: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswer(Checked):
    """A checked answer that names what is saved; see `Checked` for the other attributes.

    Attributes:
        saved: indices of the items, or of the nodes that are saved and read, sorted.
    """

    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution(CheckedAnswer):
    """A checked answer to a knapsack problem; see `CheckedAnswer` for the other attributes.

    Attributes:
        value: value of the saved items, recomputed; never above ``bound``.
        weight: their weight, recomputed; at most the capacity.
    """

    value: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSolution(CheckedAnswer):
    """A checked answer to a graph problem; see `CheckedAnswer` for the other attributes.

    Attributes:
        cost: the summed cost of what runs a second time, recomputed, in the problem's unit; never
            below ``bound``.
        saved_bytes: bytes of the saved nodes, recomputed; at most the capacity.
    """

    cost: int
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Checked):
    """A checked answer to a step problem; see `Checked` for the other attributes.

    Attributes:
        sequence: nodes in the order in which they run.
        cost: summed cost of all runs, recomputed, in the problem's unit; never below ``bound``.
        peak_bytes: most bytes alive at a time, recomputed; at most the capacity.
        boundary: position of the first run after the boundary; the length where there is none.
    """

    sequence: tuple[int, ...]
    cost: int
    peak_bytes: int
    boundary: int
