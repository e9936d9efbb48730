"""Plans for eager code: which modules are checkpointed, and which of their operators are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from remat.errors import ProblemError
from remat.files import Form, Record
from remat.graph.ops import is_known
from remat.graph.purity import name_of
from remat.graph.text.literals import read_target
from remat.units import format_bytes

#: Operators that are listed by name, most frequent first.
_NAMED = 4


#: Figures that are no less than 0, and less than what a float can hold.
_OF_MODULE = ("stored_bytes", "discarded_bytes", "recompute_ms")
_OF_STEP = (
    "budget_bytes", "peak_bytes", "plain_peak_bytes", "recompute_ms", "step_ms", "bound_ms",
)  # fmt: skip
_TOO_LARGE = 2**100


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """One checkpointed module.

    Attributes:
        name: its fully qualified name, as in ``model.named_modules()``.
        ops: names of its operators in the order in which they run, ``"aten.mm.default"``; those
            that checkpointing ignores are left out.
        stored: indices of the operators whose results are stored; all others run again.
        stored_bytes: bytes of those results.
        discarded_bytes: bytes of the other results.
        recompute_ms: milliseconds that the others take.
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
        _check_figures(self, _OF_MODULE, f"module '{self.name}': ")


@dataclass(frozen=True, slots=True, kw_only=True)
class SACPlan(Record):
    """What an eager training step recomputes, module by module.

    Attributes:
        modules: the checkpointed modules, in the order in which they run.
        budget_bytes: bytes that the step was to fit into.
        peak_bytes: estimated peak of the step under this plan.
        plain_peak_bytes: estimated peak without checkpointing.
        recompute_ms: estimated milliseconds of recomputation.
        step_ms: estimated milliseconds of the step without recomputation.
        bound_ms: no plan that fits, of the choices that the modules offer, takes less.
        world_size: over how many ranks parameters and gradients are sharded.
        solver: who decided.
        mode: how runtimes were estimated.
    """

    form: ClassVar[Form] = Form(
        "checkpointing plan",
        "remat_sac_plan",
        1,
        dropped=(("offloaded", "is gone: offload by torch.autograd.graph.save_on_cpu"),),
    )

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
        _check_figures(self, _OF_STEP)
        if self.world_size < 1:
            raise ProblemError(f"world_size is {self.world_size}, expected 1 or more ranks")

    def __getitem__(self, name: str) -> ModulePlan:
        """The plan of one module.

        Raises:
            ProblemError: the module is not checkpointed.
        """
        for module in self.modules:
            if module.name == name:
                return module
        known = ", ".join(m.name for m in self.modules) or "none"
        raise ProblemError(f"module '{name}' is not checkpointed by this plan; it does: {known}")

    def explain(self) -> str:
        """The plan as text: its figures, and what each module keeps, frees and computes again.

        Modules that are alike are one row.
        """
        return _explain(self)


def _check_figures(plan: ModulePlan | SACPlan, names: Iterable[str], where: str = "") -> None:
    """Refuses figures that none can be, as an edited file may have them; NaN among them."""
    for name in names:
        value = getattr(plan, name)
        if not 0 <= value < _TOO_LARGE:
            raise ProblemError(
                f"{where}{name} is {value}, expected 0 or more, and less than 2**100"
            )


def _alike(plan: SACPlan) -> dict[ModulePlan, list[str]]:
    """Names of the modules that are alike, by what is planned for them, in the order of their first."""
    found: dict[ModulePlan, list[str]] = {}
    for m in plan.modules:
        found.setdefault(replace(m, name=""), []).append(m.name)
    return found


def _explain(plan: SACPlan) -> str:
    """The figures of a plan, and a line for each kind of module."""
    fits = "" if plan.peak_bytes <= plan.budget_bytes else ", more than the budget,"
    decided = ", ".join(x for x in (plan.solver, plan.mode) if x) or "hand"
    lines = [
        f"checkpointing plan for a budget of {format_bytes(plan.budget_bytes)}",
        f"  peak        {format_bytes(plan.peak_bytes)}{fits} instead of "
        f"{format_bytes(plan.plain_peak_bytes)} without checkpointing",
        *_step(plan),
        f"  recomputed  {plan.recompute_ms:.4g} ms; no plan that fits needs less than "
        f"{plan.bound_ms:.4g} ms",
        f"  decided by  {decided}"
        + (f", over {plan.world_size} ranks" if plan.world_size > 1 else ""),
    ]
    if not plan.modules:
        return "\n".join([*lines, "  no module is checkpointed"])
    rows = [("modules", "keep", "free", "again", "stored operators")]
    alike = _alike(plan)
    rows += [_row(m, names) for m, names in alike.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for name, keep, free, again, stored in rows:
        lines.append(
            f"  {name:<{widths[0]}}  {keep:>{widths[1]}}  {free:>{widths[2]}}  "
            f"{again:>{widths[3]}}  {stored}"
        )
    if any(len(names) > 1 for names in alike.values()):
        lines.append("  (of modules that are alike, the figures are those of each)")
    undeclared = list(dict.fromkeys(_undeclared(alike)))
    if undeclared:
        lines.append(
            f"  {', '.join(undeclared)}: stored, with what draws random numbers beside it, since not "
            "declared pure. What gives the same result for the same inputs may run again once that is "
            f'said: remat.declare_pure("{undeclared[0]}")'
        )
    return "\n".join(lines)


def _step(plan: SACPlan) -> list[str]:
    """The line of the estimated step; none where its time is not known."""
    if not plan.step_ms:
        return []
    more = plan.recompute_ms / plan.step_ms
    return [
        f"  step        {plan.step_ms + plan.recompute_ms:.4g} ms estimated, {more:.1%} more than the "
        f"{plan.step_ms:.4g} ms without checkpointing"
    ]


def _undeclared(modules: Iterable[ModulePlan]) -> Iterator[str]:
    """Names of stored operators that are not known to be functions of their inputs."""
    for m in modules:
        for name in dict.fromkeys(m.ops[i] for i in m.stored):
            try:
                op = read_target(name)
            except LookupError:  # a plan that was read where its operators are not registered
                continue
            if not is_known(op):
                yield name_of(op)


def _row(m: ModulePlan, names: list[str]) -> tuple[str, str, str, str, str]:
    shown = repr(names[0]) if len(names) == 1 else f"'{names[0]}' … '{names[-1]}' ({len(names)})"
    count = Counter(m.ops[i] for i in m.stored).most_common()
    listed = [f"{n} {op}" if n > 1 else op for op, n in count[:_NAMED]]
    if len(count) > _NAMED:
        listed.append(f"{len(count) - _NAMED} more")
    stored = f"{len(m.stored)} of {len(m.ops)}: " + (", ".join(listed) or "plain checkpointing")
    sizes = format_bytes(m.stored_bytes), format_bytes(m.discarded_bytes)
    return shown, *sizes, f"{m.recompute_ms:.4g} ms", stored
