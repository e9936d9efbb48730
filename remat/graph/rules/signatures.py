"""Rules on the inputs and outputs of forward and backward, and on the saved values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from torch import fx

from remat.graph.joint import (
    Role,
    SavedValueKind,
    check_structure,
    output_node,
    outputs_of,
    role_of,
    split_outputs,
)
from remat.graph.rules.facts import Facts, Fault, described, nodes_of, shown

#: Roles of forward's inputs, and roles of backward's inputs after the saved values, in order.
_FORWARD_INPUTS = (Role.PRIMAL, Role.FORWARD_SEED, Role.BACKWARD_STATE)
_BACKWARD_INPUTS = (Role.TANGENT, Role.BACKWARD_SEED, Role.BACKWARD_STATE)


def graphs_are_complete(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for the first structural error of forward, and for the first structural error of backward."""
    for side in ("forward", "backward"):
        module: fx.GraphModule = getattr(facts.split, side)
        fault = check_structure(module)
        if fault is not None:
            named = re.findall(r"'([^']+)'", fault)
            nodes = tuple(n for n in module.graph.nodes if n.name in named)
            yield Fault(f"{side}: {fault}", nodes)


def forward_takes_the_inputs(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each position at which forward's inputs differ from the joint graph's inputs."""
    expected = [n for n in facts.placeholders[0] if role_of(n) in _FORWARD_INPUTS]
    yield from _compare_inputs("input", facts.placeholders[1], expected, "forward")


def forward_returns_the_outputs(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each position at which forward's user outputs differ from the joint graph's outputs."""
    outputs = split_outputs(facts.split.joint)[0]
    yield from _compare_outputs(facts, "output", facts.returned[0], outputs, "forward")


def backward_returns_the_gradients(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each position at which backward's outputs differ from the joint graph's gradients."""
    actual, expected = outputs_of(facts.split.backward.graph), split_outputs(facts.split.joint)[1]
    yield from _compare_outputs(facts, "gradient", actual, expected, "backward")


def _compare_outputs(
    facts: Facts, noun: str, actual: Sequence[Any], expected: Sequence[Any], side: str
) -> Iterator[Fault]:
    """Yield a fault for each position at which the outputs of forward or backward differ from the expected outputs."""
    if len(actual) != len(expected):
        yield Fault(f"{side} returns {len(actual)} values, expected {len(expected)}")
    for k, (a, b) in enumerate(zip(actual, expected, strict=False)):
        if not facts.is_same(a, b):
            yield Fault(f"{noun} {k} is {shown(a)}, expected {shown(b)}", nodes_of(a, b))


def _compare_inputs(
    noun: str, actual: Sequence[fx.Node], expected: Sequence[fx.Node], side: str
) -> Iterator[Fault]:
    """Yield a fault for each position at which two lists of placeholders have different names."""
    for k, (a, b) in enumerate(zip_longest(actual, expected)):
        if a is None or b is None or a.name != b.name:
            yield Fault(f"{noun} {k} of {side} is {shown(a)}, expected {shown(b)}", nodes_of(a, b))


def backward_takes_what_forward_hands(facts: Facts) -> Iterator[Fault]:
    """Yield faults if the values that forward saves are not those that backward receives."""
    for value in facts.returned[1]:
        if not isinstance(value, fx.Node):
            yield Fault(f"forward hands over {value!r}, which no node computes")
    behind = {n.name for n in _after_saved(facts)}
    inputs = [n for n in facts.placeholders[2] if n.name not in behind]
    # The sort is stable, so all other values keep their order.
    saved_values = sorted(
        facts.saved_for_backward, key=lambda n: SavedValueKind.of(n) is not SavedValueKind.SIZE
    )
    input_of, saved_of = {n.name: n for n in inputs}, {n.name: n for n in saved_values}
    lonely = [n for n in (*inputs, *saved_values) if (n.name in input_of) != (n.name in saved_of)]
    for node in lonely:
        yield Fault(f"'{node.name}' is only on one side", (node,))
    if not lonely:
        yield from _compare_inputs("input", inputs, saved_values, "backward")
    for a, b in zip(facts.saved_for_backward, facts.saved_for_backward[1:], strict=False):
        # AOTAutograd expects saved values sorted by kind, and backward takes sizes first.
        if SavedValueKind.of(a) > SavedValueKind.of(b):
            yield Fault(
                f"'{b.name}' is handed over behind '{a.name}'; expected tensors, those without a "
                "version check, objects, sizes",
                (a, b),
            )
    for node in saved_values:
        input_node = input_of.get(node.name)
        value = node.meta.get("val")
        # Most values are identical, and describing them takes longer than comparing.
        if input_node is not None and input_node.meta.get("val") is not value:
            as_given, as_taken = described(value), described(input_node.meta.get("val"))
            if as_given != as_taken:
                text = f"'{node.name}' is handed over as {as_given}, but taken as {as_taken}"
                yield Fault(text, (node,))


def backward_takes_tangents_behind(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each wrong tangent, random seed or generator state among the inputs of backward."""
    actual = facts.placeholders[2][len(facts.saved_for_backward) :]
    yield from _compare_inputs(
        "input behind what was saved", actual, _after_saved(facts), "backward"
    )


def _after_saved(facts: Facts) -> list[fx.Node]:
    """Return the joint-graph placeholders that backward takes after the saved values."""
    roles = {n: role_of(n) for n in facts.placeholders[0]}
    return [n for role in _BACKWARD_INPUTS for n, r in roles.items() if r is role]


def outputs_are_described(facts: Facts) -> Iterator[Fault]:
    """Yield a fault for each saved value whose AOTAutograd descriptor is missing or wrong."""
    n, out = facts.split.joint.num_fwd_outputs, output_node(facts.split.forward.graph)
    descs = list(out.meta.get("desc") or ())
    if len(descs) != n + len(facts.returned[1]):
        yield Fault(f"forward describes {len(descs)} of {n + len(facts.returned[1])} outputs")
    for k, (node, desc) in enumerate(zip(facts.saved_for_backward, descs[n:], strict=False)):
        kind = "NoVcCheck" if SavedValueKind.of(node) is SavedValueKind.UNCHECKED else ""
        expected = f"SavedForBackwards{kind}AOTOutput"
        if type(desc).__name__ != expected or desc.idx != k:
            yield Fault(f"'{node.name}' is described as {desc}, expected {expected}({k})", (node,))
