"""Plans for eager code: the modules to checkpoint, and the operators whose results each module stores."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from remat.errors import ProblemError
from remat.files import Form, Record, check_figures
from remat.graph.ops import is_known
from remat.graph.purity import name_of
from remat.graph.text.literals import read_target
from remat.units import columns, format_bytes, some_of

#: Largest number of operator names in a row of `SACPlan.explain`.
_NAMED = 4


#: Attributes of `ModulePlan`, then of `SACPlan`, whose values must be at least 0 and less than 2**100.
_OF_MODULE = ("stored_bytes", "discarded_bytes", "recompute_ms")
_OF_STEP = (
    "budget_bytes", "peak_bytes", "plain_peak_bytes", "recompute_ms", "step_ms", "bound_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """Plan of one checkpointed module: the operators whose results are stored, with bytes and recompute time.

    Attributes:
        name: qualified name of the module, as in ``model.named_modules()``.
        ops: names of the module's operators, such as ``"aten.mm.default"``, in run order, without
            operators that checkpointing ignores.
        stored: positions in ``ops`` of the operators whose results are stored. All others are recomputed.
        stored_bytes: bytes of the stored results.
        discarded_bytes: bytes of the results that are not stored.
        recompute_ms: milliseconds that recomputation takes for each call of the module.
    """

    name: str
    ops: tuple[str, ...]
    stored: tuple[int, ...]
    stored_bytes: int
    discarded_bytes: int
    recompute_ms: float

    def __post_init__(self) -> None:
        if list(self.stored) != sorted(set(self.stored)) or any(
            not 0 <= i < len(self.ops) for i in self.stored
        ):
            raise ProblemError(
                f"module '{self.name}': stored must be increasing indices of its {len(self.ops)} "
                f"operators, got {list(self.stored)[:8]}"
            )
        check_figures(self, _OF_MODULE, f"module '{self.name}': ")


@dataclass(frozen=True, slots=True, kw_only=True)
class SACPlan(Record):
    """Plan of an eager training step: its checkpointed modules, and estimates for the step.

    Attributes:
        modules: plans of the checkpointed modules, in the order in which they run.
        budget_bytes: budget for the step's peak.
        peak_bytes: estimated peak of the step under this plan.
        plain_peak_bytes: estimated peak of the step without checkpointing.
        recompute_ms: estimated milliseconds of recomputation in the step.
        step_ms: estimated milliseconds of the step without recomputation.
        bound_ms: proven lower bound on ``recompute_ms`` for all plans that fit the budget and take
            each module's stored results from the same candidate sets as this plan.
        world_size: number of ranks over which parameters and gradients are sharded.
        solver: name of the solver; empty for a plan made by hand.
        mode: name of the mode in which runtimes were estimated.
    """

    form: ClassVar[Form] = Form("checkpointing plan", "remat_sac_plan", 1)

    modules: tuple[ModulePlan, ...]
    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    recompute_ms: float
    step_ms: float
    bound_ms: float
    world_size: int = 1
    solver: str = ""
    mode: str = ""

    def __post_init__(self) -> None:
        check_figures(self, _OF_STEP)
        if self.world_size < 1:
            raise ProblemError(f"world_size is {self.world_size}, expected 1 or more ranks")

    def __getitem__(self, name: str) -> ModulePlan:
        """Return the plan of one module by name; raise a ProblemError if the plan has no such module."""
        for module in self.modules:
            if module.name == name:
                return module
        names = ", ".join(m.name for m in self.modules) or "none"
        raise ProblemError(f"module '{name}' is not checkpointed by this plan; it does: {names}")

    def __str__(self) -> str:
        """Return the text of `explain`."""
        return self.explain()

    def explain(self) -> str:
        """Return the plan as text: peak and times of the step, and bytes and times of each module."""
        fits = "" if self.peak_bytes <= self.budget_bytes else ", more than the budget,"
        decided = ", ".join(x for x in (self.solver, self.mode) if x) or "hand"
        lines = [
            f"checkpointing plan for a budget of {format_bytes(self.budget_bytes)}",
            f"  peak        {format_bytes(self.peak_bytes)}{fits} instead of "
            f"{format_bytes(self.plain_peak_bytes)} without checkpointing",
        ]
        if self.step_ms:
            overhead = self.recompute_ms / self.step_ms
            lines.append(
                f"  step        {self.step_ms + self.recompute_ms:.4g} ms estimated, {overhead:.1%} more than the "
                f"{self.step_ms:.4g} ms without checkpointing"
            )
        lines += [
            f"  recomputed  {self.recompute_ms:.4g} ms; no plan that fits needs less than "
            f"{self.bound_ms:.4g} ms",
            f"  decided by  {decided}"
            + (f", over {self.world_size} ranks" if self.world_size > 1 else ""),
        ]
        if not self.modules:
            return "\n".join([*lines, "  no module is checkpointed"])
        rows = [("modules", "keep", "free", "again", "stored operators")]
        groups = _groups(self)
        rows += [_row(m, names) for m, names in groups.items()]
        lines += [f"  {line}" for line in columns(rows, left=(0, 4))]
        if any(len(names) > 1 for names in groups.values()):
            lines.append("  (of modules that are alike, the figures are those of each)")
        stored = operators_named(m.ops[i] for m in groups for i in m.stored)
        undeclared = list(dict.fromkeys(name_of(op) for op in stored if not is_known(op)))
        if undeclared:
            lines.append(
                f"  {', '.join(undeclared)}: stored, with what draws random numbers beside it, since not "
                "declared pure. What gives the same result for the same inputs may run again once that is "
                f'said: remat.declare_pure("{undeclared[0]}")'
            )
        return "\n".join(lines)


def _groups(plan: SACPlan) -> dict[ModulePlan, list[str]]:
    """Return a dict from each distinct module plan, with an empty name, to the names of modules that have this plan."""
    groups: dict[ModulePlan, list[str]] = {}
    for m in plan.modules:
        groups.setdefault(replace(m, name=""), []).append(m.name)
    return groups


def operators_named(names: Iterable[str]) -> Iterator[Any]:
    """Yield the operator for each distinct name; leave out names of custom operators that are not registered."""
    for name in dict.fromkeys(names):
        with contextlib.suppress(ProblemError):
            yield read_target(name)


def _row(m: ModulePlan, names: list[str]) -> tuple[str, str, str, str, str]:
    """Return the cells of one row of `SACPlan.explain`, for modules with the same plan."""
    label = repr(names[0]) if len(names) == 1 else f"'{names[0]}' … '{names[-1]}' ({len(names)})"
    count = Counter(m.ops[i] for i in m.stored).most_common()
    listed = some_of([f"{n} {op}" if n > 1 else op for op, n in count], _NAMED)
    stored = f"{len(m.stored)} of {len(m.ops)}: {listed or 'plain checkpointing'}"
    sizes = format_bytes(m.stored_bytes), format_bytes(m.discarded_bytes)
    return label, *sizes, f"{m.recompute_ms:.4g} ms", stored
