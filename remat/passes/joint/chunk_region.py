"""Find the region of a joint graph that `ChunkLoss` splits: the logits, and the calls on values of their size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from remat.errors import PlanError
from remat.graph.capture import tokens
from remat.graph.capture.tokens import Rule, Span, is_tensor, operators, rule_of, shape_of
from remat.graph.index import inputs_of
from remat.graph.joint import Role, outputs_of, role_of, tangent_dependents

_aten = torch.ops.aten
#: A value with at least 1/4 of the logits' elements is taken to have a vocabulary dimension, and called large.
_LARGE = 4
#: After the largest matrix product, another one is split too if its result has at least 1/2 as many elements.
ALSO = 2
_ALL_PRODUCTS = (*tokens.PRODUCTS, *operators("bmm baddbmm"))
#: For each operator, the positions of the arguments in which the operator is jointly linear, if all other
#: arguments are constant.
_LINEAR: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(operators("add.Tensor sub.Tensor slice_scatter"), (0, 1)),
    **dict.fromkeys(operators("scatter.src scatter_add"), (0, 3)),
    _aten.where.self: (1, 2),
    **dict.fromkeys(
        (
            *tokens.SAME,
            *operators(
                "neg view reshape _unsafe_view permute t transpose.int unsqueeze squeeze.dim squeeze.dims slice.Tensor "
                "gather sum sum.dim_IntList div.Tensor div.Scalar mul.Scalar _log_softmax_backward_data "
                "_softmax_backward_data nll_loss_backward tanh_backward"
            ),
        ),
        (0,),
    ),
}


def refused(reason: str) -> PlanError:
    return PlanError(f"the loss cannot be split into chunks: {reason}")


def find_logits(graph: fx.Graph, least: int) -> fx.Node | None:
    """Return the node that computes the logits.

    Among the matrix products in forward on which no other product in forward depends, the one with the largest result
    computes the logits.

    Args:
        graph: the joint graph.
        least: fewest elements that the result may have; if all results are smaller, None is returned. 0 for the first
            search in a graph.

    Raises:
        PlanError: ``least`` is 0, and forward has no matrix product on which no other product depends.
    """
    late = tangent_dependents(graph)
    leads: set[fx.Node] = set()
    # Large values that are not split again: the chunks of an earlier loss read them, or another such value is
    # computed from them.
    sliced: set[fx.Node] = set()
    products: list[fx.Node] = []
    for n in reversed([n for n in graph.nodes if n not in late and n.op != "output"]):
        is_last = leads.isdisjoint(n.users)
        if not is_last or n.target in _ALL_PRODUCTS:
            leads.add(n)
        is_read = any(u in sliced or tokens.CHUNK in u.meta for u in n.users)
        if is_read and is_tensor(n) and ALSO * math.prod(shape_of(n)) >= least:
            sliced.add(n)
            continue
        if is_last and n.target in tokens.PRODUCTS and n.users and tokens.CHUNK not in n.meta:
            products.append(n)
    products = [n for n in products if math.prod(shape_of(n)) >= max(1, least)]
    if not products and not least:
        raise refused("the step has no final linear layer whose result the loss reads")
    return max(products, key=lambda n: math.prod(shape_of(n)), default=None)


class Region:
    """The calls of a joint graph that `ChunkLoss` makes run chunk by chunk, each chunk on a slice of the tokens.

    The region has the matrix product that computes the logits, and the calls that read or compute values of about the
    logits' size. A call on smaller values, such as each token's loss, belongs to the region only if a call on large
    values depends on its result.

    Attributes:
        graph: the joint graph.
        nodes: all nodes of the joint graph, in order.
        logits: the node of the matrix product that computes the logits.
        tokens: number of tokens.
        rules: for each call of the region, how the call runs on a slice (`Rule`); in graph order.
        late: backward's inputs, such as tangents, and all nodes that depend on these inputs.
        exits: two kinds of calls in the region: calls that sum over the tokens, and calls whose result is read
            outside the region.
    """

    def __init__(self, graph: fx.Graph, logits: fx.Node, outputs: int) -> None:
        self.graph, self.nodes, self.logits = graph, list(graph.nodes), logits
        self.tokens, vocabulary = shape_of(logits)
        if self.tokens < 2:
            raise refused(f"'{logits.name}' holds the logits of a single token")
        self._large = self.tokens * vocabulary // _LARGE
        self.late = tangent_dependents(graph)
        self._spans: dict[fx.Node, Span] = {}
        self.rules: dict[fx.Node, Rule] = {}
        if logits.args[-2] is logits.args[-1]:
            raise refused(f"'{logits.name}' is the product of a matrix and itself")
        self._pull(logits, Span(0, 1))
        if logits not in self.rules:
            raise refused(f"the bias of '{logits.name}' differs between tokens")
        count = 0
        while count < len(self.rules):  # `_pull` may add a call whose readers were visited before
            count = len(self.rules)
            for node in self.nodes:
                self._follow(node)
        used: set[fx.Node] = set()
        for n in reversed([n for n in self.nodes if n in self.rules]):
            # Small values, such as the loss of each token, are computed whole unless a large value depends on them.
            if not used.isdisjoint(n.users) or any(map(self._is_large, (n, *self.rules[n].reads))):
                used.add(n)
        self.rules = {n: self.rules[n] for n in self.nodes if n in used}
        for n, rule in self.rules.items():
            for x in (x for x in n.all_input_nodes if x in self.rules):
                # A reader that was added before its input may expect the input's tokens in other dimensions.
                if (span := self.rules[x].span) is not None and rule.reads.get(x) != span:
                    self._refuse(n, x)
        self.exits = [
            n
            for n, rule in self.rules.items()
            if rule.span is None or any(u not in self.rules for u in n.users)
        ]
        returned = outputs_of(graph)[:outputs]
        for n in self.exits:
            if n not in self._spans or not self._is_large(n):
                continue
            if n in returned:
                raise refused(
                    f"the logits ('{n.name}') are an output of the step; return only the loss, and have no graph break "
                    "before it"
                )
            self._refuse(next(u for u in n.users if u not in self.rules), n)

    def _is_large(self, node: fx.Node) -> bool:
        """Return whether a value is so large that it has a vocabulary dimension."""
        return is_tensor(node) and math.prod(shape_of(node)) >= self._large

    def _refuse(self, node: fx.Node, read: fx.Node) -> None:
        reason = f"'{node.name}' ({node.target}) reads all of '{read.name}', which has the size of the logits"
        features, words = shape_of(self.logits.all_input_nodes[-1])
        if words <= _LARGE * features:
            reason += (
                f"; with a vocabulary of {words} and {features} features before it, other values are as large as the "
                "logits, and chunks would save little"
            )
        raise refused(reason)

    def _follow(self, node: fx.Node) -> None:
        """Add a call to the region if the call reads values of the region and can run on slices."""
        reads = [n for n in node.all_input_nodes if n in self._spans]
        if not reads or node in self.rules or node.op == "output":
            return
        large = [n for n in reads if self._is_large(n)]
        rule = rule_of(node, self._spans)
        ends = node.target in tokens.PRODUCTS or (rule is not None and rule.span is None)
        if rule is None or (ends and not large):
            if large:
                self._refuse(node, large[0])
            return
        self.rules[node] = rule
        if rule.span is not None and not ends:
            self._spans[node] = rule.span
        for n, span in rule.reads.items():
            self._pull(n, span)

    def _pull(self, node: fx.Node, span: Span) -> None:
        """Add the call that computes a large value which the region reads, if the call can run on slices."""
        rule = None
        # A value with fewer entries than tokens stays whole, because several tokens share an entry. An example
        # is a value with one entry per position of a sequence.
        has_tokens = self._is_large(node) and math.prod(span.of(shape_of(node))) == self.tokens
        if node not in self.rules and has_tokens:
            rule = rule_of(node, self._spans, span)
        if rule is not None and rule.span == span:
            self.rules[node], self._spans[node] = rule, span
            for n, own in rule.reads.items():
                self._pull(n, own)

    def levels(self, *, tangents: int) -> dict[fx.Node, int]:
        """Return the level of each node: the number of loops over all chunks that must end before the node can run.

        For example, a node that reads the loss summed over all chunks has level 1. Calls of the region
        with the same level run in one loop, chunk by chunk.

        Args:
            tangents: the level of backward's inputs, such as tangents.
        """
        level: dict[fx.Node, int] = {}
        for n in self.nodes:
            starts = tangents if n.op == "placeholder" and n in self.late else 0
            inside = n in self.rules
            waits = (
                level[x] + (x in self.rules and (not inside or self.rules[x].span is None))
                for x in n.all_input_nodes
            )
            level[n] = max((starts, *waits))
        return level

    def carriers(self) -> list[fx.Node]:
        """Return the tangents on which the region depends, and the nodes between these tangents and the region."""
        # The nodes are in graph order.
        carriers: set[fx.Node] = set()
        stack = list(self.rules)
        while stack:
            new = {x for x in inputs_of(stack.pop()) if x in self.late and x not in self.rules}
            stack += new - carriers
            carriers |= new
        return [n for n in self.nodes if n in carriers]


def scalar_tangent(region: Region, carriers: Sequence[fx.Node]) -> fx.Node | None:
    """Return the tangent that the region reads, if forward can compute gradients with 1 in its place; else None."""
    # The conditions are:
    # - The region depends on exactly one of backward's inputs, a tangent, and the tangent is a scalar.
    # - All nodes between the tangent and the region, and all nodes of the region in backward, are linear in the
    #   tangent.
    # - None of these nodes is in float16.
    roots = [n for n in carriers if n.op == "placeholder"]
    if len(roots) != 1 or role_of(roots[0]) is not Role.TANGENT or shape_of(roots[0]):
        return None
    linear = {roots[0]}
    needed = {*carriers[1:], *(n for n in region.rules if n in region.late)}
    for n in (n for n in region.nodes if n in needed):
        # Steps in float16 scale their loss, so that small gradients do not vanish. A tangent of 1 lacks that scale.
        if not _is_linear(n, linear) or n.meta["val"].dtype is torch.float16:
            return None
        linear.add(n)
    return roots[0]


def _is_zero(value: Any) -> bool:
    """Return whether an argument is the number 0, or a tensor of zeros."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value == 0
    places: dict[Any, int] = {_aten.full.default: 1, _aten.scalar_tensor.default: 0}
    place = places.get(value.target)
    return place is not None and bool(value.args[place] == 0)


def _is_linear(node: fx.Node, linear: set[fx.Node]) -> bool:
    """Return whether the result of the call ``node`` is linear in all of its arguments that are in ``linear``."""
    carried = [isinstance(x, fx.Node) and x in linear for x in node.args]
    if node.target in (_aten.mul.Tensor, _aten.mm.default):  # bilinear
        return sum(carried) == 1
    places = _LINEAR.get(node.target, ())
    return sum(carried) == len(linear.intersection(inputs_of(node))) and all(
        (c or _is_zero(x)) if k in places else not c
        for k, (c, x) in enumerate(zip(carried, node.args, strict=True))
    )
