"""Rules on how often, and in which order, the nodes of forward and backward run.

Random draws, effects and collectives happen once. Draws and effects keep the joint graph's order. A
node that runs again runs the same operator on the same inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.copying import RUN_OF, run_of
from remat.graph.index import inputs_of
from remat.graph.problems.lowering import must_recompute
from remat.graph.rules.facts import Facts, Fault, called


def nothing_random_runs_twice(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each rerun of a random operator that draws anew instead of replaying its first draw."""
    seen: set[str] = set()
    for which, nodes in zip(("forward", "backward"), facts.special[1:], strict=True):
        for node in nodes:
            if ops.is_random(node):  # a replay does not count as random
                name = _joint_name(node)
                if name in seen:
                    yield Fault(
                        f"{called(node)} draws anew in {which} instead of replaying", (node,)
                    )
                seen.add(name)


def nothing_effectful_runs_twice(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each second run of a collective, a node with effects, or an undeclared custom operator."""
    again = [n for nodes in facts.special[1:] for n in nodes if RUN_OF in n.meta]
    for node in (*again, *(n for n in facts.special[2] if n.name in facts.calls)):
        where = "twice" if RUN_OF in node.meta else "in both graphs"
        if ops.is_effectful(node):
            yield Fault(f"{called(node)} has its effect {where}", (node,))
        elif ops.is_opaque(node) and not ops.is_random(node):
            text = f"{called(node)}, which is not declared pure, runs {where}"
            yield Fault(text, (node,))
        elif (
            ops.is_collective(node)
            # Waiting a second time for a collective communicates nothing.
            and ops.name_of(node.target) != "wait_tensor"
            # A policy may ask to run a collective again, and does so on every rank.
            and not must_recompute(node)
        ):
            yield Fault(f"{called(node)} communicates {where}", (node,))


def nothing_special_is_lost(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each random operator, effect or collective that neither forward nor backward runs."""
    ran = {n.name for nodes in facts.split_nodes for n in nodes}
    for node in facts.special[0]:
        if node.name in ran:
            continue
        if ops.is_random(node):
            yield Fault(f"the random operator {called(node)} runs in neither graph", (node,))
        elif ops.is_effectful(node):
            yield Fault(f"the effect {called(node)} runs in neither graph", (node,))
        elif ops.is_opaque(node):
            text = f"{called(node)}, which is not declared pure, runs in neither graph"
            yield Fault(text, (node,))
        elif ops.is_unread_collective(node):
            yield Fault(f"the collective {called(node)} runs in neither graph", (node,))


def order_is_kept(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each random operator, and each effect, that runs out of its joint-graph order."""
    for backward, nodes in enumerate(facts.special[1:]):
        for is_kind in (ops.draws_in_order, _is_ordered_effect):
            last: fx.Node | None = None
            for node in filter(is_kind, nodes):
                at = facts.position.get(_joint_name(node))
                replays = node.target is torch_compat.rng_prims.run_with_rng_state
                # The order of replays does not matter, because each draws from a saved state. A node that
                # backward runs again is checked in forward.
                if at is None or replays or (backward and _joint_name(node) in facts.calls):
                    continue
                before = None if last is None else _joint_name(last)
                if before is not None and facts.position[before] > at:
                    yield Fault(f"{called(node)} runs behind '{before}'", (node, last))  # type: ignore[arg-type]
                last = node


def copies_are_alike(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each rerun of a node whose operator or inputs differ from its first run."""
    for which, nodes in zip(("forward", "backward"), facts.split_nodes, strict=True):
        for node in nodes:
            again = RUN_OF in node.meta
            if node.op != "call_function" or not (again or which == "backward"):
                continue
            # A further run under a new name is compared with the joint graph's node.
            source = facts.joint.get(run_of(node)) if again else facts.calls.get(node.name)
            if source is None:
                continue
            compared_with = "the joint graph" if again else "forward"
            target, reads = _call(node)
            wanted_target, wanted_reads = _call(source)
            if target != wanted_target:
                text = f"'{node.name}' is {target} in {which}, {wanted_target} in {compared_with}"
                yield Fault(text, (source,))
            elif len(reads) != len(wanted_reads):
                text = f"'{node.name}' reads other values in {which} than in {compared_with}"
                yield Fault(text, (source,))
            for a, b in zip(map(run_of, reads), map(run_of, wanted_reads), strict=False):
                if a != b and a in facts.joint and b in facts.joint:
                    text = f"'{node.name}' reads '{a}' in {which}, '{b}' in {compared_with}"
                    yield Fault(text, (source,))


def branches_are_forwards(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each branch value that is computed again from numbers that may be rounded differently."""
    graph = facts.branches
    names = {facts.joint_index.nodes[i].name for i in graph.branch_values | graph.comparisons}
    if not names:
        return
    position = facts.joint_index.by_name
    for backward, nodes in enumerate(facts.split_nodes):
        for node in nodes:
            if run_of(node) not in names or not (backward or RUN_OF in node.meta):
                continue
            stack, seen = list(inputs_of(node)), {node}
            while stack:
                read = stack.pop()
                i = position.get(run_of(read), -1)
                if read in seen or read.op != "call_function" or i < 0 or graph.ignores_floats(i):
                    continue
                seen.add(read)
                # An exact operator adds no rounding, so its inputs are searched instead.
                if graph.is_exact(i):
                    stack.extend(inputs_of(read))
                elif RUN_OF in read.meta or (backward and read.name in facts.calls):
                    text = f"{called(node)} branches on {called(read)}, which is computed again"
                    yield Fault(text, (node, read))


def _call(node: fx.Node) -> tuple[Any, list[fx.Node]]:
    """Return the operator that a node runs, and the nodes that it reads, without states of random generators."""
    target: Any = node.target
    reads = list(inputs_of(node))
    if (
        target is operator.getitem
        and reads
        and reads[0].target is torch_compat.rng_prims.run_and_save_rng_state
    ):
        return reads[0].args[0], list(inputs_of(reads[0]))
    if target is torch_compat.rng_prims.run_and_save_rng_state:
        return node.args[0], reads
    if target is torch_compat.rng_prims.run_with_rng_state:
        return node.args[1], reads[1:]
    if target is torch_compat.rng_prims.graphsafe_run_with_rng_state:
        return node.args[0], reads[:-1]
    return target, reads


def _joint_name(node: fx.Node) -> str:
    """Return the joint-graph name of a node."""
    # The suffix marks a run that saves a generator state.
    return run_of(node).removesuffix("_drawn")


def _is_ordered_effect(node: fx.Node) -> bool:
    return ops.is_effectful(node) and not ops.is_mutating(node)
