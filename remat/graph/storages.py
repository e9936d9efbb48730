"""Which values share memory, how many bytes each memory takes, and which are alive anyway.

Bytes are counted per storage. A view costs nothing beyond its base; what the step keeps alive
whatever is decided (inputs it does not mutate, the user's own outputs) costs nothing to save.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import optimization_hint

from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph, Role, split_outputs
from remat.graph.memories import storage_of
from remat.graph.roles import Roles, belongs_to_backward

#: Stands in for a symbolic size that nothing is known about.
UNBACKED_HINT = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storages:
    """Memory of the values of a joint graph; every tuple is indexed by position.

    Attributes:
        owner: the first node on the same storage (a node that is no tensor owns itself).
        nbytes: bytes of the storage for its owner, 0 for every other node.
        alive: for owners, whether the memory outlives forward whatever is decided.
        mutated: primals that forward mutates, by position; they may not be read again in backward.
        refilled: primals that the user may refill before backward, by position; where they may not
            be read again either.
    """

    owner: tuple[int, ...]
    nbytes: tuple[int, ...]
    alive: tuple[bool, ...]
    mutated: frozenset[int]
    refilled: frozenset[int] = frozenset()


def find_storages(
    joint: JointGraph,
    index: GraphIndex,
    roles: Roles,
    *,
    count_outputs: bool = False,
    refilled: Iterable[str] = (),
) -> Storages:
    """Groups the nodes of a joint graph by storage.

    Two nodes share a storage where their fake tensors do, or where an operator's schema says that
    its result aliases an argument.

    Args:
        joint: the joint graph.
        index: its positions.
        roles: its classification.
        count_outputs: count forward's outputs at their bytes instead of as free.
        refilled: names of primals that backward may not read again: the user may refill them.
    """
    n = len(index)
    owner = list(range(n))
    nbytes = [0] * n
    first: dict[int | None, int] = {}
    bases, memories = aliased_arguments(index.nodes), joint.memories.of_all(index.values)
    for i, (base, (key, storage, value)) in enumerate(zip(bases, memories, strict=True)):
        if base is not None and base in index.position:
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
    mutated = _mutated_primals(joint, index, owner)
    gone = mutated | {index.by_name[name] for name in refilled if name in index.by_name}
    alive = [False] * n
    for i, role in roles.placeholders.items():
        if role in (Role.PRIMAL, Role.FORWARD_SEED) and i not in gone:
            alive[i] = True
    for node in joint.graph.find_nodes(op="get_attr", sort=False):
        alive[owner[index.position[node]]] = True
    if not count_outputs:
        outputs, _, descs, _ = split_outputs(joint)
        for value, desc in zip(outputs, descs, strict=True):
            if isinstance(value, fx.Node) and not is_input_mutation(desc):
                position = owner[index.position[value]]
                if position not in gone:
                    alive[position] = True
    return Storages(
        owner=tuple(owner),
        nbytes=tuple(nbytes),
        alive=tuple(alive),
        mutated=frozenset(mutated),
        refilled=frozenset(gone - mutated),
    )


def aliased_argument(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the node's result is a view of, by the operator's schema."""
    return aliased_arguments((node,))[0]


def aliased_arguments(nodes: Iterable[fx.Node]) -> list[fx.Node | None]:
    """For each node, `aliased_argument`; an operator's schema is read once, not once per node."""
    known: dict[int, tuple[int, ...] | None] = {}  # by the identity of the target
    found: list[fx.Node | None] = []
    for node in nodes:
        target = id(node.target)
        places = known.get(target, ())
        if places == () and target not in known:
            places = known[target] = _may_alias(node)
        found.append(None if places == () else _aliased(node, places))
    return found


def _may_alias(node: fx.Node) -> tuple[int, ...] | None:
    """Positions of the arguments that an operator's result may be a view of; None: ask the maker."""
    target: Any = node.target
    if node.op != "call_function":
        return ()
    if isinstance(target, torch._ops.OpOverload):
        returns, arguments = target._schema.returns, target._schema.arguments
        if len(returns) != 1 or returns[0].alias_info is None:
            return ()
        return tuple(k for k, a in enumerate(arguments) if a.alias_info is not None)
    return None if getattr(target, "__name__", "") == "getitem" else ()


def _aliased(node: fx.Node, places: tuple[int, ...] | None) -> fx.Node | None:
    args = node.args
    if places is None:
        # An element of a list of views: the list itself was grouped with its base.
        made = isinstance(args[0], fx.Node) and aliased_argument(args[0]) is not None
        return args[0] if made else None  # type: ignore[return-value]
    for k in places:
        if k < len(args) and isinstance(args[k], fx.Node):
            return args[k]  # type: ignore[return-value]
    return None


def storage_key(value: Any) -> int | None:
    """Identity of the storage behind a fake tensor, or None for what has none."""
    storage = storage_of(value)
    return None if storage is None else int(storage._cdata)


def storage_bytes(value: Any) -> int:
    """Bytes of the storage behind a fake tensor; symbolic sizes count by their hint."""
    if not isinstance(value, torch.Tensor):
        return 0
    storage = storage_of(value)
    return tensor_bytes(value) if storage is None else hint(storage.nbytes())


def tensor_bytes(value: Any) -> int:
    """Bytes of the elements of a value: of a tensor, or of all tensors of a tuple."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value._has_symbolic_sizes_strides:
            return int(value.nbytes)
        return hint(value.numel()) * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(map(tensor_bytes, value))
    return 0


def hint(size: Any) -> int:
    """A size as an int, symbolic ones by their hint."""
    return size if type(size) is int else int(optimization_hint(size, fallback=UNBACKED_HINT))


def is_input_mutation(desc: Any) -> bool:
    return type(desc).__name__ in ("InputMutationAOTOutput", "MetadataMutationAOTOutput")


def _mutated_primals(joint: JointGraph, index: GraphIndex, owner: list[int]) -> set[int]:
    """Primals that hold another value in backward than forward read from them."""
    mutated: set[int] = set()
    for node, plain in zip(index.nodes, index.plain, strict=True):
        if plain or not ops.is_mutating(node) or belongs_to_backward(node):
            continue
        schema = node.target._schema  # type: ignore[union-attr]
        named = dict(zip([a.name for a in schema.arguments], node.args, strict=False))
        named.update(node.kwargs)
        for argument in schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for value in _nodes_of(named.get(argument.name)):
                mutated.add(owner[index.position[value]])
    descs = split_outputs(joint)[2]
    if any(is_input_mutation(d) for d in descs):
        by_desc = {
            repr(node.meta.get("desc")): i
            for i, node in enumerate(index.nodes)
            if node.op == "placeholder" and node.meta.get("desc") is not None
        }
        for desc in descs:
            if is_input_mutation(desc) and hasattr(desc, "mutated_input"):
                i = by_desc.get(repr(desc.mutated_input))
                if i is not None:
                    mutated.add(owner[i])
    return mutated


def _nodes_of(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, (tuple, list)):
        return [v for v in value if isinstance(v, fx.Node)]
    return []
