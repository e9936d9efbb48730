"""Rules on what runs: draws, effects and communication once and in order, copies that are alike."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.index import inputs_of
from remat.graph.lowering import must_recompute
from remat.graph.rules.facts import Facts, Fault, called


def nothing_random_runs_twice(facts: Facts) -> Iterator[Fault]:
    drawn = {n.name for n in facts.special[1] if ops.is_random(n)}
    for node in facts.special[2]:
        if node.name in drawn and ops.is_random(node):
            yield Fault(f"{called(node)} draws anew in backward instead of replaying", (node,))


def nothing_effectful_runs_twice(facts: Facts) -> Iterator[Fault]:
    for node in facts.special[2]:
        if node.name not in facts.calls:
            continue
        if ops.is_effectful(node):
            yield Fault(f"{called(node)} has its effect in both halves", (node,))
        elif ops.is_opaque(node) and not ops.is_random(node):
            text = f"{called(node)}, which nobody has declared pure, runs in both halves"
            yield Fault(text, (node,))
        elif (
            ops.is_collective(node)
            and ops.name_of(node.target) != "wait_tensor"
            and not must_recompute(node)
        ):
            yield Fault(f"{called(node)} communicates in both halves", (node,))


def nothing_special_is_lost(facts: Facts) -> Iterator[Fault]:
    ran = {n.name for nodes in facts.halves for n in nodes}
    for node in facts.special[0]:
        if node.name in ran:
            continue
        if ops.is_random(node):
            yield Fault(f"the random operator {called(node)} runs in neither half", (node,))
        elif ops.is_effectful(node):
            yield Fault(f"the effect {called(node)} runs in neither half", (node,))
        elif ops.is_opaque(node):
            text = f"{called(node)}, which nobody has declared pure, runs in neither half"
            yield Fault(text, (node,))


def order_is_kept(facts: Facts) -> Iterator[Fault]:
    for nodes in facts.special[1:]:
        for is_kind in (ops.draws_in_order, _is_ordered_effect):
            last: fx.Node | None = None
            for node in filter(is_kind, nodes):
                at = facts.position.get(node.name.removesuffix("_drawn"))
                if at is None or (nodes is facts.special[2] and node.name in facts.calls):
                    continue
                before = None if last is None else last.name.removesuffix("_drawn")
                if before is not None and facts.position[before] > at:
                    yield Fault(f"{called(node)} runs behind '{before}'", (node, last))  # type: ignore[arg-type]
                last = node


def copies_are_alike(facts: Facts) -> Iterator[Fault]:
    calls = facts.calls
    for node in facts.halves[1]:
        source = calls.get(node.name)
        if source is None or node.op != "call_function":
            continue
        reads, wanted = list(inputs_of(node)), list(inputs_of(source))
        if node.target is source.target and [n.name for n in reads] == [n.name for n in wanted]:
            continue  # most are
        target, reads = _call(node)
        wanted_target, wanted = _call(source)
        if target != wanted_target:
            text = f"'{node.name}' is {target} in backward, {wanted_target} in forward"
            yield Fault(text, (source,))
        elif len(reads) != len(wanted):
            yield Fault(f"'{node.name}' reads other values in backward than in forward", (source,))
        for a, b in zip(reads, wanted, strict=False):
            if a.name != b.name and a.name in facts.joint and b.name in facts.joint:
                text = f"'{node.name}' reads '{a.name}' in backward, '{b.name}' in forward"
                yield Fault(text, (source,))


def _call(node: fx.Node) -> tuple[Any, list[fx.Node]]:
    """What a node computes, and from what; a draw that is saved or replayed by what is drawn."""
    target: Any = node.target
    reads = list(inputs_of(node))
    if (
        target is operator.getitem
        and reads
        and reads[0].target is torch_compat.rng_prims.run_and_save_rng_state
    ):
        return reads[0].args[0], list(inputs_of(reads[0]))
    if target is torch_compat.rng_prims.run_with_rng_state:
        return node.args[1], reads[1:]
    if target is torch_compat.rng_prims.graphsafe_run_with_rng_state:
        return node.args[0], reads[:-1]
    return target, reads


def _is_ordered_effect(node: fx.Node) -> bool:
    return ops.is_effectful(node) and not ops.is_mutating(node)
