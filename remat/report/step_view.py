"""Data of a step or a frontier for pictures, pages and exports: storages, operators, kept and recomputed values.

Pages agree with `Plan.timeline`, `Plan.plot` and `Plan.explain`, because all data come from the
same functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from remat.graph.memory.liveness import MemoryCurve, StorageKind, Timeline

#: Point of a frontier: bytes and cost.
Point = tuple[int, int]
#: States of a value under a plan.
KEPT, RECOMPUTED, OFFLOADED = "kept", "recomputed", "offloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One storage of a step, with the storage's lifetime in program points (runs of operators or compiled kernels).

    Attributes:
        name: name of a node: for a kept storage, the node whose value forward returns for backward; for an offloaded
            storage, the offloaded value; for any other storage, the node that made it.
        op: operator that made the storage; ``"input"`` for inputs of the step, empty if unknown.
        nbytes: bytes of the storage.
        kind: kind of the storage.
        first: number of the first program point at which the storage is alive.
        last: number of the last program point at which the storage is alive.
        state: ``"kept"`` if forward keeps the storage for backward; ``"recomputed"`` if a later run
            of its node made it; ``"offloaded"`` for a storage copied to host memory, and for the
            copy back; otherwise empty.
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
class KeptStorage:
    """One storage that forward keeps for backward.

    Attributes:
        name: name of the node whose value forward returns for backward.
        op: operator of the node.
        source: source line in the user's code; empty if unknown.
        nbytes: bytes of the storage.
        price: cost of recomputing the value alone from other kept or recomputed values, in the unit of
            the problem; None if the value cannot be recomputed.
        tagged: name of the `CheckpointPolicy` by which the user forbids recomputation, such as
            ``"MUST_SAVE"``; empty if there is none.
        undeclared: operators that computed the value and must not run again, because the operators are not
            declared pure.
        branch: ``"branch value"`` if the value is kept so that backward branches as forward did;
            ``"compared"`` if it is kept because backward compares it with its maximum; else empty.
    """

    name: str
    op: str
    source: str
    nbytes: int
    price: int | None
    tagged: str = ""
    undeclared: tuple[str, ...] = ()
    branch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRun:
    """One run of an operator in a step, in forward or backward.

    Attributes:
        name: name of the node.
        node: name of the run's node in the joint graph, which may run several times.
        op: operator of the node.
        source: source line in the user's code; empty if unknown.
        in_backward: whether this run is in backward.
        again: reason for the run if the node has run before in this step; empty for the first run. ``"tagged"``:
            a checkpoint policy of the user tags the node for recomputation. ``"read"``: backward itself reads
            the value. ``"on the way"``: only other recomputed nodes read the value.
        nbytes: bytes that keeping the node's value would take; 0 if the value takes no memory of its own.
        cost: cost of this run in the unit of the step; None if unknown.
    """

    name: str
    node: str
    op: str
    source: str
    in_backward: bool
    again: str
    nbytes: int
    cost: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Times at which operators run, computed from the costs of the operators.

    Attributes:
        starts: time at which each run of an operator begins, in the order of the step, then the end of the step.
        without: the times in ``starts`` for the step without remat; empty if unknown.
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
    """Data of the training step under one plan, from which pages, plots and exports are made.

    Attributes:
        graph: name of the joint graph.
        title: text that names the graph and the budget of the plan.
        unit: unit of all costs.
        timeline: storages alive at each program point of the step.
        as_compiled: whether each program point of the timeline is a kernel of compiled code, instead of one of
            ``runs``.
        values: storages of the step, in the order of the timeline.
        runs: runs of operators in forward, then in backward.
        kept: storages that forward keeps for backward.
        without: memory over the step without remat; None if unknown.
        without_peak_bytes: peak of the step without remat; 0 if unknown. In compiled code, an estimate.
        peak_budget: the most bytes that the budget lets be alive at once; None if the budget sets no such limit.
        clock: times at which operators run; None if costs are unknown, or if program points are kernels.
    """

    graph: str
    title: str
    unit: str
    timeline: Timeline
    as_compiled: bool
    values: tuple[Value, ...]
    runs: tuple[OperatorRun, ...]
    kept: tuple[KeptStorage, ...]
    without: MemoryCurve | None = None
    without_peak_bytes: int = 0
    peak_budget: int | None = None
    clock: Clock | None = None

    @property
    def recomputed(self) -> list[OperatorRun]:
        """Runs, usually in backward, of nodes that have run before in the step."""
        return [run for run in self.runs if run.again]

    @property
    def operator_at(self) -> list[tuple[str, str]]:
        """For each program point, the pair (name, source line) of the node that runs; for a kernel, (name, "")."""
        if self.as_compiled or len(self.runs) != len(self.timeline.program_points):
            return [(name, "") for name in self.timeline.program_points]
        return [(run.name, run.source) for run in self.runs]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierView:
    """Data from which one frontier is drawn.

    A point of the frontier is (bytes, cost). Bytes rise from point to point, and costs fall.

    Attributes:
        label: name of the frontier, such as the name of the solver.
        by: what the bytes of each point are: ``"saved"`` for saved bytes, ``"peak"`` for the peak of the step.
        unit: unit of the costs.
        points: points of the frontier.
        texts: saved bytes, recompute cost and peak of each point, as text.
        bound: vertices of a line below which no plan lies.
        knee: point beyond which more memory reduces the cost only a little.
    """

    label: str
    by: str
    unit: str
    points: tuple[Point, ...]
    texts: tuple[str, ...]
    bound: tuple[Point, ...]
    knee: Point


def short_module(path: str) -> str:
    """Shorten a module path to begin at its first numbered module, such as ``"layers.0.mlp"``.

    A module path without a number is shortened to the last name in the path.
    """
    match = re.search(r"\w+\.(\d|\*).*", path)
    return match[0] if match else path.rpartition(".")[2]
