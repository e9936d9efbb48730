"""Define the base class of the three kinds of problems, and the 0/1 knapsack problem.

All numbers of a problem are integers. Each kind of problem is a subclass of `Problem`. The subclass
names the solver method to call, checks and evaluates answers, and gives a bound that needs no
search. `remat.solvers.run.run` solves problems of every kind.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from remat.errors import ProblemError
from remat.solvers import columns
from remat.solvers.columns import as_integer
from remat.solvers.knapsack.bounds import Relaxation, relax, repair
from remat.solvers.solution import Checked, Solution

#: Class of the verified answers to a kind of problem, such as `Solution` for knapsacks.
S = TypeVar("S", bound=Checked)
P = TypeVar("P", bound="Problem[Any]")


class Limits(NamedTuple):
    """A bound that no answer beats, and the value or cost of an answer known to exist, such as a greedy answer."""

    bound: int
    reachable: int | None = None


class Problem(Generic[S]):
    """Base class of the kinds of problems: knapsack, graph and schedule problems.

    A *choice* is the tuple of ints that a solver chooses: items, saved nodes, or runs of nodes.

    Attributes:
        kind: name of the kind in files and tables.
        method: name of the `Solver` method that solves the kind.
        noun: name of a choice in error messages.
        entry: name of an entry of a choice in error messages.
        solution: class of a verified answer.
        objective: attribute of ``solution`` that is optimised.
        bytes_taken: attribute of ``solution`` that the capacity limits.
        maximises: whether a larger objective is better.
    """

    __slots__ = ()

    kind: ClassVar[str]
    method: ClassVar[str]
    noun: ClassVar[str]
    entry: ClassVar[str] = "node"
    solution: ClassVar[type[Checked]]
    objective: ClassVar[str] = "cost"
    bytes_taken: ClassVar[str]
    maximises: ClassVar[bool] = False

    capacity: int | None

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def most_entries(self) -> int:
        """Largest number of entries in an answer; the limit stops iterables that never end."""
        return len(self)

    def read(self, entries: list[Any]) -> tuple[int, ...]:
        """Check that the entries of a solver's answer are different indices, and return them sorted.

        Raises:
            ProblemError: an entry is invalid. The message, such as "returned index 3 twice", lacks
                the subject: the caller puts the solver's name before it.
        """
        # Checking each entry on its own takes three times as long.
        for entry in entries if set(map(type, entries)) - {int} else ():
            if as_integer(entry) is None:
                hint = " (a mask? return the indices)" if isinstance(entry, bool) else ""
                raise ProblemError(f"returned {entry!r} where {self.entry} indices are due{hint}")
        indices = sorted(map(operator.index, entries))
        for index in (*indices[:1], *indices[-1:]):
            if not 0 <= index < len(self):
                raise ProblemError(
                    f"returned index {index}, but the {self.entry}s are 0 to {len(self) - 1}"
                )
        if len(set(indices)) < len(indices):
            twice = next(index for index, following in pairwise(indices) if index == following)
            raise ProblemError(f"returned index {twice} twice")
        return tuple(indices)

    def measure(self, choice: tuple[int, ...]) -> dict[str, Any]:
        """Return what ``solution`` needs for a choice, such as value and weight, as keyword arguments.

        Raises:
            ProblemError: the choice cannot be carried out.
        """
        raise NotImplementedError

    def excess(self, figures: Mapping[str, Any]) -> str:
        """Return the part of an error message that says that an answer is too heavy, with the answer's bytes."""
        return f"an overweight {self.noun}: {figures[self.bytes_taken]} bytes"

    def limits(self) -> Limits:
        """Return a bound that no answer can beat, and the value or cost of an answer known to exist, if any."""
        return Limits(0)

    def refuse_infeasible(self) -> None:
        """Raise `BudgetError` if every answer provably exceeds the capacity."""

    def within(self: P, capacity: int | None) -> P:
        """Return a copy of this problem with another capacity in bytes; no other field is checked again."""
        return self._with(capacity=columns.capacity(self._label("capacity"), capacity))

    def with_hints(self: P, hints: Iterable[Sequence[int]]) -> P:
        """Return a copy of this problem with other ``hints``: answers from which a solver may start.

        The hints are not checked. A knapsack has no field ``hints`` and ignores them.
        """
        return self._with(hints=tuple(map(tuple, hints)))

    def _with(self: P, **changes: Any) -> P:
        # Skip `__post_init__`, because the unchanged fields are already checked.
        same = object.__new__(type(self))
        for f in fields(self):  # type: ignore[arg-type]
            object.__setattr__(same, f.name, changes.get(f.name, getattr(self, f.name)))
        return same

    def _label(self, name: str) -> str:
        """Return the name of an attribute for error messages, such as ``KnapsackProblem.weights``."""
        return f"{type(self).__name__}.{name}"

    def _check(self, check: Callable[..., Any], *names: str, **options: Any) -> None:
        """Replace each named attribute of this frozen instance by the value that ``check(label, value)`` returns."""
        for name in names:
            checked = check(self._label(name), getattr(self, name), **options)
            object.__setattr__(self, name, checked)


@dataclass(frozen=True, slots=True)
class KnapsackProblem(Problem[Solution]):
    """Pick items of the greatest total value whose total weight stays within the capacity.

    An item is a tensor of the joint graph that is expensive to recompute. An item's weight is the bytes that saving the
    item's tensor takes. An item's value is the recompute cost that saving the item's tensor avoids. Arguments may be
    any ordered iterables of integers, also of NumPy types, and are stored as tuples of ``int``. Every number, the sum
    of weights and the sum of values lie between 0 and 2**63 - 1.

    Args:
        weights: bytes that each item takes if saved.
        values: recompute cost that each item avoids if saved; one per weight.
        capacity: bytes that may be saved in total.

    Raises:
        ProblemError: an argument is invalid; the message names it, with the index.
    """

    kind: ClassVar[str] = "knapsack"
    method: ClassVar[str] = "solve"
    noun: ClassVar[str] = "choice"
    entry: ClassVar[str] = "item"
    solution: ClassVar[type[Solution]] = Solution
    objective: ClassVar[str] = "value"
    bytes_taken: ClassVar[str] = "weight"
    maximises: ClassVar[bool] = True

    weights: tuple[int, ...]
    values: tuple[int, ...]
    capacity: int

    def __post_init__(self) -> None:
        self._check(columns.amounts, "weights")
        self._check(columns.sequence, "values", length=len(self), each="weight")
        self._check(columns.amounts, "values")
        self._check(columns.integer, "capacity")

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def total_weight(self) -> int:
        """Weight of all items together."""
        return sum(self.weights)

    @property
    def total_value(self) -> int:
        """Value of all items together."""
        return sum(self.values)

    def weight_of(self, items: Iterable[int]) -> int:
        """Return the total weight of the items at the given indices."""
        return sum(map(self.weights.__getitem__, items))

    def value_of(self, items: Iterable[int]) -> int:
        """Return the total value of the items at the given indices."""
        return sum(map(self.values.__getitem__, items))

    def within(self, capacity: int | None) -> KnapsackProblem:
        """Return a knapsack of the same items with another capacity; None means the total weight of all items."""
        # Do not use `super()`: without arguments it fails in a dataclass with slots.
        return Problem.within(self, self.total_weight if capacity is None else capacity)

    def measure(self, choice: tuple[int, ...]) -> dict[str, Any]:
        value, weight = self.value_of(choice), self.weight_of(choice)
        return {"saved": choice, "value": value, "weight": weight}

    def relaxed(self) -> Relaxation:
        """Return an upper bound on the value, from the linear relaxation, and a greedy choice within the capacity."""
        return relax(self.weights, self.values, self.capacity)

    def repaired(self, picked: Iterable[int]) -> tuple[int, ...]:
        """Drop picked items that do not fit the capacity, and fill the remaining capacity greedily with items."""
        return repair(self.weights, self.values, self.capacity, picked)

    def limits(self) -> Limits:
        relaxed = self.relaxed()
        return Limits(relaxed.bound, relaxed.value)
