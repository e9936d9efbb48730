"""Find the node that owns each storage of a joint graph, and the storages that cost nothing to save.

The owner of a storage is the first node in graph order whose value is on the storage. Storages that live through the
step in every plan, such as unmutated inputs and the user's outputs, cost nothing to save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph, Role, is_input_mutation, overwritten_after, split_outputs
from remat.graph.memory.storages import hint, storage_bytes
from remat.graph.memory.writes import (
    aliased_argument,
    by_target,
    is_destination,
    may_alias,
    written_by,
)
from remat.graph.roles import Roles, belongs_to_backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storages:
    """Storages of the values of a joint graph; every tuple is indexed by node position.

    Attributes:
        owner: position of the first node on the same storage. A node without a tensor owns itself.
        nbytes: bytes of the storage at its owner's position; 0 at every other position.
        alive: at owners' positions, whether the storage outlives forward in every plan, so that
            saving it costs nothing.
        mutated: positions of the owners of storages that forward writes to, or AOTAutograd after
            forward. Backward cannot read what such a storage contained before the write.
        rewritten: by owner's position, the position of the last write to the storage. Contains
            those storages in ``mutated`` that are read after their last write or that forward
            allocated. Backward may receive the contents of a rewritten storage after its last write.
            Usually empty: unless functionalization is off, AOTAutograd writes only to primals, after
            all reads.
        user_mutated: positions of the primals that the user may write to before backward. Backward
            cannot read these primals again.
    """

    owner: tuple[int, ...]
    nbytes: tuple[int, ...]
    alive: tuple[bool, ...]
    mutated: frozenset[int]
    rewritten: Mapping[int, int] = field(default_factory=dict)
    user_mutated: frozenset[int] = frozenset()


def find_storages(
    joint: JointGraph,
    index: GraphIndex,
    roles: Roles,
    *,
    count_outputs: bool = False,
    user_mutated: Iterable[str] = (),
) -> Storages:
    """Group the nodes of a joint graph by storage.

    Two nodes share a storage if their fake tensors share one, or if an operator's schema states that its
    result aliases an argument.

    Args:
        index: node positions of the joint graph.
        roles: classification of the nodes as forward or backward.
        count_outputs: if True, saving an output of forward costs its bytes. If False, saving an
            output costs nothing, because the user holds the output anyway.
        user_mutated: names of the primals that the user may write to before backward.
    """
    n = len(index)
    owner = list(range(n))
    nbytes = [0] * n
    first: dict[int | None, int] = {}
    views = by_target(index.nodes, may_alias)
    for i, (key, storage, value) in enumerate(joint.memories.of_all(index.values)):
        # The schema is checked before the fake value. After a pass, the fake value of a view may still be on the
        # storage of a removed node.
        base = aliased_argument(index.nodes[i]) if views[i] else None
        if base is not None:
            owner[i] = owner[index.position[base]]
            continue
        if storage is None:
            nbytes[i] = storage_bytes(value)
            continue
        at = first.setdefault(key, i)
        if at == i:
            nbytes[i] = hint(storage.nbytes())
        else:
            owner[i] = owner[at]
    mutated = _mutated(joint, index, owner)
    rewritten = _rewritten(index, owner, mutated)
    unreadable = mutated.keys() | {
        index.by_name[name] for name in user_mutated if name in index.by_name
    }
    alive = [False] * n
    for i, role in roles.placeholders.items():
        if role in (Role.PRIMAL, Role.FORWARD_SEED) and i not in unreadable:
            alive[i] = True
    # Attributes are constants of the module, which outlives the step.
    for node in joint.graph.find_nodes(op="get_attr", sort=False):
        alive[owner[index.position[node]]] = True
    # The user holds the outputs anyway. An output for an input mutation is not such an output: AOTAutograd copies it
    # into the input and then drops it.
    if not count_outputs:
        outputs, _, descs, _ = split_outputs(joint)
        for value, desc in zip(outputs, descs, strict=True):
            if isinstance(value, fx.Node) and not is_input_mutation(desc):
                position = owner[index.position[value]]
                if position not in unreadable or position in rewritten:
                    alive[position] = True
    return Storages(
        owner=tuple(owner),
        nbytes=tuple(nbytes),
        alive=tuple(alive),
        mutated=frozenset(mutated),
        rewritten=rewritten,
        user_mutated=frozenset(unreadable - mutated.keys()),
    )


def _mutated(joint: JointGraph, index: GraphIndex, owner: list[int]) -> dict[int, int]:
    """Return a dict from the position of each mutated storage's owner to the position of the storage's last write."""
    mutated: dict[int, int] = {}
    for i in index.special:
        node = index.nodes[i]
        if ops.is_mutating(node) and not belongs_to_backward(node):
            mutated.update((owner[index.position[value]], i) for value in written_by(node))
    for node in overwritten_after(joint, index.nodes):
        # AOTAutograd writes after forward, behind every node of the graph.
        mutated[owner[index.position[node]]] = len(index)
    return mutated


def _rewritten(index: GraphIndex, owner: list[int], mutated: dict[int, int]) -> dict[int, int]:
    """Select the mutated storages that are read after their last write, or that forward allocated."""
    owners = {at for at in mutated if index.nodes[at].op != "placeholder"}
    if mutated:
        for i, node in enumerate(index.nodes):
            for j in index.inputs[i]:
                is_later = i > mutated.get(owner[j], len(index))
                if is_later and not (
                    is_destination(index.nodes[j], node) or ops.ignores_content(node)
                ):
                    owners.add(owner[j])
    return {at: last for at, last in mutated.items() if at in owners}
