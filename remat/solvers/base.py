"""Define the base class of every solver, whether built in or from a plugin."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

from remat.solvers.graph.problem import GraphProblem
from remat.solvers.problem import KnapsackProblem, Problem
from remat.solvers.schedule.problem import ScheduleProblem
from remat.solvers.solution import Answer

AnyProblem = KnapsackProblem | GraphProblem | ScheduleProblem
#: Classes of the kinds of problems, in the order in which tables list the kinds.
KINDS: tuple[type[Problem[Any]], ...] = (KnapsackProblem, GraphProblem, ScheduleProblem)


class Solver:
    """Base class of all solvers, whether built in or from a plugin.

    A subclass sets `name` and defines at least one of ``solve``, ``solve_graph`` and
    ``solve_schedule``. Class attributes state what the solver can do, so that remat can list
    solvers without creating them. A subclass imports its back end, such as OR-Tools, inside its
    methods. Solvers keep no state between calls, so all instances of a class are equal. A subclass that is a
    dataclass may have options as fields; instances with equal options are equal.

    Attributes:
        name: the name under which users select the solver, in kebab-case.
        summary: one line for tables; the first line of the class docstring by default.
        exact: whether answers to knapsacks are optimal, unless an `Answer` itself says otherwise:
            its status is FEASIBLE, or its bound is above the value of its items.
        deterministic: whether the same problem gets the same answer in every process, unless an
            answer sets ``by_clock``.
        time_limit: whether the solver respects the argument ``time_limit``: it returns soon after
            that many seconds.
        integer_limit: the largest sum of weights, sum of values or capacity that the solver
            accepts. `refuses` rejects larger problems. None: the solver accepts up to 2**63 - 1.
        requires: names of the modules that the solver imports.
        extra: the argument of ``pip install`` that installs the modules in ``requires``, such as
            ``"my-package[highs]"``. By default, the missing module's top-level package.
        solves: the kinds of problems that the class has a method for: ``"knapsack"`` for ``solve``,
            ``"graph"`` for ``solve_graph``, ``"schedule"`` for ``solve_schedule``. Set when the
            class is created.
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
        # Do not use getattr: a subclass of another solver must not inherit that solver's summary.
        if "summary" not in cls.__dict__:
            cls.summary = (cls.__doc__ or "").strip().partition("\n")[0]

    def solve(
        self, problem: KnapsackProblem, *, time_limit: float | None = None
    ) -> Answer | Iterable[int]:
        """Choose items whose total weight stays within the capacity.

        A subclass may also use the signature ``solve(self, problem, **kwargs)``.

        Args:
            problem: the knapsack to solve.
            time_limit: seconds after which to return the best choice found so far. None: no clock.
                A solver that must stop early then limits its number of operations.

        Returns:
            Indices of the items to save, or an `Answer` with further claims such as a bound.
        """
        raise NotImplementedError(f"solver '{self.name}' does not solve knapsack problems")

    def solve_graph(
        self, problem: GraphProblem, *, time_limit: float | None = None
    ) -> Answer | Iterable[int]:
        """Choose nodes to save whose total bytes stay within the problem's capacity.

        A solver need not define ``solve_graph``. If a solver does not define ``solve_graph``, remat calls ``solve`` on
        knapsacks whose items are nodes. A minimum cut then turns the chosen items into saved nodes (see
        `remat.solvers.graph.completion`).

        Args:
            problem: the graph problem to solve; a capacity of None sets no limit.
            time_limit: seconds after which to return the best choice found so far; None: no clock.

        Returns:
            Positions of the nodes to save, or an `Answer` whose bound is a lower bound on the cost.
        """
        raise NotImplementedError(f"solver '{self.name}' does not solve graph problems")

    def solve_schedule(
        self, problem: ScheduleProblem, *, time_limit: float | None = None
    ) -> Answer | Iterable[int]:
        """Choose the order in which nodes run and which nodes run again.

        The peak memory of the schedule must stay within the problem's capacity. A solver need not define
        ``solve_schedule``. `remat.solvers.run.run` refuses schedule problems for a solver without ``solve_schedule``.

        Args:
            problem: the schedule problem to solve; a capacity of None sets no limit.
            time_limit: seconds after which to return the best schedule found so far; None: no
                clock.

        Returns:
            Nodes in the order in which they run, or a `ScheduleAnswer`, which may add a bound.

        Raises:
            remat.errors.BudgetError: no schedule within the capacity exists, or none was found.
        """
        raise NotImplementedError(f"solver '{self.name}' does not solve schedule problems")

    def refuses(self, problem: KnapsackProblem) -> str | None:
        """Return why the solver cannot solve a knapsack; None if it can.

        remat calls ``refuses`` before ``solve``. The default implementation refuses a knapsack if its sum of weights,
        sum of values or capacity exceeds the solver's ``integer_limit``.
        """
        limit = self.integer_limit
        if limit is None:
            return None
        numbers = {
            "the sum of the weights": problem.total_weight,
            "the sum of the values": problem.total_value,
            "the capacity": problem.capacity,
        }
        for label, number in numbers.items():
            if number > limit:
                return f"{label} is {number}, above the {limit} that it can hold"
        return None

    @classmethod
    def cannot_run(cls) -> str | None:
        """Return why the solver cannot run on this machine although its modules are installed; None if it can."""
        return None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self).__qualname__)

    def __repr__(self) -> str:
        return f"<solver '{self.name}'>"


def built_in(solver: Solver) -> bool:
    """Return whether a solver is remat's own, so that its bounds count as proven.

    A subclass that is defined outside `remat.solvers` is not built in. A solver that runs in its own process
    (`Isolated`) is built in if the solver inside is built in.
    """
    kind = type(solver)
    if kind.__module__ == "remat.solvers.isolation.process":  # `isolated` created this class
        inner = getattr(solver, "inner", None)
        return isinstance(inner, Solver) and built_in(inner)
    # A plugin can set `__module__` on its class, so check that the module really contains the class.
    ours = kind.__module__.startswith("remat.solvers.")
    return ours and getattr(sys.modules[kind.__module__], kind.__qualname__, None) is kind


def unavailable(solver: type[Solver]) -> str | None:
    """Return why a solver cannot run on this machine and how to install its modules; None if it can run.

    The modules in the solver's ``requires`` are looked up, but not imported.
    """
    fault = check_requires(solver)
    if fault is not None:  # an instance of a class that was never registered
        return fault
    for module in solver.requires:
        if not _exists(module):
            install = solver.extra or module.partition(".")[0]
            return f"module '{module}' is not installed: pip install '{install}'"
    return solver.cannot_run()


def check_requires(solver: type[Solver]) -> str | None:
    """Return why a solver's attribute ``requires`` is not a tuple of module names; None if it is."""
    requires: Any = solver.requires
    if isinstance(requires, (tuple, list)) and all(isinstance(m, str) for m in requires):
        return None
    return f"{solver.__qualname__}.requires must be a tuple of module names, got {requires!r}"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # No parent package, or a module in sys.modules without a spec.
        return False
