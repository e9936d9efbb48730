"""Base of the problems for solvers, and the first of three kinds: the 0/1 knapsack problem, in plain integers.

Kinds of problems differ in data: the solver's method, how its answer is read, what an answer takes
and comes to, and the bound that holds without a search. `remat.solvers.run.run` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from remat.errors import ProblemError
from remat.solvers import columns
from remat.solvers.bounds import relax
from remat.solvers.columns import as_integer
from remat.solvers.solution import Answer, Checked, ScheduleAnswer, Solution

S = TypeVar("S", bound=Checked)
"""The checked answer to a kind of problem."""
P = TypeVar("P", bound="Problem[Any]")


class Limits(NamedTuple):
    """Bounds on every answer to a problem, known without a search.

    Attributes:
        bound: no answer is better.
        reachable: some answer is as good; None where none is known.
    """

    bound: int
    reachable: int | None = None


class Problem(Generic[S]):
    """Base of the kinds of problems.

    Attributes:
        kind: what files and tables call the kind.
        method: a solver's method for it.
        answer: what the method may return when a bare choice does not say enough.
        expected: what it has to return, for messages.
        solution: what a checked answer becomes.
        objective: what is optimised, a figure of the solution.
        bytes_taken: what counts against the capacity, likewise.
        bound_text: what a bound says, followed by it.
        own_text: what the solver's own answer comes to, likewise.
        maximises: more of it is better.
        by_capabilities: the solver's ``refuses`` and ``exact`` are about this kind.
    """

    __slots__ = ()

    kind: ClassVar[str]
    method: ClassVar[str]
    answer: ClassVar[type[Answer] | type[ScheduleAnswer]] = Answer
    expected: ClassVar[str]
    solution: ClassVar[type[Checked]]
    objective: ClassVar[str] = "cost"
    bytes_taken: ClassVar[str]
    bound_text: ClassVar[str]
    own_text: ClassVar[str]
    maximises: ClassVar[bool] = False
    by_capabilities: ClassVar[bool] = False

    capacity: int | None

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def most_entries(self) -> int:
        """Entries that an answer may have; more are not read, as some iterables never end."""
        return len(self)

    def read(self, entries: list[Any]) -> tuple[int, ...]:
        """The choice that a solver returned, as ints.

        Raises:
            ProblemError: it cannot be meant; the message goes on from the solver's name.
        """
        raise NotImplementedError

    def measure(self, choice: tuple[int, ...]) -> dict[str, Any]:
        """The figures of the solution that a choice makes, recomputed.

        Raises:
            ProblemError: it cannot be done; the message goes on from the solver's name.
        """
        raise NotImplementedError

    def excess(self, figures: Mapping[str, Any]) -> str:
        """Describe an answer above the capacity, with its bytes."""
        raise NotImplementedError

    def limits(self) -> Limits:
        """What holds for every answer."""
        raise NotImplementedError

    def refuse_infeasible(self) -> None:
        """Raise a `BudgetError` if no answer can be within the capacity."""

    def within(self: P, capacity: int | None) -> P:
        """The same problem under another capacity, in bytes; nothing else is checked again."""
        label = f"{type(self).__name__}.capacity"
        return self._with(capacity=columns.capacity(label, capacity))

    def _with(self: P, **changes: Any) -> P:
        same = object.__new__(type(self))
        for f in fields(self):  # type: ignore[arg-type]
            object.__setattr__(same, f.name, changes.get(f.name, getattr(self, f.name)))
        return same

    def _put(self, **checked: Any) -> None:
        """Set columns once they are checked."""
        for label, value in checked.items():
            object.__setattr__(self, label, value)


def read_indices(entries: list[Any], count: int, what: str) -> tuple[int, ...]:
    """Different positions below a count, sorted; `Problem.read` of items and of nodes."""
    if entries and set(map(type, entries)) == {int}:  # the loop below costs three times as much
        entries.sort()
        if entries[0] >= 0 and entries[-1] < count and len(set(entries)) == len(entries):
            return tuple(entries)
    found = []
    for entry in entries:
        index = as_integer(entry)
        if index is None:
            article = "an" if what == "item" else "a"
            hint = " (a mask? return the indices)" if isinstance(entry, bool) else ""
            raise ProblemError(f"returned {entry!r} where {article} {what} index is due{hint}")
        if not 0 <= index < count:
            raise ProblemError(f"returned index {index}, but the {what}s are 0 to {count - 1}")
        found.append(index)
    found.sort()
    for index, following in pairwise(found):
        if index == following:
            raise ProblemError(f"returned index {index} twice")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class KnapsackProblem(Problem[Solution]):
    """Pick items of the greatest total value whose total weight stays within the capacity.

    An item is an expensive candidate of a joint graph. Its weight is the bytes that saving it takes, its
    value the recompute cost that saving it avoids. Arguments may be any ordered iterables of integers,
    NumPy's included; they are kept as tuples of ``int``. Every number and both sums lie between 0 and
    2**63 - 1.

    Args:
        weights: bytes each item takes if saved.
        values: recompute cost each item avoids if saved; one per weight.
        capacity: bytes that may be saved in total.

    Raises:
        ProblemError: an argument is not what it must be; the message names it, with the index.
    """

    kind: ClassVar[str] = "knapsack"
    method: ClassVar[str] = "solve"
    expected: ClassVar[str] = (
        "indices are due: return an iterable of item indices, or Answer(saved, bound)"
    )
    solution: ClassVar[type[Solution]] = Solution
    objective: ClassVar[str] = "value"
    bytes_taken: ClassVar[str] = "weight"
    bound_text: ClassVar[str] = "no choice is worth more than"
    own_text: ClassVar[str] = "its own items are worth"
    maximises: ClassVar[bool] = True
    by_capabilities: ClassVar[bool] = True

    weights: tuple[int, ...]
    values: tuple[int, ...]
    capacity: int

    def __post_init__(self) -> None:
        weights = columns.amounts("KnapsackProblem.weights", self.weights)
        label = "KnapsackProblem.values"
        values = columns.sequence(label, self.values, len(weights), each="weight")
        self._put(
            weights=weights,
            values=columns.amounts(label, values),
            capacity=columns.integer("KnapsackProblem.capacity", self.capacity),
        )

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def total_weight(self) -> int:
        """The weight of all items together."""
        return sum(self.weights)

    @property
    def total_value(self) -> int:
        """The value of all items together."""
        return sum(self.values)

    def weight_of(self, items: Iterable[int]) -> int:
        """The weight of the items at the given indices."""
        return sum(map(self.weights.__getitem__, items))

    def value_of(self, items: Iterable[int]) -> int:
        """The value of the items at the given indices."""
        return sum(map(self.values.__getitem__, items))

    def within(self, capacity: int | None) -> KnapsackProblem:
        """The same items under another capacity; None: room for all."""
        return Problem.within(self, self.total_weight if capacity is None else capacity)

    def read(self, entries: list[Any]) -> tuple[int, ...]:
        return read_indices(entries, len(self), "item")

    def measure(self, choice: tuple[int, ...]) -> dict[str, Any]:
        value, weight = self.value_of(choice), self.weight_of(choice)
        return {"saved": choice, "value": value, "weight": weight}

    def excess(self, figures: Mapping[str, Any]) -> str:
        return f"an overweight choice: {figures['weight']}"

    def limits(self) -> Limits:
        relaxed = relax(self)
        return Limits(relaxed.bound, relaxed.value)
