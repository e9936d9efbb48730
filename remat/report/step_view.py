"""Data of one step for pages and exports: storages over time, operators, kept and recomputed values.

All data come from the same functions as `Plan.timeline`, `Plan.plot` and `Plan.explain`, so that
pages agree with the plan.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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

if TYPE_CHECKING:
    from remat.planning.plan import Plan

#: States of a value under a plan.
KEPT, RECOMPUTED, OFFLOADED = "kept", "recomputed", "offloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One storage of a step, with its lifetime. A moment is a run of an operator or, in compiled code, of a kernel.

    Attributes:
        name: name of a node. For a kept storage, the node whose value forward returns for backward;
            for an offloaded storage, the offloaded value; else the node that made the storage.
        op: operator that made the storage; ``"input"`` for inputs of the step, empty if unknown.
        nbytes: bytes of the storage.
        kind: kind of the storage.
        first: number of the first moment at which the storage is alive.
        last: number of the last moment at which the storage is alive.
        state: ``"kept"`` from forward to backward; ``"recomputed"`` by a later run of its node;
            ``"offloaded"`` for a storage copied to host memory, and for the copy back; otherwise
            empty.
        source: source line in the user's code; empty if unknown.
        price: cost of recomputing a kept value alone, in the unit of the step; None for other values,
            and if the value cannot be recomputed.
        module: module that made the storage; empty if unknown.
        shape: dtype and shape of the value, such as ``"float32[8, 16]"``; empty if unknown.
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
        name: name of the node.
        op: operator of the node.
        source: source line in the user's code; empty if unknown.
        in_backward: whether this run is in backward.
        again: whether the same node has run before in this step.
        cost: cost of this run in the unit of the step; None if unknown.
    """

    name: str
    op: str
    source: str
    in_backward: bool
    again: bool
    cost: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Times at which operators run, computed from the costs of the operators.

    Attributes:
        starts: time at which each run of an operator begins, in the order of the step, then the end of the step.
        without: the same times for the step without remat; empty if unknown.
        unit: unit of all these times.
    """

    starts: Sequence[int]
    without: Sequence[int]
    unit: str

    def label(self, unit: str) -> str:
        """Return the label of a time axis whose numbers are in ``unit``."""
        return f"modelled time, {unit}" if self.unit == "ps" else f"cost of operators, {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """Data of the step under one plan, from which pages, plots and exports are made.

    Attributes:
        graph: name of the joint graph.
        unit: unit of all costs.
        timeline: storages alive at each moment of the step.
        as_compiled: whether each moment of the timeline is a kernel of compiled code, instead of one of
            ``runs``.
        values: storages of the step, in the order of the timeline.
        runs: runs of operators in forward, then in backward.
        kept: storages that forward keeps for backward.
        recomputed: runs of nodes that have run before in the step, usually in backward.
        without: memory over the step without remat; None if unknown.
        clock: times at which operators run; None if costs are unknown, or if moments are kernels.
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
        """For each moment, (name, source line) of the node or kernel that runs; kernels have an empty source line."""
        if self.as_compiled or len(self.runs) != len(self.timeline.moments):
            return [(name, "") for name in self.timeline.moments]
        return [(run.name, run.source) for run in self.runs]


def view_step(plan: Plan, without: MemoryCurve | None, *, as_compiled: bool) -> StepView:
    """Build the view of the step under a plan.

    Args:
        plan: the plan. It must have its forward and backward modules.
        without: memory over the step without remat; None if unknown.
        as_compiled: whether the plan's timeline is that of compiled code, not a simulated one.
    """
    timeline, forward, backward = plan.timeline, plan.forward, plan.backward
    costs = plan.node_costs
    nodes = {n.name: n for gm in (backward, forward) for n in gm.graph.nodes}
    keeps = kept(plan)
    rows = {k.name: k for k in keeps}
    twice = set(plan.recomputed)
    runs: list[OperatorRun] = []
    ran: set[str] = set()
    for gm in (forward, backward):
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            # If a graph runs a joint-graph node several times, only one run has the name of the joint-graph node.
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
    # By the node that made the storage and by bytes. The name of an offloaded value does not identify its storage:
    # an element of a tuple has another name than the node that made the tuple's storages.
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
    # The lengths differ if forward or backward has no operator: a graph without operators counts as one moment.
    clock = None
    if any(run.cost for run in runs) and not as_compiled and len(runs) == len(timeline.moments):
        own = [costs.get(name, 0) for name in (without.runs if without else ())]
        clock = Clock(
            starts=list(accumulate((run.cost or 0 for run in runs), initial=0)),
            without=list(accumulate(own, initial=0)) if own else [],
            unit=plan.unit,
        )
    return StepView(
        graph=plan.graph,
        unit=plan.unit,
        timeline=timeline,
        as_compiled=as_compiled,
        values=tuple(values),
        runs=tuple(runs),
        kept=tuple(keeps),
        recomputed=tuple(again(plan)),
        without=without,
        clock=clock,
    )


def short_module(path: str) -> str:
    """Shorten a module path to begin at its first numbered module, such as ``"layers.0.mlp"``.

    A path without a number is shortened to its last name.
    """
    found = re.search(r"\w+\.(\d|\*).*", path)
    return found[0] if found else path.rpartition(".")[2]


def _shape(node: fx.Node | None) -> str:
    """Return dtype and shape of a node's value, such as ``"float32[8, 16]"``; empty if unknown."""
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
