"""The verifier: a table of rules that every pair of forward and backward modules must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from remat.errors import PlanError
from remat.graph import ops
from remat.graph.joint import JointGraph, Role, output_node, role_of, split_outputs
from remat.graph.liveness import saved_storages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """What the rules look at.

    Attributes:
        joint: the joint graph that was split.
        forward: forward module.
        backward: backward module.
        capacity: bytes that may be saved; None without a limit.
        count_outputs: whether forward's outputs count as saved.
    """

    joint: JointGraph
    forward: fx.GraphModule
    backward: fx.GraphModule
    capacity: int | None = None
    count_outputs: bool = False

    @property
    def handed(self) -> list[fx.Node]:
        values = pytree.arg_tree_leaves(*output_node(self.forward.graph).args)
        return [v for v in values[self.joint.num_fwd_outputs :] if isinstance(v, fx.Node)]


def verify(split: Split) -> None:
    """Checks every rule.

    Raises:
        PlanError: names the first rule that is broken, and every node that breaks it.
    """
    for rule, check in RULES:
        broken = list(check(split))
        if broken:
            raise PlanError(
                f"graph '{split.joint.name}' was split wrongly: {rule}: {'; '.join(broken[:5])}"
                + (f" and {len(broken) - 5} more" if len(broken) > 5 else "")
            )


def _backward_gets_what_forward_hands(split: Split) -> Iterator[str]:
    wanted = [
        n.name
        for n in split.backward.graph.nodes
        if n.op == "placeholder"
        and role_of(n) in (Role.PRIMAL, Role.FORWARD_SEED)
        and "rng_state_" not in n.name[:14]
    ]
    given = [n.name for n in split.handed]
    for name in sorted(set(wanted).symmetric_difference(given)):
        yield f"'{name}' is only on one side"


def _signatures_are_kept(split: Split) -> Iterator[str]:
    fwd, bwd, _, _ = split_outputs(split.joint)
    values = pytree.arg_tree_leaves(*output_node(split.backward.graph).args)
    if len(values) != len(bwd):
        yield f"backward returns {len(values)} values, expected {len(bwd)}"
    for k, (mine, theirs) in enumerate(zip(values, bwd, strict=False)):
        if isinstance(theirs, fx.Node) != isinstance(mine, fx.Node):
            yield f"gradient {k} is {mine}, expected {theirs}"
    count = len(pytree.arg_tree_leaves(*output_node(split.forward.graph).args))
    if count < len(fwd):
        yield f"forward returns {count} values, expected at least {len(fwd)}"


def _nothing_random_runs_twice(split: Split) -> Iterator[str]:
    drawn = {n.name for n in split.forward.graph.nodes if _is_draw(n)}
    for node in split.backward.graph.nodes:
        if node.name in drawn and _is_draw(node):
            yield f"'{node.name}' ({node.target}) draws anew in backward instead of replaying"


def _is_draw(node: fx.Node) -> bool:
    return node.op == "call_function" and ops.is_random(node)


def _nothing_effectful_runs_twice(split: Split) -> Iterator[str]:
    done = {n.name for n in split.forward.graph.nodes if ops.is_effectful(n)}
    for node in split.backward.graph.nodes:
        if node.name in done and ops.is_effectful(node):
            yield f"'{node.name}' ({node.target}) has its effect in both halves"


def _nothing_random_is_lost(split: Split) -> Iterator[str]:
    ran = {n.name for m in (split.forward, split.backward) for n in m.graph.nodes}
    for node in split.joint.graph.nodes:
        if node.op == "call_function" and node.name not in ran:
            if ops.is_random(node):
                yield f"the random operator '{node.name}' ({node.target}) runs in neither half"
            elif ops.is_effectful(node):
                yield f"the effect '{node.name}' ({node.target}) runs in neither half"


def _tags_hold(split: Split) -> Iterator[str]:
    tags = {n.name: n.meta.get("recompute") for n in split.joint.graph.nodes}
    forward = {n.name for n in split.forward.graph.nodes}
    for node in split.backward.graph.nodes:
        if (
            node.op == "call_function"
            and node.name in forward
            and tags.get(node.name) is CheckpointPolicy.MUST_SAVE
            and not ops.default_taxonomy().is_view(node)
            and isinstance(node.meta.get("val"), torch.Tensor)
        ):
            yield f"'{node.name}' is tagged MUST_SAVE and recomputed"
    for node in split.handed:
        if tags.get(node.name) is CheckpointPolicy.MUST_RECOMPUTE and isinstance(
            node.meta.get("val"), torch.Tensor
        ):
            yield f"'{node.name}' is tagged MUST_RECOMPUTE and saved"


def _the_budget_holds(split: Split) -> Iterator[str]:
    if split.capacity is None:
        return
    saved = sum(
        saved_storages(
            split.forward, split.joint.num_fwd_outputs, count_outputs=split.count_outputs
        ).values()
    )
    if saved > split.capacity:
        yield f"{saved} bytes are saved, {split.capacity} allowed"


#: Every rule with the check that yields what breaks it.
RULES: tuple[tuple[str, Callable[[Split], Iterator[str]]], ...] = (
    ("backward must get just what forward hands over", _backward_gets_what_forward_hands),
    ("both halves must keep the signature of the joint graph", _signatures_are_kept),
    ("a random operator must not draw twice", _nothing_random_runs_twice),
    ("an effect must not happen twice", _nothing_effectful_runs_twice),
    ("random draws and effects must happen", _nothing_random_is_lost),
    ("tags must hold", _tags_hold),
    ("the budget must hold", _the_budget_holds),
)
