"""One step as pages and exports show it: its storages over time, its operators, what is kept and what runs again.

Everything comes from where `Plan.timeline`, `Plan.plot` and `Plan.explain` get it, so that no page tells another
figure than the plan itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import fx

from remat.graph.copying import run_of
from remat.graph.host_copies import RELOAD
from remat.graph.liveness import MemoryCurve, StorageKind, Timeline
from remat.graph.replays import maker_of
from remat.graph.source import source_line
from remat.report.explanation import KeptStorage, RecomputedNode, again, kept, op_name
from remat.solvers.graph_problem import GraphProblem

if TYPE_CHECKING:
    from remat.planning.plan import Plan

#: What a plan does with a value.
KEPT, RECOMPUTED, OFFLOADED = "kept", "recomputed", "offloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One storage over the step.

    Attributes:
        name: the value that forward hands to backward on it, else the node that made it.
        op: the operator that made it; ``"input"`` of what the step is given, empty where it is not known.
        nbytes: bytes of the storage.
        kind: what it is to the step.
        first: moment at which it is there for the first time.
        last: moment at which it is there for the last time.
        state: ``"kept"`` from forward to backward; ``"recomputed"`` where this is the result of a further run;
            ``"offloaded"`` of what goes to the host, and of what comes back; else empty.
        source: the user's line, empty where unknown.
        price: cost of recomputing it alone, of a kept one that can be recomputed.
        module: the module that made it, empty where unknown.
        shape: dtype and shape of the value, ``"float32[8, 16]"``; empty where unknown.
    """

    name: str
    op: str
    nbytes: int
    kind: StorageKind
    first: int
    last: int
    state: str
    source: str
    price: int | None
    module: str
    shape: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRun:
    """One run of an operator.

    Attributes:
        name: the node.
        op: its operator.
        source: the user's line, empty where unknown.
        in_backward: whether it runs in backward.
        again: whether it runs for a second time.
        cost: cost of this run in the unit of the step; None where it is not known.
    """

    name: str
    op: str
    source: str
    in_backward: bool
    again: bool
    cost: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When operators run, by their costs.

    Attributes:
        starts: start of each moment of a step, then the end of the step.
        without: the same for the step without remat; empty where it is not known.
        unit: unit of both.
    """

    starts: Sequence[int]
    without: Sequence[int]
    unit: str

    def label(self, unit: str) -> str:
        """What an axis in a multiple of the unit says."""
        return f"modelled time, {unit}" if self.unit == "ps" else f"cost of operators, {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A step under one plan.

    Attributes:
        graph: name of the joint graph.
        unit: unit of all costs.
        timeline: what is alive when.
        as_compiled: whether the moments of the timeline are kernels of compiled code, and not ``runs``.
        values: its storages, in the order of the timeline.
        runs: forward's operators, then backward's.
        kept: what forward keeps for backward.
        recomputed: what runs again.
        without: memory over the step without remat; None where it is not known.
        clock: when operators run; None where costs are not known, and of kernels.
    """

    graph: str
    unit: str
    timeline: Timeline
    as_compiled: bool
    values: tuple[Value, ...]
    runs: tuple[OperatorRun, ...]
    kept: tuple[KeptStorage, ...]
    recomputed: tuple[RecomputedNode, ...]
    without: MemoryCurve | None = None
    clock: Clock | None = None

    @property
    def operator_at(self) -> list[tuple[str, str]]:
        """Name and source line of what runs at each moment; of a kernel, its name alone."""
        if self.as_compiled or len(self.runs) != len(self.timeline.moments):
            return [(name, "") for name in self.timeline.moments]
        return [(run.name, run.source) for run in self.runs]


def view_step(
    plan: Plan,
    problem: GraphProblem | None,
    costs: Mapping[str, int] | None,
    without: MemoryCurve | None,
    *,
    as_compiled: bool,
) -> StepView:
    """The view of a plan's step.

    Args:
        plan: the plan.
        problem: its graph problem.
        costs: what running a node of the joint graph once costs, by name; empty where that is not known.
        without: memory over the step without remat, where it is known.
        as_compiled: whether the plan's timeline is that of compiled code.
    """
    assert problem is not None, "a plan with modules has its problem"
    timeline, forward, backward = plan.timeline, plan.forward, plan.backward
    recomputed, costs = plan.recomputed, costs or {}
    nodes = {n.name: n for gm in (backward, forward) for n in gm.graph.nodes}
    keeps = kept(forward, problem, recomputed)
    rows = {k.name: k for k in keeps}
    twice = set(recomputed)
    runs: list[OperatorRun] = []
    ran: set[str] = set()
    for gm in (forward, backward):
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            name = run_of(node)
            runs.append(
                OperatorRun(
                    name=node.name,
                    op=op_name(node),
                    source=source_line(node),
                    in_backward=gm is backward,
                    again=name in twice and name in ran,
                    cost=costs.get(name, 0) if costs else None,
                )
            )
            ran.add(name)
    # By operator and bytes: one of several results has a name of its own.
    sent = {
        (run_of(maker_of(nodes[value.name])), value.nbytes): value.name
        for value in plan.offloads
        if value.name in nodes
    }
    values = []
    for life in timeline.lifetimes:
        is_kept = life.kind is StorageKind.SAVED
        row = rows.get(life.saved_as) if is_kept else None
        node = nodes.get(life.saved_as or life.node)
        late = life.first >= timeline.boundary
        state = KEPT if is_kept else RECOMPUTED if life.kind is StorageKind.RECOMPUTED else ""
        away = "" if is_kept or late else sent.get((life.node, life.nbytes), "")
        if away or (not is_kept and late and node is not None and node.target is RELOAD):
            state = OFFLOADED
        values.append(
            Value(
                name=(life.saved_as if is_kept else away) or life.node,
                op="" if node is None else "input" if node.op == "placeholder" else op_name(node),
                nbytes=life.nbytes,
                kind=life.kind,
                first=life.first,
                last=life.last,
                state=state,
                source=life.source or (row.source if row else ""),
                price=row.price if row else None,
                module=life.module,
                shape=_shape(node),
            )
        )
    clock = None
    if any(run.cost for run in runs) and not as_compiled and len(runs) == len(timeline.moments):
        own = [costs.get(name, 0) for name in (without.runs if without else ())]
        clock = Clock(
            starts=list(accumulate((run.cost or 0 for run in runs), initial=0)),
            without=list(accumulate(own, initial=0)) if own else [],
            unit=problem.unit,
        )
    return StepView(
        graph=plan.graph,
        unit=problem.unit,
        timeline=timeline,
        as_compiled=as_compiled,
        values=tuple(values),
        runs=tuple(runs),
        kept=tuple(keeps),
        recomputed=tuple(again(forward, backward, problem, recomputed)),
        without=without,
        clock=clock,
    )


def short_module(path: str) -> str:
    """A path of modules from its first number on, ``"layers.0.mlp"``, else its last name."""
    found = re.search(r"\w+\.(\d|\*).*", path)
    return found[0] if found else path.rpartition(".")[2]


def _shape(node: fx.Node | None) -> str:
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
