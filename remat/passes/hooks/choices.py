"""Find the values from which a graph computes comparisons, indices or step functions.

A small rounding error in a factor changes a product by little, but the same error can flip a
comparison. Backward must therefore repeat a comparison of forward on exactly the same numbers.
Saved-tensor hooks that lose precision must not pack numbers that backward compares.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from remat.graph import ops
from remat.graph.branch_values import DISCONTINUOUS, FINITE_CHECKS
from remat.graph.memory.writes import root_of
from remat.graph.problems.replays import maker_of

#: Derivatives of functions with a kink, by name. Argument 0 is the incoming gradient, which the
#: derivative only scales.
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
#: Operators that read only the sign of an argument, by name.
_ASK_FOR_SIGNS = frozenset(["sign", "sgn", "signbit", "leaky_relu_backward"])
#: Comparisons, by name; a comparison with 0 depends only on the sign.
_COMPARE = frozenset(["gt", "ge", "lt", "le", "eq", "ne"])


def chosen_by(graph: fx.Graph, *, signs: bool = True) -> set[fx.Node]:
    """Return the nodes on whose values a comparison, index or step function of the graph depends.

    A node is returned even if many operators lie between the node and the comparison.

    Args:
        graph: the graph.
        signs: whether to include graph inputs whose sign alone is read by the comparison or step
            function. If False, a graph input that is only compared with 0 is left out, for example.
    """
    chosen: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # users before their inputs
        if node.op != "call_function" or ops.ignores_content(node):
            continue
        if node in chosen:
            chosen.update(node.all_input_nodes)
        else:
            is_about_signs = not signs and asks_for_signs(node)
            chosen.update(
                n for n in compared_by(node) if not is_about_signs or root_of(n).op != "placeholder"
            )
    return chosen


def asks_for_signs(node: fx.Node) -> bool:
    """Return whether ``node`` is an operator that reads only the sign of its argument."""
    # Examples are comparisons with 0 and the derivatives of ReLU functions.
    name = ops.name_of(node.target)
    if name in _ASK_FOR_SIGNS:
        return True
    at = 1 if name in _COMPARE else 2 if name == "threshold_backward" else len(node.args)
    other: Any = node.args[at] if at < len(node.args) else None
    return isinstance(other, int | float) and other == 0


def compared_by(node: fx.Node) -> list[fx.Node]:
    """Return the floating-point inputs that ``node`` reads for a comparison, an index or a step function."""
    # These are inputs from which the node computes booleans or integers, and inputs of step functions. If the node
    # calls a graph with such an operator, all floating-point inputs are returned. If the node is the derivative of a
    # function with a kink, such as ``threshold_backward``, the incoming gradient is left out. The node only scales
    # the gradient.
    name = ops.name_of(node.target)
    given = _floats(node.all_input_nodes)
    if name in _KINKS:
        scaled = node.args[0] if node.args else None
        return [n for n in given if n is not scaled or n in node.args[1:]]
    decides = name in DISCONTINUOUS or node.kwargs.get("rounding_mode") is not None
    decides = decides or (_is_exact(node.meta.get("val")) and not _comes_out_the_same(node))
    return given if decides or any(map(compared_by, ops.nested_nodes(node))) else []


def _comes_out_the_same(node: fx.Node) -> bool:
    """Return whether a boolean or integer result of ``node`` stays the same if hooks pack the node's inputs."""
    name = ops.name_of(node.target)
    # All ready-made pairs of hooks restore infinities and NaN exactly.
    if name in FINITE_CHECKS:
        return True
    if name in ("eq", "ne") and isinstance(node.args[1], float):
        return math.isinf(node.args[1])
    maker = maker_of(node)
    return maker is not node and (ops.is_random(maker) or ops.is_drawn_from_state(maker))


def _floats(nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the given nodes whose value is, or contains, a floating-point or complex tensor."""

    def has_float(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(has_float, value))
        return isinstance(value, torch.Tensor) and not _is_exact(value)

    return [n for n in nodes if has_float(n.meta.get("val"))]


def _is_exact(value: Any) -> bool:
    """Return whether a value is a tensor of booleans or integers."""
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
