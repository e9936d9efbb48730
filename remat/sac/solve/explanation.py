"""A checkpointing plan for people: as a table, and as code to paste."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from remat.graph.budget import format_bytes

if TYPE_CHECKING:
    from remat.sac.solve.plan import ModulePlan, SACPlan

#: Operators that are listed by name, most frequent first.
_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Modules that are alike but for their names."""

    first: ModulePlan
    names: list[str]


def _kinds(plan: SACPlan) -> list[_Kind]:
    """The modules, those that are alike as one, in the order of their first."""
    kinds: dict[tuple[object, ...], _Kind] = {}
    for m in plan.modules:
        rest = tuple(getattr(m, f.name) for f in fields(m) if f.name != "name")
        kinds.setdefault(rest, _Kind(first=m, names=[])).names.append(m.name)
    return list(kinds.values())


def explain(plan: SACPlan) -> str:
    """The figures of a plan, and a line for each kind of module."""
    fits = "" if plan.peak_bytes <= plan.budget_bytes else ", more than the budget"
    share = f" ({plan.recompute_ms / plan.step_ms:.1%} of the step)" if plan.step_ms else ""
    decided = ", ".join(x for x in (plan.solver, plan.mode) if x) or "hand"
    lines = [
        f"checkpointing plan for a budget of {format_bytes(plan.budget_bytes)}",
        f"  peak        {format_bytes(plan.peak_bytes)}{fits}; without checkpointing "
        f"{format_bytes(plan.plain_peak_bytes)}",
        f"  recomputed  {plan.recompute_ms:.4g} ms{share}; no plan that fits needs less than "
        f"{plan.bound_ms:.4g} ms",
        f"  decided by  {decided}"
        + (f", over {plan.world_size} ranks" if plan.world_size > 1 else ""),
    ]
    if not plan.modules:
        return "\n".join([*lines, "  no module is checkpointed"])
    rows = [("modules", "keep", "free", "again", "stored operators")]
    rows += [_row(kind) for kind in _kinds(plan)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for name, keep, free, again, stored in rows:
        lines.append(
            f"  {name:<{widths[0]}}  {keep:>{widths[1]}}  {free:>{widths[2]}}  "
            f"{again:>{widths[3]}}  {stored}"
        )
    if any(len(kind.names) > 1 for kind in _kinds(plan)):
        lines.append("  (of modules that are alike, the figures are those of each)")
    return "\n".join(lines)


def _row(kind: _Kind) -> tuple[str, str, str, str, str]:
    m, names = kind.first, kind.names
    shown = repr(names[0]) if len(names) == 1 else f"'{names[0]}' … '{names[-1]}' ({len(names)})"
    count = Counter(m.ops[i] for i in m.stored).most_common()
    listed = [f"{n} {op}" if n > 1 else op for op, n in count[:_NAMED]]
    if len(count) > _NAMED:
        listed.append(f"{len(count) - _NAMED} more")
    stored = f"{len(m.stored)} of {len(m.ops)}" + (f": {', '.join(listed)}" if listed else "")
    sizes = format_bytes(m.stored_bytes), format_bytes(m.discarded_bytes)
    return shown, *sizes, f"{m.recompute_ms:.4g} ms", stored


def code(plan: SACPlan) -> str:
    """Python that makes the plan again and applies it to ``model``; modules that are alike once."""
    kinds = _kinds(plan)
    lines = ["from remat.sac import ModulePlan, SACPlan, apply", ""]
    of: dict[str, int] = {}
    for k, kind in enumerate(kinds):
        of.update(dict.fromkeys(kind.names, k))
        lines.append(f"kind_{k} = {{")
        for f in fields(kind.first):
            if f.name != "name":
                lines += _entry(f'"{f.name}": ', getattr(kind.first, f.name))
        lines += ["}"]
    lines += ["plan = SACPlan(", "    modules=("]
    lines += [f"        ModulePlan(name={m.name!r}, **kind_{of[m.name]})," for m in plan.modules]
    lines += ["    ),"]
    for f in fields(plan):
        if f.name != "modules":
            lines += _entry(f"{f.name}=", getattr(plan, f.name))
    return "\n".join([*lines, ")", "apply(model, plan)", ""])


def _entry(head: str, value: object) -> list[str]:
    """One entry of a call or a dictionary; a long tuple over several lines."""
    if isinstance(value, tuple) and len(value) > 1:
        inner = textwrap.fill(", ".join(map(repr, value)) + ",", 80, break_on_hyphens=False)
        return [f"    {head}(", textwrap.indent(inner, " " * 8), "    ),"]
    return [f"    {head}{value!r},"]
