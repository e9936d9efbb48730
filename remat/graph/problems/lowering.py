"""Build the graph problem of a joint graph: which values to save and which to recompute.

The problem has one node for each value that can be computed from the primals, and two kinds of nodes
that the joint graph lacks. A *generator state* is needed to replay a random operator. A *snapshot* is
a copy of an input that forward mutates later, or that the user may write to. Generator states and
snapshots can be saved but not recomputed.
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
from remat.graph.branch_values import FixedBranches, check_may_branch_again, fix_branches
from remat.graph.capture.source import located
from remat.graph.index import GraphIndex
from remat.graph.memory.host_copies import host_bytes_of
from remat.graph.memory.ownership import Storages
from remat.graph.memory.storages import tensor_bytes
from remat.graph.memory.writes import aliased_argument, is_destination
from remat.graph.policies import TAGGED_BY
from remat.graph.problems.replays import Replays, is_element, maker_of, state_bytes
from remat.graph.roles import Roles
from remat.solvers.graph.problem import GraphProblem


class SavedKind(enum.Enum):
    """Kind of a node of the graph problem: a value, a random generator's state or a copy of an input."""

    VALUE = "value"
    GENERATOR_STATE = "generator state"
    SNAPSHOT = "snapshot of an input"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """The graph problem of a joint graph, and the map from problem nodes to the joint graph.

    Attributes:
        problem: the graph problem, whose solution saves some nodes and recomputes others.
        kind: kind of each node of the problem.
        position: for each node of the problem, the joint-graph position of the value, of the random
            operator that draws from the state, or of the input that the snapshot copies.
        of_position: for each joint-graph position, the node of the problem that holds the value; -1
            if there is none.
        fixed: joint-graph positions of the nodes that must not run again, so that backward branches
            as forward did.
    """

    problem: GraphProblem
    kind: tuple[SavedKind, ...]
    position: tuple[int, ...]
    of_position: tuple[int, ...]
    fixed: FixedBranches = FixedBranches()

    def priced(self, costs: Sequence[int], unit: str) -> Lowered:
        """Return a copy in which values have other costs, given by joint-graph position; other nodes cost nothing."""
        prices = (
            costs[at] if kind is SavedKind.VALUE else 0
            for kind, at in zip(self.kind, self.position, strict=True)
        )
        return replace(self, problem=self.problem.priced(tuple(prices), unit))

    def decision(self, saved: Iterable[int]) -> Decision:
        """Convert the indices of saved problem nodes to a decision, which names no generator states."""
        names: dict[SavedKind, list[str]] = {k: [] for k in SavedKind}
        for i in sorted(saved):
            names[self.kind[i]].append(self.problem.names[i].split(":")[0])
        return Decision(
            saved=tuple(names[SavedKind.VALUE]),
            snapshots=tuple(names[SavedKind.SNAPSHOT]),
        )

    def saved_of(self, decision: Decision) -> tuple[int, ...]:
        """Return the indices of the problem nodes that a decision saves, and of all generator states.

        A decision does not name generator states, so all generator states count as saved.
        """
        to_save = {(SavedKind.VALUE, n) for n in decision.saved}
        to_save |= {(SavedKind.SNAPSHOT, n) for n in decision.snapshots}
        return tuple(
            i
            for i, kind in enumerate(self.kind)
            if kind is SavedKind.GENERATOR_STATE
            or (kind, self.problem.names[i].split(":")[0]) in to_save
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """One saved value that stays in the host's memory between its uses in forward and backward.

    Attributes:
        name: joint-graph name of the value's node.
        nbytes: bytes of the value.
        pinned: whether the copy is in page-locked memory, because the value is on a CUDA device.
        freed_after: name of the forward node after which the device memory must be free; empty for
            the value's last use in forward.
        fetched_before: name of the backward node before which the copy to the device starts; empty
            for the value's first use in backward.
    """

    name: str
    nbytes: int
    pinned: bool = False
    freed_after: str = ""
    fetched_before: str = ""

    @property
    def host_bytes(self) -> int:
        """Bytes that the offloaded copy takes in the host's memory; see `host_bytes_of`."""
        return host_bytes_of(self.nbytes, pinned=self.pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Saved values, node orders and offloads of a plan, given as names of joint-graph nodes.

    Attributes:
        saved: nodes whose value is saved, including values that stay alive in every plan.
        snapshots: inputs that are copied, because forward mutates them later or the user may write
            to them.
        forward_order: nodes that forward runs, in this order; a repeated name is another run of the
            node. Views are left out, because each view runs right before its first reader. Empty:
            the passes choose the order.
        backward_order: nodes that backward runs, in the form of ``forward_order``.
        offloads: the saved values that are offloaded to the host's memory.
    """

    saved: tuple[str, ...]
    snapshots: tuple[str, ...] = ()
    forward_order: tuple[str, ...] = ()
    backward_order: tuple[str, ...] = ()
    offloads: tuple[Offload, ...] = ()

    @property
    def is_ordered(self) -> bool:
        """Whether the decision fixes the order of forward's or backward's nodes."""
        return bool(self.forward_order or self.backward_order)

    @property
    def further_runs(self) -> tuple[str, ...]:
        """Names of the nodes that run again, one entry for each run after the first."""
        seen: set[str] = set()
        runs = (*self.forward_order, *self.backward_order)
        return tuple([n for n in runs if n in seen or seen.add(n)])  # type: ignore[func-returns-value]


def must_save(node: fx.Node) -> bool:
    """Return whether a checkpoint policy forbids recomputing the node, by MUST_SAVE or an offload tag."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE or must_offload(node)


def must_offload(node: fx.Node) -> bool:
    """Return whether a checkpoint policy asks to offload the node's value to the host's memory."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_CPU_OFFLOAD,
        CheckpointPolicy.PREFER_CPU_OFFLOAD,
    )


def offload_tags(nodes: Sequence[fx.Node], owner: Sequence[int]) -> dict[int, fx.Node]:
    """Return the nodes with an offload tag, each by the position of the node whose value the tag offloads."""
    tagged: dict[int, fx.Node] = {}
    for at, node in enumerate(nodes):
        if node.meta.get("recompute") is not None and must_offload(node):
            # A tag on a view applies to the owner of its storage, unless the owner must be recomputed.
            i = at if must_recompute(nodes[owner[at]]) else owner[at]
            if insists_on_host(node) or i not in tagged:
                tagged[i] = node
    return tagged


def insists_on_host(node: fx.Node) -> bool:
    """Return whether a checkpoint policy tags the node MUST_CPU_OFFLOAD."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_CPU_OFFLOAD


def must_recompute(node: fx.Node) -> bool:
    """Return whether a checkpoint policy tags the node for recomputation."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def tag_of(node: fx.Node) -> str:
    """Return, for messages, the policy that set a node's checkpoint tag, or the tag's name if no policy set it."""
    tag = node.meta["recompute"]
    return str(node.meta.get(TAGGED_BY) or getattr(tag, "name", tag))


def lower(
    index: GraphIndex, roles: Roles, storages: Storages, costs: Sequence[int], unit: str
) -> Lowered:
    """Build the graph problem of a joint graph: which values to save and which to recompute.

    Args:
        index: node positions of the joint graph.
        roles: classification of the nodes as forward or backward.
        storages: storages of the values.
        costs: cost of running the node at each position once.
        unit: unit of the costs.

    Raises:
        PlanError: a node is tagged MUST_RECOMPUTE, but may have undeclared effects or is a branch value.
    """
    rules = _Rules(index, roles, storages)
    rows: list[_Row] = []
    of_position = [-1] * len(index)
    snapshot: dict[int, int] = {}

    def add(row: _Row) -> int:
        rows.append(row)
        return len(rows) - 1

    for i, node in enumerate(index.nodes):
        # Nodes that depend on tangents run in backward in every plan, so they are left out.
        if roles.tangent_closure[i]:
            continue
        is_overwritten = i in storages.mutated and i not in storages.rewritten
        if is_overwritten or (node.op == "placeholder" and i in storages.user_mutated):
            # If backward writes to the input, the write must reach the input itself, so the input is saved
            # uncopied. Readers get the snapshot.
            writes = _backward_uses(index, roles, i)[1]
            of_position[i] = add(_Row(node.name, i, SavedKind.VALUE, save=writes))
            nbytes, name = tensor_bytes(index.values[i]), f"{node.name}:snapshot"
            source = (of_position[i],)
            snapshot[i] = add(_Row(name, i, SavedKind.SNAPSHOT, source, nbytes=nbytes, save=True))
            continue
        # A recomputed reader needs the input from before the write, which is the snapshot.
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
    needed: set[int] = set()
    for i, at in enumerate(of_position):
        if at >= 0:
            reads_value, writes = _backward_uses(index, roles, i)
            if reads_value:
                needed.add(snapshot.get(i, at))
            if writes:
                needed.add(at)
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
    return Lowered(
        problem=problem,
        kind=kind,
        position=position,
        of_position=tuple(of_position),
        fixed=rules.fixed,
    )


class _Row(NamedTuple):
    """A node of the graph problem under construction.

    Attributes:
        name: name of the node.
        position: joint-graph position of the value, of the random operator that draws from the
            state, or of the input that the snapshot copies.
        kind: whether the node is a value, a generator state or a snapshot.
        reads: problem nodes that the node reads.
        price: cost of running the node once.
        nbytes: bytes that saving the node takes.
        save: whether the node may be saved.
        again: whether the node may be recomputed.
        forward: whether forward runs the node even if nothing is saved.
    """

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
    """Return whether backward reads the value of node ``i``, and whether backward writes to it."""
    users = [u for u in index.users[i] if roles.tangent_closure[u]]
    node, nodes = index.nodes[i], index.nodes
    writing = [u for u in users if not index.plain[u] and is_destination(node, nodes[u])]
    return roles.required_backward[i] or len(writing) < len(users), bool(writing)


def _tied_by_tags(index: GraphIndex, storages: Storages) -> dict[int, CheckpointPolicy]:
    """Return the checkpoint tags that require saving or recomputing, by position of the node that a tag concerns."""
    tags: dict[int, CheckpointPolicy] = {}
    for i, node in enumerate(index.nodes):
        if node.meta.get("recompute") is None:
            continue
        if not index.plain[i]:
            check_may_run_again(node)
        owner = storages.owner[i]
        if must_save(node):
            # Saving the owner saves its views, so the tag moves to the owner, unless the owner must be recomputed.
            apart = must_recompute(index.nodes[owner])
            tags[i if apart else owner] = CheckpointPolicy.MUST_SAVE
        elif must_recompute(node):
            tags.setdefault(i, CheckpointPolicy.MUST_RECOMPUTE)
    return tags


def check_may_run_again(node: fx.Node) -> None:
    """Refuse MUST_RECOMPUTE on an operator that may have undeclared effects.

    Raises:
        PlanError: the node has the tag, and its operator is not known to be a function of its
            inputs.
    """
    must = node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
    if must and ops.is_opaque(node) and not ops.is_effectful(node):
        # Eager checkpointing runs the operator again and restores the generator state only. An operator that counts
        # its calls then returns other numbers than in forward.
        names = [purity.name_of(op) for op in ops.opaque_operators(node)]
        raise PlanError(
            f"'{node.name}' is tagged MUST_RECOMPUTE, but {', '.join(names)} is not known to be a "
            "function of its inputs: run again, it may draw or count anew. If it gives the same result for "
            f"the same inputs, say so: remat.declare_pure('{names[0]}'); if not, let the policy "
            f"answer MUST_SAVE or PREFER_RECOMPUTE for it\n  {located(node)}"
        )


class _Rules:
    """Decides which joint-graph nodes may be saved and which may run again.

    Attributes:
        replays: callable that returns whether a random operator can be replayed from a saved
            generator state.
        fixed: nodes that must not run again, so that backward branches as forward did.
    """

    def __init__(self, index: GraphIndex, roles: Roles, storages: Storages) -> None:
        self._index, self._storages = index, storages
        self._tags = _tied_by_tags(index, storages)
        self.replays = Replays(index.nodes[i] for i in index.special)
        self.fixed = fix_branches(
            index,
            roles,
            runs_again=self._may_run_again,
            is_tagged=lambda i: self._tags.get(i) is CheckpointPolicy.MUST_RECOMPUTE,
        )
        for i in sorted(self.fixed.branches):
            for node in (index.nodes[i], *filter(is_element, index.nodes[i].users)):
                check_may_branch_again(node)

    def may_save(self, i: int) -> tuple[bool, int]:
        """Return whether the node at position ``i`` may be saved, and how many bytes saving takes."""
        index, storages = self._index, self._storages
        node, value, owner = index.nodes[i], index.values[i], storages.owner[i]
        if node.op == "placeholder":
            return True, 0
        if node.op == "get_attr":
            return False, 0
        if isinstance(value, torch.SymInt):
            return True, 0
        if not isinstance(value, torch.Tensor):
            # Tuples are saved value by value. Symbolic floats and booleans are never saved. Tokens, script
            # objects and opaque objects are passed on as they are.
            never = (tuple, list, dict, torch.SymFloat, torch.SymBool)
            return value is not None and not isinstance(value, never), 0
        if owner != i:
            # Only the owner of a storage is saved, with two exceptions. A tag may require saving this very view.
            # Or backward cannot take the view again. This holds for an element of a tuple that no schema declares as
            # a view, and for a call that writes to the memory it returns.
            insists = must_save(node) and must_recompute(index.nodes[owner])
            insists = insists or (is_element(node) and aliased_argument(node) is None)
            insists = insists or (ops.is_mutating(node) and bool(index.users[i])) or i in self.fixed
            return insists, storages.nbytes[owner] if insists and not storages.alive[owner] else 0
        if self._tags.get(i) is CheckpointPolicy.MUST_RECOMPUTE:
            # The tag is ignored if a second run would change the results.
            is_kept = index.position[maker_of(node)] in self.fixed
            return is_kept or self.replays.forbid(node), storages.nbytes[i]
        return True, 0 if storages.alive[i] else storages.nbytes[i]

    def may_recompute(self, i: int) -> bool:
        """Return whether the node at position ``i`` may run again."""
        # An element cannot be taken again of a tuple that is not computed again.
        maker = self._index.position[maker_of(self._index.nodes[i])]
        return i not in self.fixed and maker not in self.fixed and self._may_run_again(i)

    def _may_run_again(self, i: int) -> bool:
        """Return whether the node at position ``i`` may run again under all rules but the one on branch values."""
        index, node = self._index, self._index.nodes[i]
        if node.op in ("placeholder", "get_attr"):
            # Backward reads an attribute from its own module, but an input must be passed to backward.
            return node.op == "get_attr"
        tag = self._tags.get(i)
        if tag is CheckpointPolicy.MUST_SAVE and isinstance(index.values[i], torch.Tensor):
            return False
        if not index.plain[i]:
            # A rerun of a collective needs every rank. A recompute tag is set on every rank.
            needs_all_ranks = ops.is_collective(node) and not must_recompute(node)
            if needs_all_ranks or self.replays.forbid(node):
                return False
        owner, rewritten = self._storages.owner, self._storages.rewritten
        if not rewritten:
            return True
        if owner[i] in rewritten:
            # The contents of the storage after forward's last write cannot be computed again. But if they are
            # saved, a view of them can be taken again.
            return owner[i] != i and aliased_argument(node) is not None
        early = any(i < rewritten.get(owner[j], -1) for j in index.inputs[i])
        return not early or ops.ignores_content(node)
