"""Verify a partitioned graph against a table of rules for forward and backward modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from remat.errors import VerifyError
from remat.graph.capture.source import located
from remat.graph.rules import memory, runs, signatures
from remat.graph.rules.facts import Facts, Fault
from remat.graph.rules.facts import Split as Split
from remat.units import some_of

#: Largest number of faults that one error describes.
SHOWN = 5


def verify(split: Split) -> None:
    """Check every rule of `remat.graph.rules` on a partitioned graph.

    Raises:
        VerifyError: a rule is broken. The message names the first broken rule, the nodes that break
            it, and their lines in the user's source.
    """
    facts = Facts(split)
    for rule, check in RULES:
        broken = list(check(facts))
        if broken:
            raise VerifyError(_message(split, rule, broken))


def _message(split: Split, rule: str, broken: list[Fault]) -> str:
    texts = some_of([f.text for f in broken], SHOWN, "; ")
    lines = [f"graph '{split.joint.name}' was split wrongly: {rule}: {texts}"]
    nodes = {n.name: n for f in broken[:SHOWN] for n in f.nodes}
    return "\n".join(lines + [f"  {located(n)}" for n in nodes.values()])


#: Rules in the order of the checks. Each check yields the faults that break its rule. The check for whole graphs
#: runs first, because the other checks assume complete graphs.
RULES: tuple[tuple[str, Callable[[Facts], Iterator[Fault]]], ...] = (
    ("forward and backward must be whole graphs", signatures.graphs_are_complete),
    ("forward must take the inputs of the joint graph", signatures.forward_takes_the_inputs),
    ("forward must return the outputs of the joint graph", signatures.forward_returns_the_outputs),
    (
        "backward must return a gradient or None for every input",
        signatures.backward_returns_the_gradients,
    ),
    (
        "backward must take just what forward hands over",
        signatures.backward_takes_what_forward_hands,
    ),
    (
        "backward must take tangents, seeds and the state of hooks behind what was saved",
        signatures.backward_takes_tangents_behind,
    ),
    ("what forward returns must be described", signatures.outputs_are_described),
    ("a random operator must not draw twice", runs.nothing_random_runs_twice),
    ("an effect must not happen twice", runs.nothing_effectful_runs_twice),
    ("random draws and effects must happen", runs.nothing_special_is_lost),
    ("random draws and effects must keep their order", runs.order_is_kept),
    ("a node that runs in forward and in backward must be the same in both", runs.copies_are_alike),
    ("backward must branch as forward did", runs.branches_are_forwards),
    ("values that are saved must not share memory", memory.saved_values_share_no_memory),
    ("nothing may be read after it was overwritten", memory.nothing_overwritten_is_read),
    ("inputs that may be overwritten must not be read again", memory.nothing_user_mutated_is_read),
    ("tags must hold", memory.tags_hold),
    ("every value must have a fake value", memory.values_are_known),
    ("the budget must hold", memory.the_budget_holds),
)
