"""The class that every solver derives from, ours and anyone's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

from remat.solvers.graph_problem import GraphProblem
from remat.solvers.problem import KnapsackProblem, Problem
from remat.solvers.schedule_problem import ScheduleProblem
from remat.solvers.solution import Answer, ScheduleAnswer

AnyProblem = KnapsackProblem | GraphProblem | ScheduleProblem
#: The kinds of problems, in the order of tables.
KINDS: tuple[type[Problem[Any]], ...] = (KnapsackProblem, GraphProblem, ScheduleProblem)


class Solver:
    """Base class of solvers. A subclass sets `name` and defines one method.

    Capabilities are class data, so that a table of solvers can be drawn without running or
    importing any back end; import the back end inside ``solve``. Solvers hold no run state: their
    instances are interchangeable and compare equal by class.

    Attributes:
        name: the name to ask for it by, kebab-case.
        summary: one line for tables; the docstring's first line if not given.
        exact: its answers are optimal, unless an `Answer` says otherwise.
        deterministic: the same problem gets the same answer in every process, unless an answer
            says that a clock decided.
        time_limit: it returns soon after the time limit that it is given.
        integer_limit: the largest sum of weights, sum of values or capacity that it can hold; larger
            problems are refused. None: whatever a problem can hold.
        requires: importable modules that it needs.
        extra: what to ``pip install`` for them, such as ``"my-package[highs]"``; the missing
            module's own name if not given.
        solves: the kinds of problems that it has a method for: ``"knapsack"`` where it has ``solve``,
            ``"graph"`` where it has ``solve_graph``, ``"schedule"`` where it has ``solve_schedule``. Set
            when the class is made.
    """

    __slots__ = ()

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    exact: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True
    time_limit: ClassVar[bool] = True
    integer_limit: ClassVar[int | None] = None
    requires: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str | None] = None
    solves: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.solves = frozenset(
            kind.kind
            for kind in KINDS
            if getattr(cls, kind.method) is not getattr(Solver, kind.method)
        )
        if "summary" not in cls.__dict__:
            cls.summary = (cls.__doc__ or "").strip().partition("\n")[0]

    def solve(
        self, problem: KnapsackProblem, *, time_limit: float | None = None
    ) -> Answer | Iterable[int]:
        """Choose items whose weight stays within the capacity.

        ``solve(self, problem, **kwargs)`` is a legal signature too.

        Args:
            problem: what to solve.
            time_limit: seconds after which to return the best found so far; None: no clock, so
                a search that must end counts its work.

        Returns:
            Indices of the items to save, or an `Answer` that says more.
        """
        raise NotImplementedError(f"solver '{self.name}' does not solve knapsack problems")

    def solve_graph(
        self, problem: GraphProblem, *, time_limit: float | None = None
    ) -> Answer | Iterable[int]:
        """Choose nodes whose bytes stay within the problem's capacity; optional.

        A solver without it still plays on graphs: the nodes become items of a knapsack, and a
        minimum cut completes what it picks.

        Args:
            problem: what to solve; a capacity of None allows everything.
            time_limit: as for ``solve``.

        Returns:
            Positions of the nodes to save, or an `Answer` whose bound is a lower bound on the cost.
        """
        raise NotImplementedError(f"solver '{self.name}' does not solve graph problems")

    def solve_schedule(
        self, problem: ScheduleProblem, *, time_limit: float | None = None
    ) -> ScheduleAnswer | Iterable[int]:
        """Choose the order in which nodes run, and what runs again, within the capacity; optional.

        Args:
            problem: what to solve; a capacity of None allows everything.
            time_limit: as for ``solve``.

        Returns:
            Nodes in the order in which they run, or a `ScheduleAnswer` that has a bound too.

        Raises:
            remat.errors.BudgetError: no schedule within the capacity exists, or was found.
        """
        raise NotImplementedError(f"solver '{self.name}' does not solve step problems")

    def refuses(self, problem: KnapsackProblem) -> str | None:
        """Return why the solver does not take this problem, or None. Called before ``solve``.

        By default it refuses what exceeds ``integer_limit``.
        """
        limit = self.integer_limit
        if limit is None:
            return None
        numbers = {
            "the sum of the weights": problem.total_weight,
            "the sum of the values": problem.total_value,
            "the capacity": problem.capacity,
        }
        for what, number in numbers.items():
            if number > limit:
                return f"{what} is {number}, above the {limit} that it can hold"
        return None

    @classmethod
    def cannot_run(cls) -> str | None:
        """Return why this solver cannot run here although its modules exist, or None."""
        return None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self).__qualname__)

    def __repr__(self) -> str:
        return f"<solver '{self.name}'>"


def built_in(solver: Solver) -> bool:
    """Whether a solver is remat's own, so that its bounds are taken as proven.

    A class elsewhere that derives from one of ours is not; one of ours in a process of its own is.
    """
    kind = type(solver)
    if kind.__module__ == "remat.solvers.isolation":  # made by `isolated` around another
        inner = getattr(solver, "inner", None)
        return isinstance(inner, Solver) and built_in(inner)
    ours = kind.__module__.startswith("remat.solvers.")
    return ours and getattr(sys.modules[kind.__module__], kind.__qualname__, None) is kind


def unavailable(solver: type[Solver]) -> str | None:
    """Return why a solver cannot run here and what to install, or None if it can.

    Looks for the modules it requires without importing them.
    """
    for module in solver.requires:
        if not _exists(module):
            install = solver.extra or module.partition(".")[0]
            return f"module '{module}' is not installed: pip install '{install}'"
    return solver.cannot_run()


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no parent package; a stub in sys.modules without a spec
        return False
