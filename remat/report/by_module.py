"""What a plan saves and recomputes in each module of the model, and under each policy by module."""

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
    """What a plan does with one node of forward.

    Attributes:
        node: the node.
        saved_bytes: bytes that forward saves of it on the device.
        offloaded_bytes: bytes of it that go to the host.
        recompute_cost: cost of its further runs.
        runs_again: whether it has any.
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
    """Sums over the nodes of modules.

    Attributes:
        parts: the modules.
    """

    parts: set[str] = field(default_factory=set)
    nodes: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    recompute_cost: int = 0
    runs_again: int = 0
    cost: int = 0

    def add(self, use: Use) -> None:
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
    """What a plan does with each node that forward runs.

    Args:
        forward: forward module of the plan.
        backward: its backward module.
        problem: its graph problem.
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
    """Modules of one place in the tree, such as the same one of each layer.

    Attributes:
        pattern: their name, with ``*`` for what differs.
        depth: how deep they are in the tree.
        modules: sums over each of them, by name.
        total: sums over all of them.
    """

    pattern: str
    depth: int
    modules: Mapping[str, Totals]
    total: Totals

    @property
    def treatment(self) -> str:
        """What the plan does in all of them: save, recompute, offload; empty where that differs, or nothing is kept."""
        found = {treatment_of(totals) for totals in self.modules.values()}
        return found.pop() if len(found) == 1 else ""


def treatment_of(totals: Totals) -> str:
    """The policy that a plan keeps to in a module by itself; empty if to none."""
    if totals.recompute_cost:
        return "" if totals.saved_bytes or totals.offloaded_bytes else "recompute"
    if totals.saved_bytes:
        return "" if totals.offloaded_bytes else "save"
    return "offload" if totals.offloaded_bytes else ""


def module_rows(used: Iterable[Use]) -> list[ModuleRow]:
    """The tree of the modules that a step runs, numbered ones as one row; a list of modules has no row of its own."""
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
    """Policies that say what a plan does already, by the outermost modules in which it does one thing."""
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
    """What each policy has matched, and what the plan does there, as lines of text.

    Args:
        policies: those of the options; the code's own are found at the nodes.
        used: what the plan does with each node.
        show_cost: writes a cost.
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
