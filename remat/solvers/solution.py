"""What a solver may return, and what remat makes of it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field


class Status(enum.Enum):
    """How much is known about a solution."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver returns when bare indices do not say enough. Nothing in it is believed.

    Attributes:
        saved: indices of the items (for a graph problem: nodes) to save, in any order.
        bound: what the solver has proven about any choice: for a knapsack an upper bound on the
            value, for a graph problem a lower bound on the cost.
        value: what the solver thinks ``saved`` is worth (for a graph problem: costs); compared
            with what it is.
        status: ``OPTIMAL`` if the solver has proven its answer optimal. Without a status and
            without a bound, a solver that declares ``exact`` is taken to say ``OPTIMAL``.
        by_clock: a clock, not counted work, ended the search, so that the next run may differ.
    """

    saved: Iterable[int]
    bound: int | None = None
    value: int | None = field(default=None, kw_only=True)
    status: Status | None = field(default=None, kw_only=True)
    by_clock: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A checked answer to a knapsack problem.

    Attributes:
        saved: indices of the items to save, sorted.
        value: their value, recomputed.
        weight: their weight, recomputed; at most the capacity.
        bound: upper bound on the value of any choice, proven here; never below ``value``.
        status: ``OPTIMAL`` if it is proven here that nothing better exists.
        solver: name of the solver.
        elapsed_s: seconds the solver took.
        deterministic: False if a clock ended the search or the solver declares no better.
        claimed_bound: the bound that a solver from outside claims, where it is tighter than
            ``bound``: nobody here has proven it. None where there is no such claim.
    """

    saved: tuple[int, ...]
    value: int
    weight: int
    bound: int
    status: Status
    solver: str
    elapsed_s: float
    deterministic: bool = True
    claimed_bound: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSolution:
    """A checked answer to a graph problem.

    Attributes:
        saved: positions of the nodes that are saved and read, sorted.
        cost: the summed cost of what runs a second time, recomputed, in the problem's unit.
        saved_bytes: their bytes, recomputed; at most the capacity.
        bound: lower bound on the cost of any decision, proven here; never above ``cost``.
        status: ``OPTIMAL`` if it is proven here that nothing better exists.
        solver: name of the solver.
        elapsed_s: seconds the solver took.
        deterministic: False if a clock ended the search or the solver declares no better.
        claimed_bound: the bound that a solver from outside claims, where it is tighter than
            ``bound``: nobody here has proven it. None where there is no such claim.
    """

    saved: tuple[int, ...]
    cost: int
    saved_bytes: int
    bound: int
    status: Status
    solver: str
    elapsed_s: float
    deterministic: bool = True
    claimed_bound: int | None = None
