"""Build the scheduling problem of a joint graph: when each node runs, or runs again, in a step.

Nodes of the problem are storages. A joint-graph node that allocates memory becomes a problem node.
Each further storage that it allocates becomes a part of this problem node. Views have no problem
nodes, because readers of a view read its base. The peak of a schedule then equals
`remat.graph.liveness.simulate_peak` of the forward and backward graphs that run this schedule.

There is one exception. If a value is kept although its node runs again, the problem assumes that
later readers read the value of the later run.
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

#: Suffix that the pass `functionalize-rng` gives to a random operator's run that saves the generator state.
_DRAWN = "_drawn"
#: Suffix that the pass `partition` gives to the copy of an input.
_SNAPSHOT = "_snapshot"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredStep:
    """The scheduling problem of a step, and the map from its nodes to the joint graph.

    Attributes:
        problem: the problem, without a limit on memory. A solution says which node runs when, and
            how often.
        of_name: index of the problem node, by joint-graph name. ``NAME_drawn`` stands for the
            generator state that the random operator NAME saves, and ``NAME_snapshot`` for the copy
            of the input NAME. Nodes that are only views are left out.
        of_value: by name of each joint-graph node with a single storage, the index of the problem
            node that holds this storage.
    """

    problem: ScheduleProblem
    of_name: dict[str, int]
    of_value: dict[str, int]

    def runs_of(self, name: str) -> tuple[int, ...]:
        """Return the problem nodes for one run of a joint-graph node in forward, in order.

        For a random operator whose generator state is saved, the state comes first. Empty for
        joint-graph nodes without a problem node, such as views.
        """
        at, state = self.of_name.get(name), self.of_name.get(name + _DRAWN)
        return () if at is None else (at,) if state is None else (state, at)

    @property
    def copies(self) -> list[int]:
        """Problem nodes for the copies of inputs (snapshots), which run first."""
        return [at for name, at in self.of_name.items() if name.endswith(_SNAPSHOT)]

    @property
    def optional(self) -> list[int]:
        """Problem nodes for generator states and copies of inputs; a schedule may omit them."""
        return [at for name, at in self.of_name.items() if name.endswith((_DRAWN, _SNAPSHOT))]

    @property
    def least_peak(self) -> int:
        """Lower bound on the peak of every schedule, in bytes.

        Generator states and copies of inputs count 0 bytes, because a schedule may omit them.
        """
        optional = set(self.optional)
        sizes = enumerate(self.problem.size)
        size = tuple(0 if i in optional else nbytes for i, nbytes in sizes)
        return least_peak(replace(self.problem, size=size))[0]

    def schedule(
        self, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> tuple[tuple[int, ...], int]:
        """Return the schedule in which a forward and a backward graph run the problem nodes.

        Returns:
            Problem nodes in the order of their runs, and the position at which backward begins.
        """
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
        """Return the names of the joint-graph nodes that forward and backward run in a schedule.

        Args:
            sequence: problem nodes in the order of their runs.
            boundary: position in ``sequence`` at which backward begins.
        """
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
    """Build the scheduling problem of a joint graph: when each node runs, or runs again, in a step.

    Args:
        joint: the joint graph.
        index: node positions of the joint graph.
        roles: classification of the nodes as forward or backward.
        costs: cost of running the node at each position once.
        unit: unit of the costs.
        decision: decision whose copies of inputs (snapshots) are part of the problem.
        recomputed: names of the random operators that are replayed, so that their generator state
            is saved.
        once: positions of nodes that may not run again.
    """
    return _Lowering(joint, index, roles).lower(
        costs, unit, decision, frozenset(recomputed), frozenset(once)
    )


class _Row(NamedTuple):
    """A node of the scheduling problem under construction.

    Attributes:
        name: name of the node.
        inputs: problem nodes that the node reads.
        cost: cost of one run.
        size: bytes of the storage.
        part_of: for a further storage that a node allocates, the problem node of this node's first
            storage; -1 for all others.
        extra: bytes of the workspace that exists only while the node runs.
    """

    name: str
    inputs: tuple[int, ...] = ()
    cost: int = 0
    size: int = 0
    part_of: int = -1
    extra: int = 0


class _Lowering:
    """State of building the scheduling problem of one joint graph."""

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
        """Build the scheduling problem.

        Args:
            costs: cost of running the node at each position once.
            unit: unit of the costs.
            decision: decision whose copies of inputs (snapshots) are part of the problem.
            replayed: names of the random operators that are replayed.
            never_again: positions of nodes that may not run again.
        """
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

        # Nodes that forward does not require read the copies of inputs, so writes to these inputs do not fix
        # their order.
        copied = {k for name in kept for k in sizes.keys(index.nodes[index.by_name[name]])}

        def touches_written(i: int) -> bool:
            """Return whether a node has effects or reads memory that is written to.

            Such a node must keep its order. ``i`` is the node's position.
            """
            if not index.plain[i] and ops.may_have_effects(index.nodes[i]):
                return True
            fixed = written if roles.required_forward[i] else written - copied
            return bool(fixed) and any(
                k in fixed for j in index.inputs[i] for k in sizes.keys(index.nodes[j])
            )

        replays = Replays(index.nodes[i] for i in index.special)
        # Nodes outside of the tangent closure go first, because forward's writes to inputs stand at the end of
        # the joint graph.
        late = roles.tangent_closure
        for i in sorted(range(len(index)), key=late.__getitem__):
            node = index.nodes[i]
            if node.op != "call_function":
                self._behind[i] = tuple(
                    self._of_key[k] for k in sizes.keys(node) if k in self._of_key
                )
                continue
            reads = {at for j in index.inputs[i] for at in self._behind[j]}
            # Later runs read the copy. The first run reads the input itself, while the copy is alive already.
            sources = [index.nodes[j] for j in index.inputs[i]] if kept else []
            reads |= {
                kept[x.name] for x in sources if x.name in kept and not is_destination(x, node)
            }
            keys = list(dict.fromkeys(sizes.keys(node)))
            fresh = [k for k in keys if k not in resident and k not in self._of_key]
            viewed = [self._of_key[k] for k in keys if k in self._of_key]
            if not fresh and keys and (is_element(node) or (index.plain[i] and not costs[i])):
                # A view becomes no problem node. Its readers read the storages it views, and inputs without a
                # storage.
                rows = self._rows
                sizeless = [at for at in reads if not rows[at].size and rows[at].part_of < 0]
                self._behind[i] = (*viewed, *sizeless)
                continue
            state: tuple[int, ...] = ()
            if node.name in replayed and ops.is_random(node) and replays(node):
                made = self._add(_Row(f"{node.name}:state", size=state_bytes(node)))
                state = (made,)
                # A later run would read the state after the draw.
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
            # If backward runs no node and only returns tangents, the schedule has no start of backward.
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
        """Add a problem node for the copy of an input, and return its index.

        Args:
            name: name of the input.
            of_name: index of the problem node by name; the copy is added.
            once: problem nodes that may not run again; the copy is added.

        Raises:
            PlanError: the graph has no node of this name.
        """
        position = self._index.by_name.get(name)
        if position is None:
            raise PlanError(f"the decision keeps a copy of '{name}', which the graph does not have")
        nbytes = tensor_bytes(self._index.values[position])
        at = self._add(_Row(f"{name}:snapshot", size=nbytes))
        # A later copy would read the input after forward's write, so the copy is made once.
        of_name[name + _SNAPSHOT] = at
        once.append(at)
        return at

    def _to_end(self) -> tuple[int, ...]:
        """Return the problem nodes of outputs and gradients, which live to the end of the step."""
        outputs, gradients, _, _ = split_outputs(self._joint)
        nodes = [value for value in (*outputs, *gradients) if isinstance(value, fx.Node)]
        keys = self._sizes.of_all(nodes)
        return tuple(sorted({self._of_key[k] for k in keys if k in self._of_key}))
