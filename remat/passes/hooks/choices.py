"""What a graph decides by: comparisons, indices and steps, which rounded numbers may turn over.

A product of a number that was rounded a little is off by a little; a comparison of it is right or wrong.
What backward compares again must therefore be what forward compared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from remat.graph import ops
from remat.graph.replays import maker_of
from remat.graph.writes import root_of

#: Functions with steps, by name: the least change of what they are given may change their result by much.
_STEPS = frozenset(
    [
        "sign",
        "sgn",
        "ceil",
        "floor",
        "round",
        "trunc",
        "fix",
        "frac",
        "fmod",
        "remainder",
        "floor_divide",
        "heaviside",
        "copysign",
        "threshold",
        "hardshrink",
    ]
)
#: Derivatives of functions with a kink, by name. Their first argument, a gradient, is only scaled.
_KINKS = frozenset(
    [
        "threshold_backward",
        "hardtanh_backward",
        "hardsigmoid_backward",
        "hardswish_backward",
        "hardshrink_backward",
        "softshrink_backward",
        "leaky_relu_backward",
        "rrelu_with_noise_backward",
        "elu_backward",
        "_prelu_kernel_backward",
        "multi_margin_loss_backward",
        "multilabel_margin_loss_backward",
        "grid_sampler_2d_backward",
        "grid_sampler_3d_backward",
        "logit_backward",
        "_cdist_backward",
        "_pdist_backward",
    ]
)
#: Functions that ask a number for its sign, and comparisons, which do where it is compared with 0.
_ASK_FOR_SIGNS = frozenset(["sign", "sgn", "signbit", "leaky_relu_backward"])
_COMPARE = frozenset(["gt", "ge", "lt", "le", "eq", "ne"])
#: Questions about what pairs bring back as it was.
_ASK_FOR_INFINITY = frozenset(["isinf", "isnan", "isfinite", "isposinf", "isneginf"])


def chosen_by(graph: fx.Graph, *, signs: bool = True) -> set[fx.Node]:
    """The nodes from which a graph computes something that it decides by, however far below them.

    Args:
        graph: the graph.
        signs: whether inputs of the graph count of which it only asks for the sign.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or ops.ignores_content(node):
            continue
        if node in found:
            found.update(node.all_input_nodes)
        else:
            kept = not signs and asks_for_signs(node)
            found.update(n for n in compared_by(node) if not kept or root_of(n).op != "placeholder")
    return found


def asks_for_signs(node: fx.Node) -> bool:
    """Whether all that a node decides by is the sign of what it is given: so do the derivatives of ReLUs."""
    name = ops.name_of(node.target)
    if name in _ASK_FOR_SIGNS:
        return True
    at = 1 if name in _COMPARE else 2 if name == "threshold_backward" else len(node.args)
    other: Any = node.args[at] if at < len(node.args) else None
    return isinstance(other, int | float) and other == 0


def compared_by(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that it decides by itself.

    These are the floating-point numbers from which it makes booleans or integers, and those that it puts
    through a function with steps.
    """
    name = ops.name_of(node.target)
    given = _floats(node.all_input_nodes)
    if name in _KINKS:
        scaled = node.args[0] if node.args else None
        return [n for n in given if n is not scaled or n in node.args[1:]]
    decides = name in _STEPS or node.kwargs.get("rounding_mode") is not None
    decides = decides or (_is_exact(node.meta.get("val")) and not _comes_out_the_same(node))
    return given if decides or any(map(compared_by, ops.nested_nodes(node))) else []


def _comes_out_the_same(node: fx.Node) -> bool:
    """Whether booleans or integers are drawn, or ask for what no pair rounds: an infinity, a NaN."""
    name = ops.name_of(node.target)
    if name in _ASK_FOR_INFINITY:
        return True
    if name in ("eq", "ne") and isinstance(node.args[1], float):
        return math.isinf(node.args[1])
    maker = maker_of(node)
    return maker is not node and (ops.is_random(maker) or ops.is_drawn_from_state(maker))


def _floats(nodes: list[fx.Node]) -> list[fx.Node]:
    """Those that have floating-point or complex numbers, alone or among other results."""

    def is_one(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(is_one, value))
        return isinstance(value, torch.Tensor) and not _is_exact(value)

    return [n for n in nodes if is_one(n.meta.get("val"))]


def _is_exact(value: Any) -> bool:
    """Whether a value is a tensor of booleans or integers."""
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
