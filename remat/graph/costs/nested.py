"""What a higher-order operator costs: what the graphs cost that it calls, as often as it calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from remat.graph import ops
from remat.graph.storages import hint
from remat.graph.writes import aliased_argument

#: Asks what a list of calls costs all together.
Price = Callable[[Sequence[fx.Node]], int]


def bodies(node: fx.Node) -> list[list[fx.Node]]:
    """The calls in each graph that an operator calls; none for what a model prices as a whole.

    Attention has formulas of its own: the graphs it is given are about single scores.
    """
    if "flex_attention" in str(node.target):
        return []
    return [
        [n for n in module.graph.nodes if n.op == "call_function" and not _is_free(n)]
        for module in ops.subgraphs(node)
    ]


def nested_cost(node: fx.Node, called: Sequence[Sequence[fx.Node]], price: Price) -> int:
    """Cost of an operator from that of the graphs it calls.

    Of the branches of a condition the dearest counts. A loop whose number of rounds is not known
    counts as one round.

    Args:
        node: the operator.
        called: its `bodies`.
        price: asks a cost model.
    """
    each = [price(body) for body in called]
    once = max(each) if node.target is torch.ops.higher_order.cond else sum(each)
    return once * _rounds(node)


def _rounds(node: fx.Node) -> int:
    """How often ``scan`` and ``map`` call their graph: the length of what they go over."""
    name = str(node.target)
    if name not in ("scan", "map_impl"):
        return 1
    sequences: Any = node.args[2 if name == "scan" else 1]
    first = next(iter(sequences), None) if isinstance(sequences, (tuple, list)) else None
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    return hint(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else 1


def _is_free(node: fx.Node) -> bool:
    """Views, elements of tuples, and arithmetic on sizes."""
    value = node.meta.get("val")
    return (
        getattr(node.target, "__name__", "") == "getitem"
        or isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
        or aliased_argument(node) is not None
    )
