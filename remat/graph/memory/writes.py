"""Read from an operator's schema which arguments a call writes to, and which arguments its results are views of.

A schema marks arguments and results that share memory, and arguments that the operator writes to.
The schema of `set_` states that the result shares memory with the destination, but the call makes the
destination a view of the source.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from remat import torch_compat

T = TypeVar("T")

#: Position and name of an argument in an operator's schema.
Place = tuple[int, str]
#: Operators that write to running statistics, though the operators' schemas do not say so. Values: places of the
#: statistics, and the position of the argument without which the operator writes nothing; None if it always writes.
STATISTICS: dict[Any, tuple[tuple[Place, Place], int | None]] = {
    getattr(torch.ops.aten, name).default: (
        ((at, "running_mean"), (at + 1, "running_var")),
        training,
    )
    for name, at, training in (
        ("batch_norm", 3, 5),
        ("instance_norm", 3, 5),
        ("native_batch_norm", 3, 5),
        ("cudnn_batch_norm", 3, 5),
        ("miopen_batch_norm", 3, 5),
        ("batch_norm_update_stats", 1, None),
        ("batch_norm_gather_stats", 3, None),
        ("batch_norm_gather_stats_with_counts", 3, None),
    )
}


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call writes to, in schema order, including elements of lists."""
    places = written_places(node.target) or written_statistics(node.target, node.args)
    return [v for place in places for v in _argument_nodes(node, place)]


def is_destination(argument: fx.Node, node: fx.Node) -> bool:
    """Return whether a call writes to an argument."""
    # A copy or a recomputed value cannot replace such an argument, because the write would be lost.
    return argument in written_by(node)


def may_alias(node: fx.Node) -> bool:
    """Return whether calls of a node's operator may return views, which depends on the operator alone."""
    return node.op == "call_function" and (
        node.target is operator.getitem or bool(aliased_places(node.target))
    )


def aliased_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument of which a call's result is a view; None if the result is no view."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        # An element of a list of views aliases the list, whose own aliased argument is the base.
        maker = node.args[0]
        return maker if isinstance(maker, fx.Node) and aliased_argument(maker) is not None else None
    for place in aliased_places(node.target):
        if arguments := _argument_nodes(node, place):
            return arguments[0]
    return None


def root_of(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a node's result, at the end of the chain of views."""
    while (base := aliased_argument(node)) is not None:
        node = base
    return node


def by_target(nodes: Iterable[fx.Node], ask: Callable[[fx.Node], T]) -> list[T]:
    """Return ``ask(node)`` for each node; ``ask`` must depend on the operator alone, and runs once per operator."""
    nodes = list(nodes)
    # The nodes keep their targets alive, so each `id` stays unique.
    # By identity, because hashing an overload takes longer.
    targets = [id(node.target) for node in nodes]
    one_of_each = dict(zip(targets, nodes, strict=True))
    answers = {target: ask(node) for target, node in one_of_each.items()}
    return [answers[target] for target in targets]


@functools.cache
def aliased_places(target: Any) -> tuple[Place, ...]:
    """Return (position, name) of each argument of which an operator's only result may be a view."""
    if not isinstance(target, torch_compat.OpOverload):
        return ()
    returns, arguments = torch_compat.schema(target).returns, torch_compat.schema(target).arguments
    if len(returns) != 1 or returns[0].alias_info is None:
        return ()
    places = enumerate(a.name for a in arguments)
    if target.overloadpacket is torch.ops.aten.set_:
        return tuple(p for p in places if p[1] == "source")
    return tuple(p for p, a in zip(places, arguments, strict=True) if a.alias_info is not None)


@functools.cache
def written_places(target: Any) -> tuple[Place, ...]:
    """Return (position, name) of each argument that an operator writes to."""
    if not (isinstance(target, torch_compat.OpOverload) and torch_compat.schema(target).is_mutable):
        return ()
    return tuple(
        (k, a.name)
        for k, a in enumerate(torch_compat.schema(target).arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


def written_statistics(target: Any, args: Sequence[Any]) -> tuple[Place, ...]:
    """Return (position, name) of the running statistics that a call writes to, though no schema says so."""
    places, training = STATISTICS.get(target, ((), None))
    # An argument given by name counts as true.
    return places if training is None or all(args[training : training + 1]) else ()


def _argument_nodes(node: fx.Node, place: Place) -> list[fx.Node]:
    """Return the nodes that a call receives for one argument, including elements of a list."""
    k, name = place
    value: Any = node.args[k] if k < len(node.args) else node.kwargs.get(name)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, fx.Node)]
