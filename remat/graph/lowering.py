"""From a joint graph to the graph problem: what may be saved, what recomputed, and at what price.

The problem has a node for every value that can be computed from the primals, and two kinds of nodes
that the graph does not have: the *generator state* that a replayed random operator needs, and the
*snapshot* of an input that forward mutates later, or that the user may write to. Both can only be
saved, at their bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.errors import PlanError
from remat.graph import ops, purity
from remat.graph.index import GraphIndex
from remat.graph.ownership import Storages
from remat.graph.replays import Replays, is_element, state_bytes
from remat.graph.roles import Roles
from remat.graph.source import located
from remat.graph.storages import tensor_bytes
from remat.graph.writes import aliased_argument, is_destination
from remat.solvers.graph_problem import GraphProblem


class SavedKind(enum.Enum):
    """Meaning of saving a node of the problem."""

    VALUE = "value"
    GENERATOR_STATE = "generator state"
    SNAPSHOT = "snapshot of an input"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """A graph problem and how its nodes map back to the joint graph.

    Attributes:
        problem: the problem.
        kind: what each node of the problem is.
        position: position in the joint graph of each node of the problem: the value itself, the
            random operator whose state it is, or the input that it is a snapshot of.
        of_position: node of the problem that holds the value of a joint-graph position; -1 without.
    """

    problem: GraphProblem
    kind: tuple[SavedKind, ...]
    position: tuple[int, ...]
    of_position: tuple[int, ...]

    def priced(self, costs: Sequence[int], unit: str) -> Lowered:
        """The same problem under other costs, one for each position of the joint graph."""
        prices = (
            costs[at] if kind is SavedKind.VALUE else 0
            for kind, at in zip(self.kind, self.position, strict=True)
        )
        return replace(self, problem=self.problem.priced(tuple(prices), unit))

    def decision(self, saved: Iterable[int]) -> Decision:
        """Names what a set of saved problem nodes means in the joint graph."""
        names: dict[SavedKind, list[str]] = {k: [] for k in SavedKind}
        for i in sorted(saved):
            names[self.kind[i]].append(self.problem.names[i].split(":")[0])
        return Decision(
            saved=tuple(names[SavedKind.VALUE]),
            snapshots=tuple(names[SavedKind.SNAPSHOT]),
        )

    def saved_of(self, decision: Decision) -> tuple[int, ...]:
        """The saved problem nodes of a decision, with the generator states that it implies."""
        wanted = {(SavedKind.VALUE, n) for n in decision.saved}
        wanted |= {(SavedKind.SNAPSHOT, n) for n in decision.snapshots}
        return tuple(
            i
            for i, kind in enumerate(self.kind)
            if kind is SavedKind.GENERATOR_STATE
            or (kind, self.problem.names[i].split(":")[0]) in wanted
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """One saved value that is in the host's memory between its uses in forward and backward.

    Attributes:
        name: the value, by its node of the joint graph.
        nbytes: its bytes.
        freed_after: the node of forward after which its memory is free at the latest; empty: after its last use.
        fetched_before: the node of backward before which its fetch begins; empty: before its first use.
    """

    name: str
    nbytes: int
    freed_after: str = ""
    fetched_before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision: saved values, node orders and offloads, by names of the joint graph.

    Attributes:
        saved: nodes whose value is kept (also those that are alive anyway).
        snapshots: inputs of which a copy is kept, because forward mutates them later, or because
            the user may.
        forward_order: nodes that forward runs, in this order; one that stands there again runs again.
            Views are made where they are read. Empty: as the passes arrange it.
        backward_order: likewise for backward.
        offloads: those of the saved values that are offloaded.
    """

    saved: tuple[str, ...]
    snapshots: tuple[str, ...] = ()
    forward_order: tuple[str, ...] = ()
    backward_order: tuple[str, ...] = ()
    offloads: tuple[Offload, ...] = ()

    @property
    def is_ordered(self) -> bool:
        """Whether it says in which order things run."""
        return bool(self.forward_order or self.backward_order)

    @property
    def further_runs(self) -> tuple[str, ...]:
        """The nodes that run again in its order, one for each further run."""
        seen: set[str] = set()
        runs = (*self.forward_order, *self.backward_order)
        return tuple([n for n in runs if n in seen or seen.add(n)])  # type: ignore[func-returns-value]


def must_save(node: fx.Node) -> bool:
    """Tagged to be saved; what is tagged for the host's memory is not recomputed either."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE or must_offload(node)


def must_offload(node: fx.Node) -> bool:
    """Tagged for the host's memory; preferring it means it, wherever offloading is planned."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_CPU_OFFLOAD,
        CheckpointPolicy.PREFER_CPU_OFFLOAD,
    )


def must_recompute(node: fx.Node) -> bool:
    """Tagged for recomputation; inside a checkpointed region, preferring it means it (as in PyTorch)."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def lower(
    index: GraphIndex, roles: Roles, storages: Storages, costs: Sequence[int], unit: str
) -> Lowered:
    """Builds the graph problem of a joint graph."""
    rules = _Rules(index, storages)
    rows: list[_Row] = []
    of_position = [-1] * len(index)
    snapshot: dict[int, int] = {}

    def add(row: _Row) -> int:
        rows.append(row)
        return len(rows) - 1

    for i, node in enumerate(index.nodes):
        if roles.tangent_closure[i]:
            continue
        gone = i in storages.mutated and i not in storages.rewritten
        if gone or (node.op == "placeholder" and i in storages.user_mutated):
            # As a destination of backward's own writes the input is handed over as it is.
            writes = _backward_uses(index, roles, i)[1]
            of_position[i] = add(_Row(node.name, i, SavedKind.VALUE, save=writes))
            nbytes, name = tensor_bytes(index.values[i]), f"{node.name}:snapshot"
            source = (of_position[i],)
            snapshot[i] = add(_Row(name, i, SavedKind.SNAPSHOT, source, nbytes=nbytes, save=True))
            continue
        reads: tuple[int, ...] = tuple([of_position[j] for j in index.inputs[i]])
        if snapshot:
            reads = tuple([snapshot.get(j, of_position[j]) for j in index.inputs[i]])
        random = not index.plain[i] and ops.is_random(node)
        if random and rules.replays(node):
            nbytes, name = state_bytes(node), f"{node.name}:state"
            reads += (add(_Row(name, i, SavedKind.GENERATOR_STATE, nbytes=nbytes, save=True)),)
        save, nbytes = rules.may_save(i)
        again, forward = rules.may_recompute(i), roles.required_forward[i]
        of_position[i] = add(
            _Row(node.name, i, SavedKind.VALUE, reads, costs[i], nbytes, save, again, forward)
        )
    needed: list[int] = []
    for i, at in enumerate(of_position):
        if at < 0:
            continue
        reads_value, writes = _backward_uses(index, roles, i)
        if i in snapshot:
            needed += [snapshot[i]] if reads_value else []
            needed += [at] if writes else []
        elif reads_value or writes:
            needed.append(at)
    columns: Any = zip(*rows, strict=True) if rows else [()] * len(_Row._fields)
    names, position, kind, inputs, cost, size, savable, recomputable, in_forward = columns
    problem = GraphProblem(
        names=names,
        inputs=inputs,
        cost=cost,
        size=size,
        savable=savable,
        recomputable=recomputable,
        in_forward=in_forward,
        needed=tuple(sorted(needed)),
        unit=unit,
    )
    return Lowered(problem=problem, kind=kind, position=position, of_position=tuple(of_position))


class _Row(NamedTuple):
    """A node of the problem under construction."""

    name: str
    position: int
    kind: SavedKind
    reads: tuple[int, ...] = ()
    price: int = 0
    nbytes: int = 0
    save: bool = False
    again: bool = False
    forward: bool = True


def _backward_uses(index: GraphIndex, roles: Roles, i: int) -> tuple[bool, bool]:
    """Whether backward reads the value of node ``i``, and whether it writes to its memory."""
    reads, writes = roles.required_backward[i], False
    for u in index.users[i]:
        if not roles.tangent_closure[u]:
            continue
        if index.plain[u]:
            reads = True
            continue
        user = index.nodes[u]
        if is_destination(index.nodes[i], user):
            writes = True
        else:
            reads = True
    return reads, writes


def _tied_by_tags(index: GraphIndex, storages: Storages) -> dict[int, CheckpointPolicy]:
    """Tags of storages: a tag on a view that must be saved holds for the memory it looks at.

    Where that must be recomputed itself, the view alone is saved.
    """
    tags: dict[int, CheckpointPolicy] = {}
    for i, node in enumerate(index.nodes):
        if node.meta.get("recompute") is None:
            continue
        if not index.plain[i]:
            check_may_run_again(node)
        owner = storages.owner[i]
        if must_save(node):
            apart = must_recompute(index.nodes[owner])
            tags[i if apart else owner] = CheckpointPolicy.MUST_SAVE
        elif must_recompute(node):
            tags.setdefault(i, CheckpointPolicy.MUST_RECOMPUTE)
    return tags


def check_may_run_again(node: fx.Node) -> None:
    """Refuse MUST_RECOMPUTE on an operator whose second run has unknown effects.

    Eager checkpointing runs the operator again, from the generator state that its region began with;
    where it counts its calls, say, it gets other numbers than forward had.
    """
    must = node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
    if must and ops.is_opaque(node) and not ops.is_effectful(node):
        names = [purity.name_of(op) for op in ops.opaque_operators(node)]
        raise PlanError(
            f"'{node.name}' is tagged MUST_RECOMPUTE, but {', '.join(names)} is not known to be a "
            "function of its inputs: run again, it may draw or count anew. If it gives the same result for "
            f"the same inputs, say so: remat.declare_pure('{names[0]}'); if not, let the policy "
            f"answer MUST_SAVE or PREFER_RECOMPUTE for it\n  {located(node)}"
        )


class _Rules:
    """Which values may be saved, and which nodes may run again.

    Attributes:
        replays: which random operators can be run again.
    """

    def __init__(self, index: GraphIndex, storages: Storages) -> None:
        self._index, self._storages = index, storages
        self._tags = _tied_by_tags(index, storages)
        self.replays = Replays(index.nodes[i] for i in index.special)

    def may_save(self, i: int) -> tuple[bool, int]:
        """Whether a node may be saved, and the bytes that takes."""
        index, storages = self._index, self._storages
        node, value, owner = index.nodes[i], index.values[i], storages.owner[i]
        if node.op == "placeholder":
            return True, 0
        if node.op == "get_attr":
            return False, 0
        if isinstance(value, torch.SymInt):
            return True, 0
        if not isinstance(value, torch.Tensor):
            # Tuples are saved value by value; symbolic floats and booleans never; tokens, scripts and
            # opaque objects are carried over as they are.
            never = (tuple, list, dict, torch.SymFloat, torch.SymBool)
            return value is not None and not isinstance(value, never), 0
        if owner != i:
            # Only the owner of a memory is saved, unless a tag insists on this very view, or no view
            # operator would make it again: a call that hands back the memory it was given.
            insists = must_save(node) and must_recompute(index.nodes[owner])
            insists = insists or (is_element(node) and aliased_argument(node) is None)
            insists = insists or (ops.is_mutating(node) and bool(index.users[i]))
            return insists, storages.nbytes[owner] if insists and not storages.alive[owner] else 0
        if self._tags.get(i) is CheckpointPolicy.MUST_RECOMPUTE:
            # A tag that cannot be obeyed without changing the answer gives way.
            return self.replays.forbid(node), storages.nbytes[i]
        return True, 0 if storages.alive[i] else storages.nbytes[i]

    def may_recompute(self, i: int) -> bool:
        """Whether a node may run again."""
        index, node = self._index, self._index.nodes[i]
        if node.op in ("placeholder", "get_attr"):
            return node.op == "get_attr"
        tag = self._tags.get(i)
        if tag is CheckpointPolicy.MUST_SAVE and isinstance(index.values[i], torch.Tensor):
            return False
        if not index.plain[i] and (self.replays.forbid(node) or _needs_all_ranks(node)):
            return False
        owner, rewritten = self._storages.owner, self._storages.rewritten
        if not rewritten:
            return True
        if owner[i] in rewritten:
            # The memory as forward left it can be looked at again, not made again.
            return owner[i] != i and aliased_argument(node) is not None
        early = any(i < rewritten.get(owner[j], -1) for j in index.inputs[i])
        return not early or ops.ignores_content(node)


def _needs_all_ranks(node: fx.Node) -> bool:
    """Whether a node is a collective, which every rank would have to run again; a tag says that all do."""
    return ops.is_collective(node) and not must_recompute(node)
