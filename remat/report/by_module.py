"""Bytes that a plan saves, and costs of operators that the plan recomputes, summed by module and by policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from torch import fx

from remat.graph.capture.source import enclosing_modules, module_path
from remat.graph.policies import Policies, Policy
from remat.units import columns, counted, format_bytes, format_cost


@dataclass(slots=True, kw_only=True)
class Totals:
    """Saved bytes and recompute costs under a plan, for one node of forward or summed over several nodes.

    The costs in the fields are in the plan's unit of cost.

    Attributes:
        nodes: number of nodes.
        saved_bytes: bytes that forward saves on the device.
        offloaded_bytes: bytes that are offloaded to host memory.
        recompute_cost: summed cost of all runs of a node after the node's first run.
        runs_again: number of nodes that run again.
        cost: summed cost of one run of each node.
    """

    nodes: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    recompute_cost: int = 0
    runs_again: int = 0
    cost: int = 0

    def add(self, other: Totals) -> None:
        """Add the bytes, costs and counts of other nodes to these totals."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


#: A node of forward, with the bytes and costs of this node under a plan.
Use = tuple[fx.Node, Totals]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One table row for all modules whose names differ in numbers only: ``layers.0.mlp``, ``layers.1.mlp`` and so on.

    Attributes:
        pattern: name of the modules, with ``*`` for each number.
        modules: dict from the name of each module of the row to the totals over its nodes.
        total: totals over all modules of the row.
    """

    pattern: str
    modules: Mapping[str, Totals]
    total: Totals

    @property
    def treatment(self) -> str:
        """What the plan does with the values of every module in this table row: ``save``, ``recompute`` or ``offload``.

        The text is empty if modules of the row are treated differently, or if a module has several
        treatments or none.
        """
        treatments = {treatment_of(totals) for totals in self.modules.values()}
        return treatments.pop() if len(treatments) == 1 else ""


def treatment_of(totals: Totals) -> str:
    """Return what a plan does with a module's values: ``save``, ``recompute`` or ``offload``; empty if not just one."""
    if totals.recompute_cost:
        return "" if totals.saved_bytes or totals.offloaded_bytes else "recompute"
    if totals.saved_bytes:
        return "" if totals.offloaded_bytes else "save"
    return "offload" if totals.offloaded_bytes else ""


def module_rows(used: Iterable[Use]) -> list[ModuleRow]:
    """Return the model's tree of modules as table rows, parents before children; ``used`` comes from `Plan.uses`.

    Containers that hold only numbered modules, such as a `ModuleList`, have no row.
    """
    modules: dict[str, dict[str, Totals]] = {}
    totals: dict[str, Totals] = {}
    for node, figures in used:
        for name in enclosing_modules(module_path(node)):
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            modules.setdefault(pattern, {}).setdefault(name, Totals()).add(figures)
            totals.setdefault(pattern, Totals()).add(figures)
    place = {pattern: k for k, pattern in enumerate(modules)}
    lists = {p for p in modules if totals.get(f"{p}.*", Totals()).nodes == totals[p].nodes}
    return [
        ModuleRow(
            pattern=pattern,
            modules=modules[pattern],
            total=totals[pattern],
        )
        for pattern in sorted(modules, key=lambda p: [place[q] for q in enclosing_modules(p)])
        if pattern not in lists
    ]


def policies_of(rows: Sequence[ModuleRow]) -> dict[str, str]:
    """Return policies that describe a plan, as a dict from module name or pattern: ``{"layers.*.mlp": "recompute"}``.

    Each outermost module that the plan treats uniformly gets a policy. Modules within a module that has a
    policy get no policy of their own.
    """
    policies: dict[str, str] = {}
    for row in rows:
        names = (row.pattern, *row.modules)
        if any(outer in policies for name in names for outer in enclosing_modules(name)):
            continue
        if row.treatment:
            policies[row.pattern] = row.treatment
        elif len(row.modules) > 1:  # the modules differ, so each gets a policy of its own
            each = {name: treatment_of(totals) for name, totals in row.modules.items()}
            policies |= each if all(each.values()) else {}
    return policies


def policy_lines(policies: Policies, used: Sequence[Use], unit: str) -> list[str]:
    """Return a table of the policies, including those of `remat.region`, as lines; an empty list without policies.

    The table's columns are the matched modules, saved bytes, offloaded bytes, and recompute cost in ``unit``.
    """
    totals: dict[Policy, Totals] = {policy: Totals() for policy in policies.given}
    matches: dict[Policy, set[str]] = {}
    parts = policies.parts([node for node, _ in used])
    for (_, figures), part in zip(used, parts, strict=True):
        if part is not None:
            totals.setdefault(part.policy, Totals()).add(figures)
            matches.setdefault(part.policy, set()).add(part.name)
    if not totals:
        return []
    rows = [["policy", "matched", "saved", "offloaded", "recomputed"]]
    for policy, total in totals.items():
        matched = "nothing here that no later pattern matches"
        if total.nodes:
            matched = f"{counted(len(matches[policy]), 'module')}, {counted(total.nodes, 'node')}"
        offloaded = format_bytes(total.offloaded_bytes) if total.offloaded_bytes else ""
        recomputed = f"{total.runs_again} nodes, {format_cost(total.recompute_cost, unit)}"
        saved = format_bytes(total.saved_bytes)
        rows.append([str(policy).removeprefix("policy "), matched, saved, offloaded, recomputed])
    return ["  policies by module:", *(f"    {line}" for line in columns(rows, left=(0, 1)))]
