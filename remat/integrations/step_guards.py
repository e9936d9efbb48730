"""Check that a compiled step meets its budget in bytes at the sizes of each run.

Upper bounds of the step's bytes give the largest sizes that meet the budget. A guard makes Dynamo recompile for larger
sizes. Sizes that no guard can bound are checked when the step runs, and so are all sizes of a step that exceeds its
budget.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.errors import BudgetWarning, LastWarning, PlanError, warn
from remat.integrations.step_sizes import LARGEST, RunSizes, Size, SizedBytes
from remat.planning.plan import Plan
from remat.units import Budget, format_apart, format_bytes

#: Type of a callback to call after each run of a step. The callback gets the arguments of the run, and the node of
#: autograd's graph that will run backward.
Look = Callable[[Sequence[Any], Any], None]


def guard_sizes(
    example_inputs: Sequence[Any],
    plan: Plan,
    budget: Budget,
    last_warning: LastWarning,
    *,
    saved: Plan | None,
    watched: bool,
) -> Look | None:
    """Make Dynamo recompile a step for sizes at which its plan may exceed a budget in bytes.

    The function adds guards for the sizes of the traced inputs. A tracer without guards, such as
    ``aot_function``, does not recompile. If a size can be neither bounded by a guard nor checked
    when the step runs, the function warns.

    Args:
        example_inputs: inputs that the step was traced with.
        plan: the step's plan, with the memory of the compiled code if that is known.
        budget: the step's budget, which the plan may exceed.
        last_warning: the bytes that warnings about this step have named.
        saved: the saved plan that was applied to the step, which no new plan may replace; None if a new plan was made.
        watched: whether the returned callback will be called after each run.

    Returns:
        A callback that checks the sizes that no guard can bound. None if no such check is needed,
        or if ``watched`` is False.

    Raises:
        PlanError: a saved plan exceeds its budget in bytes at the traced sizes.
    """
    limit = budget.peak_bytes or budget.nbytes
    if limit is None or not (plan.symbolic or plan.learns_sizes):
        return None
    bytes_at = SizedBytes(plan)
    if saved is not None and budget.on_peak:
        # A saved plan from a set meets the budget together with the set's other graphs. A graph alone keeps its outputs
        # alive to its end, so the peak of one graph alone may exceed the budget.
        limit = max(limit, saved.peak_bytes)
    if saved is not None and bytes_at.taken > limit:
        raise PlanError(
            f"the saved plan for '{plan.graph}' was made under the budget {budget.label}, and takes "
            f"{format_bytes(bytes_at.taken)} ({bytes_at.taken} bytes) at these sizes; expected sizes at which it "
            f"takes at most {limit} bytes. Plan again at the largest sizes, or under a ratio, which grows with them"
        )
    most = limit  # bytes from which on Dynamo recompiles the step
    if bytes_at.taken > limit:
        last_warning.nbytes = max(last_warning.nbytes, bytes_at.taken)  # compilation has warned
        # A plan for other sizes may meet the budget. Dynamo compiles a function eight times at most, so the bytes of
        # a step that is checked when it runs double before it is compiled again.
        most = 2 * bytes_at.taken if watched else last_warning.quiet
    of_run = RunSizes(plan, example_inputs, bytes_at.symbols)
    # No guard may bound a data-dependent or a declared size: the guard would raise instead of causing a recompilation.
    sizes = [*of_run.planned.values()]
    given = {s.name: (s.least, s.most) for s in sizes}
    fixed: dict[str, tuple[int, int | None]] = {
        s.name: (s.least, s.number) for s in sizes if s.place is None or s.declared
    }
    free = {s.name: s for s in sizes if s.name not in fixed}
    if bytes_at(given) <= limit:
        return None
    # If the budget holds for every value of the sizes that no guard bounds, guards on the other sizes suffice.
    widest = {name: given[name] for name in fixed}
    if bytes_at({**widest, **{n: (s.least, s.number) for n, s in free.items()}}) <= most:
        fixed = widest
    for name, largest in _largest(bytes_at, most, free, fixed).items():
        torch._check(free[name].read(example_inputs) <= largest)  # type: ignore[no-untyped-call]  # adds the guard
        given[name] = free[name].least, largest
    if bytes_at(given) <= max(limit, last_warning.quiet):
        return None
    look = _SizeCheck(plan.graph, bytes_at, budget, limit, last_warning, of_run, fixed)
    if watched and not of_run.unseen:
        return look
    warn(
        f"'{plan.graph}' {'holds' if most == limit else 'exceeds'} its budget {budget.label} for {look.shown()}. The step "
        "takes more at larger sizes, which depend on the data and are not checked as it runs. Keep them smaller, or "
        "give a smaller budget",
        BudgetWarning,
    )
    return look if watched else None


@dataclass(slots=True, eq=False)
class _SizeCheck:
    """Callback that warns if a step exceeds its budget in bytes at the sizes of a run."""

    graph: str
    bytes_at: SizedBytes
    budget: Budget
    limit: int
    last_warning: LastWarning
    sizes: RunSizes
    unbounded: Collection[str]
    _within: dict[str, int] = field(default_factory=dict)  # sizes up to which no warning is due

    def __call__(self, arguments: Sequence[Any], node: Any) -> None:
        """Warn if the step exceeds its budget in bytes at the sizes of a finished run."""
        seen = self.sizes.read(arguments, node)
        if all(number <= self._within.get(name, -1) for name, number in seen.items()):
            return
        most = max(self.limit, self.last_warning.quiet)
        # If no warning is due at twice the sizes of this run, later runs up to twice these sizes need no sum of bytes.
        for times in (2, 1):
            upto = {name: times * number for name, number in seen.items()}
            within = {n: (self.sizes.planned[n].least, k) for n, k in upto.items()}
            if self.bytes_at(within) <= most:
                self._within = upto
                return
        taken = self.bytes_at({n: (k, k) for n, k in seen.items()})
        if taken > most:
            self.last_warning.nbytes = taken
            self._warn(taken, seen)

    def _warn(self, taken: int, seen: Mapping[str, int]) -> None:
        """Warn that the step exceeds its budget, and suggest a smaller budget if the plan was within the budget."""
        more, most = format_apart(taken, self.limit)
        remedy, peak = "Raise the budget", self.budget.on_peak
        if self.bytes_at.taken <= self.limit:
            less = self.limit * self.bytes_at.taken // taken
            instead = Budget(peak_bytes=less) if peak else Budget(nbytes=less)
            remedy = f"budget='{instead}' makes up for it"
        warn(
            f"'{self.graph}' {'has a peak of' if peak else 'keeps'} {more} ({taken} bytes) at {self.shown(seen)}, above "
            f"the {most} ({self.limit} bytes) of its budget {self.budget.label}. It was planned for {self.shown()}. "
            f"{remedy}; or keep these sizes smaller. {LastWarning.NEXT}",
            BudgetWarning,
        )

    def shown(self, numbers: Mapping[str, int] | None = None) -> str:
        """Return a text that lists sizes that no guard bounds, with values from ``numbers`` or else from the plan."""
        planned = self.sizes.planned
        shown = [n for n in planned if n in self.unbounded] or [*planned]
        values = {n: planned[n].number for n in shown} if numbers is None else numbers
        return ", ".join(f"{planned[n].source or n} = {values[n]}" for n in shown)


def _largest(
    bytes_at: SizedBytes,
    limit: int,
    free: Mapping[str, Size],
    fixed: Mapping[str, tuple[int, int | None]],
) -> dict[str, int]:
    """Return the largest values of the symbols in ``free`` at which a step still meets its budget."""

    def upto(times: float) -> dict[str, int]:
        grown = {n: int(size.number * times) for n, size in free.items()}
        return {n: min(most, free[n].most or most) for n, most in grown.items()}

    def holds(most: Mapping[str, int | None]) -> bool:
        ranges = {n: (min(free[n].least, free[n].number), most[n]) for n in free}
        return bytes_at({**fixed, **ranges}) <= limit

    # All free sizes grow by one common factor, a multiple of 1/1024.
    above = bisect_left(range(LARGEST), True, lo=1025, key=lambda k: not holds(upto(k / 1024)))
    largest: dict[str, int | None] = {**upto((above - 1) / 1024)}
    for name in free:
        if holds({**largest, name: free[name].most}):
            largest[name] = None
    return {name: most for name, most in largest.items() if most is not None}
