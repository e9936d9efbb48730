"""From a joint graph to the graph problem: what may be saved, what recomputed, and at what price.

The problem has a node for every value that can be computed from the primals, and two kinds of nodes
that the graph does not have: the *generator state* that a replayed random operator needs, and the
*snapshot* of an input that forward mutates later. Both can only be saved, at their bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.roles import Roles
from remat.graph.storages import Storages, tensor_bytes
from remat.solvers.graph_problem import GraphProblem

#: Bytes of a generator's state on devices whose state is a tensor.
_STATE_BYTES = {"cpu": 5056, "cuda": 16, "xpu": 16}


class Kind(enum.Enum):
    """What saving a node of the problem means."""

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
    kind: tuple[Kind, ...]
    position: tuple[int, ...]
    of_position: tuple[int, ...]

    def priced(self, costs: Sequence[int], unit: str) -> Lowered:
        """The same problem under other costs, one for each position of the joint graph."""
        prices = (
            costs[at] if kind is Kind.VALUE else 0
            for kind, at in zip(self.kind, self.position, strict=True)
        )
        return replace(self, problem=self.problem.priced(tuple(prices), unit))

    def decision(self, saved: Iterable[int]) -> Decision:
        """Names what a set of saved problem nodes means in the joint graph."""
        names: dict[Kind, list[str]] = {k: [] for k in Kind}
        for i in sorted(saved):
            names[self.kind[i]].append(self.problem.names[i].split(":")[0])
        return Decision(
            saved=tuple(names[Kind.VALUE]),
            snapshots=tuple(names[Kind.SNAPSHOT]),
        )

    def saved_of(self, decision: Decision) -> tuple[int, ...]:
        """The saved problem nodes of a decision, with the generator states that it implies."""
        wanted = {(Kind.VALUE, n) for n in decision.saved}
        wanted |= {(Kind.SNAPSHOT, n) for n in decision.snapshots}
        return tuple(
            i
            for i, kind in enumerate(self.kind)
            if kind is Kind.GENERATOR_STATE or (kind, self.problem.names[i].split(":")[0]) in wanted
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is kept from forward to backward, by names of nodes of the joint graph.

    Attributes:
        saved: nodes whose value is kept (also those that are alive anyway).
        snapshots: inputs of which a copy is kept, because forward mutates them later.
    """

    saved: tuple[str, ...]
    snapshots: tuple[str, ...] = ()


def must_save(node: fx.Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def must_recompute(node: fx.Node) -> bool:
    """Tagged for recomputation; inside a checkpointed region, preferring it means it (as in PyTorch)."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def state_bytes(node: fx.Node) -> int:
    """Bytes of the generator state that replaying a random operator needs."""
    return _STATE_BYTES.get(random_device(node).type, 5056)


def random_device(node: fx.Node) -> torch.device:
    """The device whose generator a random operator draws from."""
    for value in (node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)):
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor):
                return tensor.device
    return torch.device("cpu")


def is_replayable(node: fx.Node) -> bool:
    """Whether a random operator can be run again from a saved generator state."""
    return isinstance(node.target, torch._ops.OpOverload) and not _is_seed_source(node)


def _is_seed_source(node: fx.Node) -> bool:
    """Inductor's seed operators: their few bytes are saved, and what expands them is pure."""
    name = str(node.target)
    return "inductor_seed" in name or "inductor_rand_eager_offset" in name


def lower(
    index: GraphIndex, roles: Roles, storages: Storages, costs: Sequence[int], unit: str
) -> Lowered:
    """Builds the graph problem of a joint graph."""
    tied = _tied_by_tags(index, storages)
    names: list[str] = []
    inputs: list[tuple[int, ...]] = []
    cost: list[int] = []
    size: list[int] = []
    savable: list[bool] = []
    recomputable: list[bool] = []
    in_forward: list[bool] = []
    kind: list[Kind] = []
    position: list[int] = []
    of_position = [-1] * len(index)
    snapshot: dict[int, int] = {}

    def add(
        name: str,
        at: int,
        what: Kind,
        *,
        reads: tuple[int, ...] = (),
        price: int = 0,
        nbytes: int = 0,
        save: bool,
        again: bool,
        forward: bool = True,
    ) -> int:
        names.append(name)
        inputs.append(reads)
        cost.append(price)
        size.append(nbytes)
        savable.append(save)
        recomputable.append(again)
        in_forward.append(forward)
        kind.append(what)
        position.append(at)
        return len(names) - 1

    for i, node in enumerate(index.nodes):
        if roles.tangent_closure[i]:
            continue
        if i in storages.mutated and node.op == "placeholder":
            # As a destination of backward's own writes the input is handed over as it is.
            of_position[i] = add(
                node.name, i, Kind.VALUE, save=bool(_backward_uses(index, roles, i)[1]), again=False
            )
            snapshot[i] = add(
                f"{node.name}:snapshot",
                i,
                Kind.SNAPSHOT,
                reads=(of_position[i],),
                nbytes=tensor_bytes(node.meta.get("val")),
                save=True,
                again=False,
            )
            continue
        reads = [snapshot.get(j, of_position[j]) for j in index.inputs[i]]
        random = node.op == "call_function" and ops.is_random(node)
        if random and is_replayable(node):
            reads.append(
                add(
                    f"{node.name}:state",
                    i,
                    Kind.GENERATOR_STATE,
                    nbytes=state_bytes(node),
                    save=True,
                    again=False,
                )
            )
        save, nbytes = _may_save(index, storages, tied, i)
        of_position[i] = add(
            node.name,
            i,
            Kind.VALUE,
            reads=tuple(reads),
            price=costs[i],
            nbytes=nbytes,
            save=save,
            again=_may_recompute(index, storages, tied, i, random=random),
            forward=roles.required_forward[i],
        )
    needed: list[int] = []
    for i in range(len(index)):
        if of_position[i] < 0:
            continue
        reads_value, writes = _backward_uses(index, roles, i)
        if i not in snapshot:
            needed += [of_position[i]] if reads_value or writes else []
        else:
            needed += [snapshot[i]] if reads_value else []
            needed += [of_position[i]] if writes else []
    problem = GraphProblem(
        names=tuple(names),
        inputs=tuple(inputs),
        cost=tuple(cost),
        size=tuple(size),
        savable=tuple(savable),
        recomputable=tuple(recomputable),
        in_forward=tuple(in_forward),
        needed=tuple(sorted(needed)),
        unit=unit,
    )
    return Lowered(
        problem=problem, kind=tuple(kind), position=tuple(position), of_position=tuple(of_position)
    )


def _backward_uses(index: GraphIndex, roles: Roles, i: int) -> tuple[bool, bool]:
    """Whether backward reads the value of node ``i``, and whether it writes to its memory."""
    node = index.nodes[i]
    users = [index.nodes[u] for u in index.users[i] if roles.tangent_closure[u]]
    writes = [ops.is_mutating(u) and bool(u.args) and u.args[0] is node for u in users]
    return roles.required_backward[i] or not all(writes), any(writes)


def _tied_by_tags(index: GraphIndex, storages: Storages) -> dict[int, CheckpointPolicy]:
    """Tags of storages: a tag on a view that must be saved holds for the memory it looks at."""
    tags: dict[int, CheckpointPolicy] = {}
    for i, node in enumerate(index.nodes):
        owner = storages.owner[i]
        if must_save(node) and not must_recompute(index.nodes[owner]):
            tags[owner] = CheckpointPolicy.MUST_SAVE
        elif must_recompute(node):
            tags.setdefault(i, CheckpointPolicy.MUST_RECOMPUTE)
    return tags


def _may_save(
    index: GraphIndex, storages: Storages, tags: dict[int, CheckpointPolicy], i: int
) -> tuple[bool, int]:
    """Whether a node may be saved, and the bytes that takes."""
    node = index.nodes[i]
    value = node.meta.get("val")
    owner = storages.owner[i]
    if node.op == "placeholder":
        return True, 0
    if node.op == "get_attr":
        return False, 0
    if isinstance(value, torch.SymInt):
        return True, 0
    if not isinstance(value, torch.Tensor):
        # Tuples are saved value by value; symbolic floats and booleans never; tokens, scripts and
        # opaque objects are carried over as they are.
        return value is not None and not isinstance(
            value, (tuple, list, dict, torch.SymFloat, torch.SymBool)
        ), 0
    if owner != i:
        # Only the owner of a memory is saved, unless a tag insists on this very view.
        insists = must_save(node) and must_recompute(index.nodes[owner])
        return insists, storages.nbytes[owner] if insists and not storages.alive[owner] else 0
    if tags.get(i) is CheckpointPolicy.MUST_RECOMPUTE:
        # A tag that cannot be obeyed without changing the answer gives way: effects happen once.
        return ops.is_effectful(node), storages.nbytes[i]
    return True, 0 if storages.alive[i] else storages.nbytes[i]


def _may_recompute(
    index: GraphIndex,
    storages: Storages,
    tags: dict[int, CheckpointPolicy],
    i: int,
    *,
    random: bool,
) -> bool:
    node = index.nodes[i]
    if node.op == "placeholder":
        return False
    if node.op == "get_attr":
        return True
    if tags.get(i) is CheckpointPolicy.MUST_SAVE and isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if random and not is_replayable(node):
        return False
    if ops.is_effectful(node):
        return False
    if ops.is_uninitialised(node) and not all(ops.ignores_content(u) for u in node.users):
        return False
    if ops.is_collective(node) and not must_recompute(node):
        return False
    return (
        storages.owner[i] not in storages.mutated
        or index.nodes[storages.owner[i]].op == "placeholder"
    )
