"""From a joint graph to the step problem: which runs there are, and what memory each takes.

Nodes of the problem are storages: a node of the joint graph that makes memory runs, and has a part for
each further storage that it makes. Views make none: whoever reads a view reads what it looks at. So
the peak of a schedule is what `remat.graph.liveness.simulate_peak` says of the two graphs that run so,
unless a value is kept to the end, or for later, although its node runs again: there a later run stands for
both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from remat.errors import PlanError
from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph, Role, split_outputs
from remat.graph.lowering import Decision
from remat.graph.replays import Replays, is_element, state_bytes
from remat.graph.roles import Roles
from remat.graph.storages import WORKSPACE, Sizes, hint, tensor_bytes
from remat.graph.writes import is_destination, written_by
from remat.solvers.schedule_problem import ScheduleProblem, least_peak

#: What `functionalize-rng` calls the run of a random operator that keeps the generator's state.
_DRAWN = "_drawn"
#: What `partition` calls the copy of an input.
_SNAPSHOT = "_snapshot"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredStep:
    """A step problem and how its nodes map back to the joint graph.

    Attributes:
        problem: the problem, without a capacity.
        of_name: node of the problem that runs where a node of the joint graph, or what the passes put in
            its place, runs; nodes that look at memory only have none.
        of_value: node of the problem that holds the memory of a value, for values of one memory.
    """

    problem: ScheduleProblem
    of_name: dict[str, int]
    of_value: dict[str, int]

    def runs_of(self, name: str) -> tuple[int, ...]:
        """What runs where forward runs a node of the joint graph: the generator's state first, if it is kept."""
        at, state = self.of_name.get(name), self.of_name.get(name + _DRAWN)
        return () if at is None else (at,) if state is None else (state, at)

    @property
    def copies(self) -> list[int]:
        """The copies of inputs, which run first."""
        return [at for name, at in self.of_name.items() if name.endswith(_SNAPSHOT)]

    @property
    def optional(self) -> list[int]:
        """States and copies of inputs, which need not be kept."""
        return [at for name, at in self.of_name.items() if name.endswith((_DRAWN, _SNAPSHOT))]

    @property
    def least_peak(self) -> int:
        """Bytes that every schedule has alive at some moment; states and copies need not be kept."""
        optional = set(self.optional)
        sizes = enumerate(self.problem.size)
        size = tuple(0 if i in optional else nbytes for i, nbytes in sizes)
        return least_peak(replace(self.problem, size=size))[0]

    def schedule(
        self, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> tuple[tuple[int, ...], int]:
        """The schedule that forward and backward graph are, and its boundary."""
        runs: list[int] = []
        boundary = 0
        for module in (forward, backward):
            boundary = len(runs)
            names = {n.name: None for n in module.graph.nodes if n.op == "call_function"}
            for name in names:
                if not name.endswith(_DRAWN):
                    mine = self.runs_of(name)
                    runs += mine if name + _DRAWN in names else mine[-1:]
        return tuple(runs), boundary

    def orders(
        self, sequence: Sequence[int], boundary: int
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Nodes that forward and backward run in a schedule, by names of the joint graph."""
        names = self.problem.names
        forward, backward = (
            tuple(names[v] for v in part if self.of_name.get(names[v]) == v)
            for part in (sequence[:boundary], sequence[boundary:])
        )
        return forward, backward


def lower_step(
    joint: JointGraph,
    index: GraphIndex,
    roles: Roles,
    costs: Sequence[int],
    unit: str,
    decision: Decision,
    *,
    recomputed: Iterable[str] = (),
    once: Iterable[int] = (),
) -> LoweredStep:
    """Builds the step problem of a joint graph.

    Args:
        joint: the joint graph.
        index: its positions.
        roles: its classification.
        costs: cost of each position.
        unit: unit of the costs.
        decision: whose snapshots of inputs there are.
        recomputed: random operators that are replayed, by name: their generator state is kept.
        once: positions of nodes that may not run again: the graph problem says which those are.
    """
    return _Lowering(joint, index, roles).lower(
        costs, unit, decision, frozenset(recomputed), frozenset(once)
    )


class _Row(NamedTuple):
    """One node of the problem."""

    name: str
    inputs: tuple[int, ...] = ()
    cost: int = 0
    size: int = 0
    part_of: int = -1
    extra: int = 0


class _Lowering:
    def __init__(self, joint: JointGraph, index: GraphIndex, roles: Roles) -> None:
        self._joint, self._index, self._roles = joint, index, roles
        self._sizes = Sizes(joint.memories)
        self._rows: list[_Row] = []
        #: Nodes of the problem behind the value of each position.
        self._behind: dict[int, tuple[int, ...]] = {}
        self._of_key: dict[int, int] = {}  # node of the problem that holds a storage

    def _add(self, row: _Row) -> int:
        self._rows.append(row)
        return len(self._rows) - 1

    def lower(
        self,
        costs: Sequence[int],
        unit: str,
        decision: Decision,
        replayed: frozenset[str],
        never_again: frozenset[int],
    ) -> LoweredStep:
        index, roles, sizes = self._index, self._roles, self._sizes
        early = [
            index.nodes[i]
            for i, role in roles.placeholders.items()
            if role in (Role.PRIMAL, Role.FORWARD_SEED, Role.BACKWARD_STATE)
        ]
        resident = sizes.of_all(early)
        at_boundary: list[int] = []
        for i, role in roles.placeholders.items():
            if role is Role.TANGENT:
                for key in sizes.keys(index.nodes[i]):
                    if key not in resident and key not in self._of_key:
                        at = self._add(_Row(index.nodes[i].name, size=sizes.nbytes[key]))
                        self._of_key[key] = at
                        at_boundary.append(at)
        of_name: dict[str, int] = {}
        once: list[int] = []
        backward: list[int] = []
        forward: list[int] = []
        ordered: list[int] = []
        kept = {name: self._snapshot(name, of_name, once) for name in decision.snapshots}
        writes = (w for i in index.special for w in written_by(index.nodes[i]))
        written = {k for w in writes for k in sizes.keys(w)}

        # What forward does not need reads these copies wherever backward makes it.
        copied = {k for name in kept for k in sizes.keys(index.nodes[index.by_name[name]])}

        def touches_written(i: int) -> bool:
            """Whether a node draws, has an effect, or reads or writes memory that is written to."""
            if not index.plain[i] and ops.may_have_effects(index.nodes[i]):
                return True
            fixed = written if roles.required_forward[i] else written - copied
            return bool(fixed) and any(
                k in fixed for j in index.inputs[i] for k in sizes.keys(index.nodes[j])
            )

        replays = Replays(index.nodes[i] for i in index.special)
        # Forward's writes to inputs stand at the end of the graph.
        late = roles.tangent_closure
        for i in sorted(range(len(index)), key=late.__getitem__):
            node = index.nodes[i]
            if node.op != "call_function":
                self._behind[i] = tuple(
                    self._of_key[k] for k in sizes.keys(node) if k in self._of_key
                )
                continue
            reads = {at for j in index.inputs[i] for at in self._behind[j]}
            # Later runs read the copy; it is there while the first run reads the input itself.
            sources = [index.nodes[j] for j in index.inputs[i]] if kept else []
            reads |= {
                kept[x.name] for x in sources if x.name in kept and not is_destination(x, node)
            }
            keys = list(dict.fromkeys(sizes.keys(node)))
            fresh = [k for k in keys if k not in resident and k not in self._of_key]
            viewed = [self._of_key[k] for k in keys if k in self._of_key]
            if not fresh and keys and (is_element(node) or (index.plain[i] and not costs[i])):
                # Memory that is there: of what it reads only that, and what has no memory.
                rows = self._rows
                sizeless = [at for at in reads if not rows[at].size and rows[at].part_of < 0]
                self._behind[i] = (*viewed, *sizeless)
                continue
            state: tuple[int, ...] = ()
            if node.name in replayed and ops.is_random(node) and replays(node):
                made = self._add(_Row(f"{node.name}:state", size=state_bytes(node)))
                state = (made,)
                once.append(made)
                of_name[node.name + _DRAWN] = made
            at = self._add(
                _Row(
                    node.name,
                    tuple(sorted({*reads, *state})),
                    costs[i],
                    sizes.nbytes[fresh[0]] if fresh else 0,
                    extra=hint(node.meta.get(WORKSPACE, 0)),
                )
            )
            of_name[node.name] = at
            if fresh:
                self._of_key[fresh[0]] = at
            parts = []
            for n, key in enumerate(fresh[1:], start=1):
                part = _Row(f"{node.name}:{n}", size=sizes.nbytes[key], part_of=at)
                self._of_key[key] = self._add(part)
                parts.append(self._of_key[key])
            self._behind[i] = tuple(dict.fromkeys([at, *parts, *viewed]))
            if roles.tangent_closure[i]:
                backward.append(at)
            elif roles.required_forward[i]:
                forward.append(at)
            if touches_written(i):
                ordered.append(at)
            if i in never_again:
                once.append(at)
        columns: Any = zip(*self._rows, strict=True) if self._rows else [()] * len(_Row._fields)
        names, inputs, cost, size, part_of, extra = columns
        problem = ScheduleProblem(
            names=names,
            inputs=inputs,
            cost=cost,
            size=size,
            part_of=part_of if any(p >= 0 for p in part_of) else (),
            extra=extra if any(extra) else (),
            once=tuple(sorted(set(once))),
            ordered=tuple(ordered),
            forward=tuple(forward),
            backward=tuple(backward),
            # Where backward hands tangents on and runs nothing, there is no boundary.
            at_start=() if backward else tuple(at_boundary),
            at_boundary=tuple(at_boundary) if backward else (),
            to_end=self._to_end(),
            resident=sum(resident.values()),
            unit=unit,
        )
        memory = ((node.name, tuple(sizes.keys(node))) for node in index.nodes)
        of_value = {
            name: self._of_key[keys[0]]
            for name, keys in memory
            if len(keys) == 1 and keys[0] in self._of_key
        }
        return LoweredStep(problem=problem, of_name=of_name, of_value=of_value)

    def _snapshot(self, name: str, of_name: dict[str, int], once: list[int]) -> int:
        position = self._index.by_name.get(name)
        if position is None:
            raise PlanError(f"the decision keeps a copy of '{name}', which the graph does not have")
        nbytes = tensor_bytes(self._index.values[position])
        at = self._add(_Row(f"{name}:snapshot", size=nbytes))
        of_name[name + _SNAPSHOT] = at
        once.append(at)
        return at

    def _to_end(self) -> tuple[int, ...]:
        """Storages that live to the end: what forward returns, and the gradients."""
        outputs, gradients, _, _ = split_outputs(self._joint)
        nodes = [value for value in (*outputs, *gradients) if isinstance(value, fx.Node)]
        keys = self._sizes.of_all(nodes)
        return tuple(sorted({self._of_key[k] for k in keys if k in self._of_key}))
