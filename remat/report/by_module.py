"""Bytes that a plan saves, and costs that it recomputes, by module and by policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from remat.graph.policies import Policies, Policy
from remat.graph.source import enclosing_modules, module_path
from remat.report.explanation import ShowCost, again, counted, kept
from remat.solvers.graph_problem import GraphProblem
from remat.units import columns, format_bytes


class Use(NamedTuple):
    """What a plan does with one node of forward; costs are in the unit of the plan.

    Attributes:
        node: the node.
        saved_bytes: bytes of the node's value that forward saves on the device.
        offloaded_bytes: bytes of the node's value that are offloaded to host memory.
        recompute_cost: summed cost of the node's further runs.
        runs_again: whether the node runs again.
        cost: cost of one run.
    """

    node: fx.Node
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    recompute_cost: int = 0
    runs_again: bool = False
    cost: int = 0


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums of `Use` over the nodes of some modules, or over the nodes that a policy matches.

    Attributes:
        parts: names of the modules, or numbers of the regions, that a policy matches; empty for sums by module.
        nodes: number of nodes.
        saved_bytes: bytes that forward saves on the device.
        offloaded_bytes: bytes that are offloaded to host memory.
        recompute_cost: summed cost of further runs.
        runs_again: number of nodes that run again.
        cost: summed cost of one run of each node.
    """

    parts: set[str] = field(default_factory=set)
    nodes: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    recompute_cost: int = 0
    runs_again: int = 0
    cost: int = 0

    def add(self, use: Use) -> None:
        """Add the figures of one node to the sums."""
        self.cost += use.cost
        self.nodes += 1
        self.saved_bytes += use.saved_bytes
        self.offloaded_bytes += use.offloaded_bytes
        self.recompute_cost += use.recompute_cost
        self.runs_again += use.runs_again


def uses(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    problem: GraphProblem,
    recomputed: Sequence[str],
    offloaded: Mapping[str, int],
    costs: Mapping[str, int],
) -> Iterator[Use]:
    """Yield what a plan does with each node of its forward graph.

    Args:
        forward: the plan's forward module.
        backward: the plan's backward module.
        problem: the plan's graph problem.
        recomputed: names of the nodes that run again, one for each further run.
        offloaded: bytes of the offloaded values by name.
        costs: cost of one run of each node by name.
    """
    saved = {k.name: k.nbytes for k in kept(forward, problem, recomputed)}
    cost: dict[str, int] = {}
    for run in again(forward, backward, problem, recomputed):
        cost[run.name] = cost.get(run.name, 0) + run.cost
    for node in forward.graph.nodes:
        if node.op != "call_function":
            continue
        name = node.name
        yield Use(
            node=node,
            saved_bytes=0 if name in offloaded else saved.get(name, 0),
            offloaded_bytes=offloaded.get(name, 0),
            recompute_cost=cost.get(name, 0),
            runs_again=name in cost,
            cost=costs.get(name, 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One row for all modules whose names differ in numbers only, such as one module of each layer.

    Attributes:
        pattern: name of the modules, with ``*`` for each number.
        depth: depth of the row in the tree of rows; 0 for a row without a parent.
        modules: sums over the nodes of each module, by name of the module.
        total: sums over all modules of the row.
    """

    pattern: str
    depth: int
    modules: Mapping[str, Totals]
    total: Totals

    @property
    def treatment(self) -> str:
        """What the plan does with each module of this row: ``save``, ``recompute`` or ``offload``.

        Empty if the plan treats the modules differently, mixes the three within a module, or does none of them.
        """
        found = {treatment_of(totals) for totals in self.modules.values()}
        return found.pop() if len(found) == 1 else ""


def treatment_of(totals: Totals) -> str:
    """Return what a plan does in a module: ``save``, ``recompute`` or ``offload``; empty for a mixture or nothing."""
    if totals.recompute_cost:
        return "" if totals.saved_bytes or totals.offloaded_bytes else "recompute"
    if totals.saved_bytes:
        return "" if totals.offloaded_bytes else "save"
    return "offload" if totals.offloaded_bytes else ""


def module_rows(used: Iterable[Use]) -> list[ModuleRow]:
    """Return the tree of modules as rows, each parent before its children.

    Containers that hold only numbered modules, such as a `ModuleList`, have no row.

    Args:
        used: what the plan does with each node of forward.
    """
    modules: dict[str, dict[str, Totals]] = {}
    totals: dict[str, Totals] = {}
    for use in used:
        for name in enclosing_modules(module_path(use.node)):
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            modules.setdefault(pattern, {}).setdefault(name, Totals()).add(use)
            totals.setdefault(pattern, Totals()).add(use)
    place = {pattern: k for k, pattern in enumerate(modules)}
    lists = {p for p in modules if totals.get(f"{p}.*", Totals()).nodes == totals[p].nodes}
    return [
        ModuleRow(
            pattern=pattern,
            depth=len([p for p in enclosing_modules(pattern) if p not in lists]) - 1,
            modules=modules[pattern],
            total=totals[pattern],
        )
        for pattern in sorted(modules, key=lambda p: [place[q] for q in enclosing_modules(p)])
        if pattern not in lists
    ]


def policies_of(rows: Sequence[ModuleRow]) -> dict[str, str]:
    """Return policies by module that describe what a plan does, for the outermost modules with one policy each.

    Args:
        rows: the tree of modules, from `module_rows`.

    Returns:
        Policies by name or pattern of modules: ``save``, ``recompute`` or ``offload``.
    """
    found: dict[str, str] = {}
    for row in rows:
        around = {p for name in row.modules for p in enclosing_modules(name)} | {
            *enclosing_modules(row.pattern)
        }
        if around & found.keys():
            continue
        if row.treatment:
            found[row.pattern] = row.treatment
        elif len(row.modules) > 1:  # they differ: each by itself
            each = {name: treatment_of(totals) for name, totals in row.modules.items()}
            found |= each if all(each.values()) else {}
    return found


def policy_lines(policies: Policies, used: Iterable[Use], show_cost: ShowCost) -> list[str]:
    """Return a table with a row for each policy: what it matches, and what the plan saves and recomputes there.

    Args:
        policies: the policies that are given as an option. Policies of regions are read from the nodes.
        used: what the plan does with each node of forward.
        show_cost: function that formats a cost.

    Returns:
        Lines of text; empty if there are no policies.
    """
    listed = list(used)
    totals: dict[Policy, Totals] = {policy: Totals() for policy in policies.given}
    parts = policies.parts([use.node for use in listed])
    for use, part in zip(listed, parts, strict=True):
        if part is not None:
            of_policy = totals.setdefault(part.policy, Totals())
            of_policy.parts.add(part.name)
            of_policy.add(use)
    if not totals:
        return []
    rows = [["policy", "matched", "saved", "offloaded", "recomputed"]]
    for policy, total in totals.items():
        matched = f"{counted(len(total.parts), 'module')}, {counted(total.nodes, 'node')}"
        if not total.nodes:
            matched = "nothing here that no later pattern matches"
        away = format_bytes(total.offloaded_bytes) if total.offloaded_bytes else ""
        again_text = f"{total.runs_again} nodes, {show_cost(total.recompute_cost)}"
        saved = format_bytes(total.saved_bytes)
        rows.append([str(policy).removeprefix("policy "), matched, saved, away, again_text])
    return ["  policies by module:", *(f"    {line}" for line in columns(rows, left=(0, 1)))]
