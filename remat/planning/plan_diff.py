"""Two plans side by side: what is kept under one and not under the other, and the figures of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remat.errors import ProblemError
from remat.planning.plan import Plan
from remat.planning.plans import PlanSet
from remat.units import format_bytes, format_change, format_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """Two plans, the second beside the first.

    Attributes:
        first: a plan.
        second: another one, of the same graph as a rule: names mean little between different graphs.
    """

    first: Plan
    second: Plan

    @property
    def same_graph(self) -> bool:
        """Whether both were made for one graph."""
        return self.first.fingerprint == self.second.fingerprint

    @property
    def only_first(self) -> tuple[str, ...]:
        """Nodes that the first plan keeps and the second does not, in the first one's order."""
        return _without(self.first, self.second)

    @property
    def only_second(self) -> tuple[str, ...]:
        """Nodes that the second plan keeps and the first does not, in the second one's order."""
        return _without(self.second, self.first)

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """What each figure is called, and how it reads for the first and the second plan."""
        pair = self.first, self.second
        columns = [_figures(plan) for plan in pair]
        return [(name, columns[0][name], columns[1][name]) for name in columns[0]]

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON: the numbers as they are."""
        return {
            "graph": self.first.graph,
            "same_graph": self.same_graph,
            "only_first": list(self.only_first),
            "only_second": list(self.only_second),
            "first": _numbers(self.first),
            "second": _numbers(self.second),
        }


#: Fields of a plan that are compared.
_FIELDS = (
    "budget", "solver", "cost", "unit", "capacity", "saved_bytes", "peak_bytes", "planned_peak_bytes",
    "without_peak_bytes", "recompute_cost", "recompute_bound", "step_cost", "without_recompute_cost",
)  # fmt: skip


def diffs_of(first: Plan | PlanSet, second: Plan | PlanSet) -> list[PlanDiff]:
    """Two plans side by side, or two sets of plans, graph by graph.

    Raises:
        ProblemError: they are for different numbers of graphs.
    """
    sides = [tuple(p) if isinstance(p, PlanSet) else (p,) for p in (first, second)]
    if len(sides[0]) != len(sides[1]):
        raise ProblemError(
            f"the first file holds plans for {len(sides[0])} graphs and the second for {len(sides[1])}; expected "
            "plans of one model, captured with the same options"
        )
    return [PlanDiff(first=a, second=b) for a, b in zip(*sides, strict=True)]


def _without(one: Plan, other: Plan) -> tuple[str, ...]:
    there = {*other.saved, *other.snapshots}
    return tuple(dict.fromkeys(n for n in (*one.saved, *one.snapshots) if n not in there))


def _numbers(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in _FIELDS} | {
        "kept": len(plan.saved) + len(plan.snapshots),
        "recomputed": len(plan.recomputed),
        "more": plan.before_after.more,
    }


def _figures(plan: Plan) -> dict[str, str]:
    compiled = " as compiled" if plan.planned_peak_bytes else ""
    found = plan.before_after
    return {
        "budget": plan.asked.label,
        "solver": plan.solver,
        "cost model": plan.cost,
        "kept": f"{len(plan.saved) + len(plan.snapshots):,} nodes",
        "saved": format_bytes(plan.saved_bytes),
        "recomputed": f"{len(plan.recomputed):,} nodes, {format_cost(plan.recompute_cost, plan.unit)}",
        "peak": format_bytes(plan.peak_bytes) + compiled,
        "peak without remat": format_bytes(plan.without_peak_bytes)
        if plan.without_peak_bytes
        else "–",
        "step": format_cost(plan.step_cost + plan.recompute_cost, plan.unit)
        if plan.step_cost
        else "–",
        "beside no remat": format_change(found.more),
    }
