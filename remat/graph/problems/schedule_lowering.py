"""Build the scheduling problem of a joint graph: when each node runs, or runs again, in a step.

Problem nodes stand for storages. A joint-graph node that allocates memory becomes a problem node for its first
storage. Each further storage that the joint-graph node allocates becomes a problem node that is a part of the first
problem node. A call that allocates no memory, such as an in-place write, becomes a problem node of 0 bytes. Views
have no problem nodes. In the problem, a node that reads a view reads the view's base. The peak of a schedule equals
the peak that `remat.graph.memory.liveness.memory_curve` finds for the forward and backward graphs of the schedule.

The problem's peak and the simulated peak can differ if a value is kept although its node runs again. The problem
assumes that later readers read the recomputed value, even if the first value is still alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph, Role, split_outputs
from remat.graph.memory.storages import Sizes, tensor_bytes, workspace_bytes
from remat.graph.memory.writes import is_destination, written_by
from remat.graph.problems.lowering import Lowered, SavedKind
from remat.graph.problems.replays import is_element, state_bytes
from remat.graph.roles import Roles
from remat.solvers.schedule.problem import ScheduleProblem, least_peak

#: Suffix that the pass `functionalize-rng` gives to a random operator's run that saves the generator state.
_DRAWN = "_drawn"
#: Suffix that the pass `partition` gives to the copy of an input.
_SNAPSHOT = "_snapshot"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredSchedule:
    """The scheduling problem of a step, and maps from names of joint-graph nodes to nodes of the problem.

    Attributes:
        problem: the problem, without a limit on memory. A solution says which node runs when, and
            how often.
        of_name: index of the problem node, by joint-graph name. ``NAME_drawn`` stands for the
            generator state that the random operator NAME saves, and ``NAME_snapshot`` for the copy
            of the input NAME. Nodes that are only views are left out.
        of_value: by name of each joint-graph node with a single storage, views included, the index
            of the problem node whose run allocates this storage.
    """

    problem: ScheduleProblem
    of_name: dict[str, int]
    of_value: dict[str, int]

    def runs_of(self, name: str) -> tuple[int, ...]:
        """Return the problem nodes of a joint-graph node in forward: its generator state, if any, and its first run."""
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
        """Lower bound on the peak of every schedule, in bytes."""
        # A schedule may omit generator states and copies of inputs. If backward runs no node, tangents do not exist
        # in forward.
        optional = {*self.optional, *self.problem.at_start}
        sizes = enumerate(self.problem.size)
        size = tuple(0 if i in optional else nbytes for i, nbytes in sizes)
        return least_peak(replace(self.problem, size=size))[0]

    def with_extra(self, extra: Mapping[str, int]) -> LoweredSchedule:
        """Return a copy in which runs of the named joint-graph nodes take more bytes; names of views are ignored."""
        problem = self.problem
        total = [*problem.extra]
        for name, nbytes in extra.items():
            if name in self.of_name:
                total[self.of_name[name]] += nbytes
        return replace(self, problem=replace(problem, extra=tuple(total)))

    def orders(
        self, sequence: Sequence[int], boundary: int
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the joint-graph names of a schedule's nodes, in forward (before ``boundary``) and in backward."""
        names = self.problem.names
        forward, backward = (
            tuple(names[v] for v in part if self.of_name.get(names[v]) == v)
            for part in (sequence[:boundary], sequence[boundary:])
        )
        return forward, backward


def lower_schedule(
    joint: JointGraph, index: GraphIndex, roles: Roles, lowered: Lowered
) -> LoweredSchedule:
    """Build the scheduling problem of a joint graph: when each node runs, or runs again, in a step.

    The graph problem ``lowered`` gives costs, generator states, copies of inputs, and which nodes may run again.
    """
    chosen = lowered.problem
    of_kind: dict[SavedKind, list[int]] = {kind: [] for kind in SavedKind}
    for kind, position in zip(lowered.kind, lowered.position, strict=True):
        of_kind[kind].append(position)
    replayed = frozenset(of_kind[SavedKind.GENERATOR_STATE])
    sizes = Sizes(joint.memories)
    rows: list[_Row] = []
    #: For each joint-graph position, the problem nodes that a reader of its value reads.
    read_of: dict[int, tuple[int, ...]] = {}
    of_key: dict[int, int] = {}  # node of the problem that holds a storage

    def add(row: _Row) -> int:
        rows.append(row)
        return len(rows) - 1

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
                if key not in resident and key not in of_key:
                    at = add(_Row(index.nodes[i].name, size=sizes.nbytes[key]))
                    of_key[key] = at
                    at_boundary.append(at)
    of_name: dict[str, int] = {}
    single: list[int] = []  # nodes of the problem that run once
    backward: list[int] = []
    forward: list[int] = []
    ordered: list[int] = []
    copy_of: dict[str, int] = {}
    for i in of_kind[SavedKind.SNAPSHOT]:
        name, copied_bytes = index.nodes[i].name, tensor_bytes(index.values[i])
        copy_of[name] = of_name[name + _SNAPSHOT] = add(_Row(f"{name}:snapshot", size=copied_bytes))
        # A later copy would read the input after forward's write, so the copy is made once.
        single.append(copy_of[name])
    writes = (w for i in index.special for w in written_by(index.nodes[i]))
    written = {k for w in writes for k in sizes.keys(w)}

    # A node that forward does not require reads the copy of an input. A write to the input therefore does not fix
    # the node's place in the order.
    copied = {k for name in copy_of for k in sizes.keys(index.nodes[index.by_name[name]])}

    def touches_written(i: int) -> bool:
        """Return whether a node must keep its place, because it has effects or reads memory that is written to."""
        if not index.plain[i] and ops.may_have_effects(index.nodes[i]):
            return True
        fixed = written if roles.required_forward[i] else written - copied
        return bool(fixed) and any(
            k in fixed for j in index.inputs[i] for k in sizes.keys(index.nodes[j])
        )

    # Nodes that must run in backward (in the tangent closure) go last, because forward's writes to inputs stand at
    # the end of the joint graph.
    in_backward = roles.tangent_closure
    for i in sorted(range(len(index)), key=in_backward.__getitem__):
        node = index.nodes[i]
        if node.op != "call_function":
            read_of[i] = tuple(of_key[k] for k in sizes.keys(node) if k in of_key)
            continue
        # Nodes that must run in backward have no cost, because they run once in every plan.
        cost = 0 if in_backward[i] else chosen.cost[lowered.of_position[i]]
        reads = {at for j in index.inputs[i] for at in read_of[j]}
        # In the problem, every run of a reader reads the copy. In the step, the first run reads the input itself,
        # but the copy is alive at that time too.
        sources = [index.nodes[j] for j in index.inputs[i]] if copy_of else []
        reads |= {
            copy_of[x.name] for x in sources if x.name in copy_of and not is_destination(x, node)
        }
        keys = list(dict.fromkeys(sizes.keys(node)))
        fresh = [k for k in keys if k not in resident and k not in of_key]
        viewed = [of_key[k] for k in keys if k in of_key]
        if not fresh and keys and (is_element(node) or (index.plain[i] and not cost)):
            # A view becomes no problem node. In the problem, its readers read its base, and those of its inputs
            # that have no storage, such as sizes.
            sizeless = [at for at in reads if not rows[at].size and rows[at].part_of < 0]
            read_of[i] = (*viewed, *sizeless)
            continue
        if i in replayed:
            state = add(_Row(f"{node.name}:state", size=state_bytes(node)))
            reads.add(state)
            # A second run would read the generator state from after the draw, so the state is read once.
            single.append(state)
            of_name[node.name + _DRAWN] = state
        size = sizes.nbytes[fresh[0]] if fresh else 0
        at = add(_Row(node.name, tuple(sorted(reads)), cost, size, extra=workspace_bytes(node)))
        of_name[node.name] = at
        for n, key in enumerate(fresh):
            part = _Row(f"{node.name}:{n}", size=sizes.nbytes[key], part_of=at)
            of_key[key] = add(part) if n else at
        read_of[i] = tuple(dict.fromkeys([at, *(of_key[k] for k in fresh), *viewed]))
        if in_backward[i]:
            backward.append(at)
        elif roles.required_forward[i]:
            forward.append(at)
        if touches_written(i):
            ordered.append(at)
        if in_backward[i] or not chosen.recomputable[lowered.of_position[i]]:
            single.append(at)
    columns: Any = zip(*rows, strict=True) if rows else [()] * len(_Row._fields)
    names, inputs, costs, all_sizes, part_of, extra = columns
    outputs, gradients, _, _ = split_outputs(joint)
    returned = [value for value in (*outputs, *gradients) if isinstance(value, fx.Node)]
    to_end = {of_key[k] for k in sizes.of_all(returned) if k in of_key}
    to_end.update(at_boundary if torch_compat.holds_tangents() else ())
    problem = ScheduleProblem(
        names=names,
        inputs=inputs,
        cost=costs,
        size=all_sizes,
        part_of=part_of if any(p >= 0 for p in part_of) else (),
        extra=extra if any(extra) else (),
        once=tuple(sorted(set(single))),
        ordered=tuple(ordered),
        forward=tuple(forward),
        backward=tuple(backward),
        # If backward only returns tangents and runs no node, the schedule has no point at which backward starts.
        at_start=() if backward else tuple(at_boundary),
        at_boundary=tuple(at_boundary) if backward else (),
        to_end=tuple(sorted(to_end)),
        resident=sum(resident.values()),
        unit=chosen.unit,
    )
    memory = ((node.name, tuple(sizes.keys(node))) for node in index.nodes)
    of_value = {
        name: of_key[keys[0]] for name, keys in memory if len(keys) == 1 and keys[0] in of_key
    }
    return LoweredSchedule(problem=problem, of_name=of_name, of_value=of_value)


class _Row(NamedTuple):
    """A node of the scheduling problem under construction.

    Attributes:
        name: name of the node.
        inputs: problem nodes that the node reads.
        cost: cost of one run.
        size: bytes of the storage.
        part_of: if a joint-graph node allocates several storages and this is not the first, the
            problem node of the first storage; -1 otherwise.
        extra: bytes of the workspace that exists only while the node runs.
    """

    name: str
    inputs: tuple[int, ...] = ()
    cost: int = 0
    size: int = 0
    part_of: int = -1
    extra: int = 0
