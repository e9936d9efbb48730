"""Split the final linear layer and the loss of a language model along the tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import networkx as nx
import torch
from torch import fx

from remat.errors import PlanError, ProblemError
from remat.graph.capture import tokens
from remat.graph.capture.fake import refresh
from remat.graph.capture.tokens import Rule, Span, is_tensor, operators, rule_of, shape_of
from remat.graph.index import are_plain, inputs_of
from remat.graph.joint import Role, output_node, outputs_of, role_of
from remat.graph.memory.storages import fake_mode_of
from remat.passes.core import pipeline_text
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State

_aten = torch.ops.aten
#: A value with at least 1/4 of the logits' elements is taken to have a vocabulary dimension, and called large.
_LARGE = 4
#: After the largest matrix product, another one is split too if its result has at least 1/2 as many elements.
_ALSO = 2
#: Keys of a node's metadata whose entries are wrong for a slice of the node's value.
_NOT_OF_SLICES = ("val", "tensor_meta", "eager_input_vals")
_LOW = (torch.bfloat16, torch.float16)
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


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Split the final linear layer and the loss of a language model into chunks of tokens.

    The logits are often the largest values of a step. After the pass, the step computes the logits chunk by chunk,
    and only the values of one chunk need to be alive together. Gradients of the hidden states are concatenated.
    Gradients of the weight and the bias are summed over the chunks, so they may differ by rounding from the gradients
    without the pass.

    Attributes:
        chunks: number of chunks. The last chunk may be shorter. 1: leave the step unchanged.
        in_forward: whether forward may also compute the gradients of each chunk, before the gradient of the loss is
            known. These gradients are multiplied by the gradient of the loss later. If False, or if this is not
            possible, backward computes the gradients chunk by chunk, and a plan may recompute the logits of each chunk.
    """

    chunks: int = 8
    in_forward: bool = True

    name: ClassVar[str] = "chunk-loss"
    stage: ClassVar[Stage] = Stage.JOINT
    keeps_numbers: ClassVar[bool] = False
    not_after: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("min-cut", "knapsack", "solve-graph", "partition"),
        "its decision would name values that chunk-loss removes",
    )
    summary: ClassVar[str] = "split the logits and the loss into chunks of tokens"

    def __post_init__(self) -> None:
        if type(self.chunks) is not int or self.chunks < 1:
            raise ProblemError(f"chunks is {self.chunks!r}; expected a number of chunks, 1 or more")

    def run(self, state: State) -> PassResult:
        """Split the loss in the state's joint graph, and return the result.

        Raises:
            PlanError: the loss cannot be split; the message names the call that prevents it.
        """
        if self.chunks == 1:
            return PassResult(state=state, modified=False)
        graph, done = state.joint.graph, 0
        with state.edit() as edit:
            _split_nll(graph)
            least = 0
            while (logits := _find_logits(graph, least)) is not None:
                least = least or math.prod(shape_of(logits)) // _ALSO
                region = _Region(graph, logits, state.joint.num_fwd_outputs)
                _Split(region, self.chunks, in_forward=self.in_forward).run()
                done += 1
            graph.lint()
            made = edit.result(f"{done} losses in {self.chunks} chunks", losses=done)
        # A plan records the number of chunks even if it is the default, because the default may change.
        chunk = f"{self.name}(chunks={self.chunks}{'' if self.in_forward else ',in-forward=false'})"
        return replace(made, state=replace(made.state, chunk=chunk))


def read_chunk(text: str) -> ChunkLoss | None:
    """Return the `ChunkLoss` pass that a plan has recorded as text; None for empty text."""
    if not text:
        return None
    (made,) = pipeline_text.read_pipeline(text, passes={ChunkLoss.name: ChunkLoss}, readers={})
    assert isinstance(made, ChunkLoss)
    return made


def _refused(reason: str) -> PlanError:
    return PlanError(f"the loss cannot be split into chunks: {reason}")


def _tangent_closure(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return backward's inputs, such as tangents, and all nodes that depend on these inputs."""
    found: set[fx.Node] = set()
    for n in nodes:
        if (n.op == "placeholder" and role_of(n).in_backward) or not found.isdisjoint(inputs_of(n)):
            found.add(n)
    return found


def _find_logits(graph: fx.Graph, least: int) -> fx.Node | None:
    """Return the node of the logits.

    This is the matrix product in forward with the largest result among those on which no other product in forward
    depends.

    Args:
        graph: the joint graph.
        least: fewest elements that the result may have; if all results are smaller, None is returned. 0 for the first
            search in a graph.

    Raises:
        PlanError: ``least`` is 0, and there is no such product.
    """
    late = _tangent_closure(graph.nodes)
    leads: set[fx.Node] = set()
    # Large values that are not split again: the chunks of an earlier loss read them, or another such value is
    # computed from them.
    sliced: set[fx.Node] = set()
    found: list[fx.Node] = []
    for n in reversed([n for n in graph.nodes if n not in late and n.op != "output"]):
        is_last = leads.isdisjoint(n.users)
        if not is_last or n.target in _ALL_PRODUCTS:
            leads.add(n)
        is_read = any(u in sliced or tokens.CHUNK in u.meta for u in n.users)
        if is_read and is_tensor(n) and _ALSO * math.prod(shape_of(n)) >= least:
            sliced.add(n)
            continue
        if is_last and n.target in tokens.PRODUCTS and n.users and tokens.CHUNK not in n.meta:
            found.append(n)
    found = [n for n in found if math.prod(shape_of(n)) >= max(1, least)]
    if not found and not least:
        raise _refused("the step has no final linear layer whose result the loss reads")
    return max(found, key=lambda n: math.prod(shape_of(n)), default=None)


class _Region:
    """The region: the calls of a joint graph that are to run chunk by chunk.

    The region has the matrix product that computes the logits, and the calls that read or compute values of about the
    logits' size. A call on smaller values, such as each token's loss, belongs to the region only if a call on large
    values depends on it.

    Attributes:
        graph: the joint graph.
        nodes: all nodes of the joint graph, in order.
        logits: the node of the product.
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
            raise _refused(f"'{logits.name}' holds the logits of a single token")
        self._large = self.tokens * vocabulary // _LARGE
        self.late = _tangent_closure(self.nodes)
        self._spans: dict[fx.Node, Span] = {}
        self.rules: dict[fx.Node, Rule] = {}
        if logits.args[-2] is logits.args[-1]:
            raise _refused(f"'{logits.name}' is the product of a matrix and itself")
        self._pull(logits, Span(0, 1))
        if logits not in self.rules:
            raise _refused(f"the bias of '{logits.name}' differs between tokens")
        count = 0
        while count < len(self.rules):  # `_pull` may add a call whose readers were visited before
            count = len(self.rules)
            for node in self.nodes:
                self._follow(node)
        kept: set[fx.Node] = set()
        for n in reversed([n for n in self.nodes if n in self.rules]):
            # Small values, such as the loss of each token, are computed whole unless a large value depends on them.
            if not kept.isdisjoint(n.users) or any(map(self._is_large, (n, *self.rules[n].reads))):
                kept.add(n)
        self.rules = {n: self.rules[n] for n in self.nodes if n in kept}
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
                raise _refused(
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
        raise _refused(reason)

    def _follow(self, node: fx.Node) -> None:
        """Add a call to the region if the call reads values of the region and can run on slices.

        Raises:
            PlanError: the call reads a large value and cannot run on slices.
        """
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
        """Add the call that computes a large value which the region reads, if the call can run on slices.

        An example is the call that computes labels in one-hot form.

        Args:
            node: the call.
            span: the dimensions of the value that hold the tokens.
        """
        rule = None
        # A value with fewer entries than tokens stays whole, because several tokens share an entry. An example
        # is a value with one entry per position of a sequence.
        whole = self._is_large(node) and math.prod(span.of(shape_of(node))) == self.tokens
        if node not in self.rules and whole:
            rule = rule_of(node, self._spans, span)
        if rule is not None and rule.span == span:
            self.rules[node], self._spans[node] = rule, span
            for n, own in rule.reads.items():
                self._pull(n, own)

    def levels(self, *, tangents: int) -> dict[fx.Node, int]:
        """Return the level of each node of the joint graph.

        A node's level counts the loops over all chunks that must have ended before the node can run. For example, a
        node that reads the loss summed over all chunks has level 1. Calls of the region with the same level run in
        one loop, chunk by chunk.

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
        """Return the tangents on which the region depends, and the nodes between these tangents and the region.

        The nodes are in graph order.
        """
        found: set[fx.Node] = set()
        stack = list(self.rules)
        while stack:
            new = {x for x in inputs_of(stack.pop()) if x in self.late and x not in self.rules}
            stack += new - found
            found |= new
        return [n for n in self.nodes if n in found]


def _scalar_tangent(region: _Region, carriers: Sequence[fx.Node]) -> fx.Node | None:
    """Return the region's tangent if forward can compute the region's gradients for a tangent of 1; else None.

    The conditions are:

    - The region depends on exactly one of backward's inputs, a tangent, and the tangent is a scalar.
    - All nodes between the tangent and the region, and all nodes of the region in backward, are linear in the tangent.
    - None of these nodes is in float16.

    Args:
        region: the region.
        carriers: the result of `_Region.carriers`.
    """
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
    """Return whether the result of the call ``node`` is linear in those of its arguments that are in ``linear``."""
    carried = [isinstance(x, fx.Node) and x in linear for x in node.args]
    if node.target in (_aten.mul.Tensor, _aten.mm.default):  # bilinear
        return sum(carried) == 1
    places = _LINEAR.get(node.target, ())
    return sum(carried) == len(linear.intersection(inputs_of(node))) and all(
        (c or _is_zero(x)) if k in places else not c
        for k, (c, x) in enumerate(zip(carried, node.args, strict=True))
    )


class _Split:
    """Rewrite of a joint graph that replaces each call of a region by one call per chunk of tokens.

    Args:
        region: the region.
        chunks: number of chunks.
        in_forward: as in `ChunkLoss`.
    """

    def __init__(self, region: _Region, chunks: int, *, in_forward: bool) -> None:
        self.region, self.graph = region, region.graph
        size = -(-region.tokens // chunks)
        self._bounds = [(a, min(a + size, region.tokens)) for a in range(0, region.tokens, size)]
        self._carriers = region.carriers()
        self._tangent = _scalar_tangent(region, self._carriers) if in_forward else None
        self._level = region.levels(tangents=0)
        if self._tangent is None or any(self._level[n] for n in region.rules):
            self._tangent, self._level = None, region.levels(tangents=1)
        for n in region.rules:
            if self._level[n] > (n in region.late):
                raise _refused(
                    f"'{n.name}' ({n.target}) needs a value that is computed from all tokens' logits"
                )
        self._mode = fake_mode_of(region.logits.meta["val"])
        self._end = output_node(self.graph)
        #: For each call of the region, the results of its chunks so far. A call that sums over the tokens is in
        #: `_sums` instead, with the sum of these results.
        self._made: dict[fx.Node, list[fx.Node]] = {}
        self._sums: dict[fx.Node, fx.Node] = {}
        #: Values from outside the region, viewed so that one dimension holds all tokens; and slices of these views.
        self._whole: dict[tuple[Any, ...], fx.Node] = {}
        #: For each node between the tangent and the region, its copy, which reads 1 in place of the tangent.
        self._copies: dict[fx.Node, fx.Node] = {}
        self._new: list[fx.Node] = []
        self._meta: dict[str, Any] = {}
        self._chunk = -1

    def run(self) -> None:
        """Replace the region in the joint graph, in place."""
        region, groups = self.region, []
        replaced: dict[fx.Node, fx.Node] = {}
        at = {n: i for i, n in enumerate(region.nodes)}
        if self._tangent is not None:
            self._carry(self._tangent)
        for level in sorted({self._level[n] for n in region.rules}):
            group = [n for n in region.rules if self._level[n] == level]
            for k in range(len(self._bounds)):
                self._chunk = k
                for n in group:
                    self._build(n, k)
            self._chunk = -1
            replaced |= {n: self._joined(n) for n in group if n in region.exits}
            at |= dict.fromkeys(self._new, at[group[0]])
            groups.append(self._new)
            self._new = []
        for n, new in replaced.items():
            if self._tangent is not None and n in region.late:
                self._meta = n.meta
                new = self._call(_aten.mul.Tensor, new, self._tangent)
                # Scaling creates a second copy of a weight's gradient, so it runs at the end of backward.
                at[new] = at[n] if region.rules[n].span is not None else len(at)
                place = at[new]
                # The product of a 16-bit and a 32-bit scalar has 32 bits.
                new = self._converted(new, n.meta["val"].dtype)
                at[new] = place
            for user in [u for u in n.users if u not in region.rules]:
                user.replace_input_with(n, new)
        for n in reversed(region.rules):
            self.graph.erase_node(n)
        self._sort(groups, at)

    def _carry(self, tangent: fx.Node) -> None:
        """Insert copies of the nodes on the paths from ``tangent`` to the calls that are split into chunks.

        The copies read the constant 1 in place of ``tangent``.
        """
        value = tangent.meta["val"]
        kinds = {"dtype": value.dtype, "device": value.device, "layout": torch.strided}
        self._copies[tangent] = self._call(_aten.full.default, [], 1, **kinds, pin_memory=False)
        for n in self._carriers[1:]:
            self._meta = n.meta
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda x: self._copies.get(x, x))
            self._copies[n] = self._call(n.target, *args, **kwargs)

    def _build(self, node: fx.Node, k: int) -> None:
        """Insert the call that computes chunk ``k`` of ``node``.

        If ``node`` sums over the tokens, the result of the call is added to the sum over the earlier chunks.

        Raises:
            PlanError: the result has another shape or dtype than expected.
        """
        self._meta, rule = node.meta, self.region.rules[node]
        start, stop = self._bounds[k]
        taken = {n: self._copies.get(n, n) for n in node.all_input_nodes}
        taken |= {n: self._take(n, span, rule.sizes, k) for n, span in rule.reads.items()}
        target, args, kwargs = rule.arguments(node, taken, stop - start)
        before = self._sums.get(node)
        low = node.meta["val"].dtype in _LOW
        if before is not None and target is _aten.mm.default and not low:
            self._sums[node] = self._call(_aten.addmm.default, before, *args)
            return
        is_same = target in tokens.VIEWS and list(shape_of(args[0])) == args[1]
        made = args[0] if is_same else self._call(target, *args, **kwargs)
        shape = shape_of(node)
        wanted = list(shape) if rule.span is None else rule.span.sliced(shape, stop - start)
        if list(shape_of(made)) != wanted or made.meta["val"].dtype is not node.meta["val"].dtype:
            raise _refused(
                f"a chunk of '{node.name}' ({node.target}) has another shape than expected"
            )
        if rule.span is not None:
            self._made.setdefault(node, []).append(made)
        elif before is not None:
            self._sums[node] = self._call(_aten.add.Tensor, before, made)
        else:  # a sum over chunks in 16 bits would lose digits
            self._sums[node] = self._converted(made, torch.float32) if low else made

    def _joined(self, node: fx.Node) -> fx.Node:
        """Return a node for the whole value of ``node``: its chunks concatenated, or the sum over the chunks."""
        self._meta, span = node.meta, self.region.rules[node].span
        if span is None:
            return self._converted(self._sums[node], node.meta["val"].dtype)
        return self._viewed(
            self._call(_aten.cat.default, self._made[node], span.stop - 1), [*shape_of(node)]
        )

    def _converted(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype is dtype:
            return node
        return self._call(torch.ops.prims.convert_element_type.default, node, dtype)

    def _viewed(self, node: fx.Node, sizes: list[int]) -> fx.Node:
        if sizes == list(shape_of(node)):
            return node
        try:
            with self._mode:
                node.meta["val"].view(sizes)
        except (RuntimeError, ValueError):  # the value's strides allow no view, as after a permute
            node = self._call(_aten.clone.default, node, memory_format=torch.contiguous_format)
        return self._call(_aten.view.default, node, sizes)

    def _take(self, node: fx.Node, span: Span, sizes: Sequence[int], k: int) -> fx.Node:
        """Return the slice of an argument for one chunk of tokens.

        Args:
            node: the argument.
            span: the argument's dimensions that hold the tokens.
            sizes: the sizes to which these dimensions broadcast.
            k: number of the chunk, from 0.
        """
        if node in self._made:
            return self._made[node][k]
        node, lacks = self._copies.get(node, node), -min(0, span.start)
        dim = span.stop + lacks - 1
        if (node, span) not in self._whole:
            full = [
                *node.meta["val"].shape[: max(0, span.start)],
                *sizes,
                *shape_of(node)[span.stop :],
            ]
            whole = node
            if full != list(shape_of(node)):
                whole = self._call(_aten.expand.default, node, full)
            flat = span.moved(lacks).sliced(full, self.region.tokens)
            self._whole[node, span] = self._viewed(whole, flat)
        if (node, span, k) not in self._whole:
            bounds = self._bounds[k]
            whole = self._whole[node, span]
            self._whole[node, span, k] = self._call(_aten.slice.Tensor, whole, dim, *bounds)
        return self._whole[node, span, k]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call as one of the nodes that replace the region, and return its node."""
        with self.graph.inserting_before(self._end):
            node: fx.Node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in self._meta.items() if k not in _NOT_OF_SLICES}
        node.meta[tokens.CHUNK] = self._chunk
        if self._tangent is not None:
            node.meta.pop("partitioner_tag", None)  # backward's chunks may run in forward
        refresh(node, self._mode)
        self._new.append(node)
        return node

    def _sort(self, groups: Sequence[Sequence[fx.Node]], at: Mapping[fx.Node, int]) -> None:
        """Sort the graph so that the nodes of each group are adjacent; other nodes keep their order if possible.

        Args:
            groups: the nodes that replace the region, in one group per level (`_Region.levels`).
            at: for each node, the wanted position; only the order of these numbers matters.

        Raises:
            PlanError: calls with effects, or that draw random numbers, cannot keep their order.
        """
        nodes = [n for n in self.graph.nodes if n.op != "output"]
        order: Any = nx.DiGraph()
        order.add_nodes_from(nodes)
        order.add_edges_from((x, n) for n in nodes for x in inputs_of(n))
        calls = [
            n
            for n, p in zip(nodes, are_plain(nodes), strict=True)
            if not p and n.op == "call_function"
        ]
        order.add_edges_from(itertools.pairwise(calls))
        for group in groups:  # the first chunk starts after all inputs of all chunks
            inside = set(group)
            order.add_edges_from(
                (x, group[0]) for n in group for x in inputs_of(n) if x not in inside
            )
            order.add_edges_from(itertools.pairwise(group))
        try:
            sort = list(nx.lexicographical_topological_sort(order, key=at.__getitem__))
        except nx.NetworkXUnfeasible:
            raise _refused("calls with effects would run in another order") from None
        for n in sort:
            self._end.prepend(n)


def _split_nll(graph: fx.Graph) -> None:
    """Replace each ``nll_loss_forward`` by calls that compute the loss of each token, and the sum or mean of these.

    Raises:
        PlanError: the loss has class weights.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        base, target, weight, reduction, ignored = node.args
        if weight is not None:
            raise _refused(
                f"'{node.name}' has class weights; the lowering \"inductor\" can split it"
            )
        value = base.meta["val"]

        def call(name: str, *args: Any, **kwargs: Any) -> fx.Node:
            made: fx.Node = graph.call_function(operators(name)[0], args, kwargs)
            made.meta = {k: v for k, v in node.meta.items() if k not in _NOT_OF_SLICES}  # noqa: B023
            refresh(made, fake_mode_of(value))  # noqa: B023
            return made

        with graph.inserting_before(node):
            zeros = [
                call("full", [], 0, dtype=kind, device=value.device, pin_memory=False)
                for kind in (torch.int64, value.dtype)
            ]
            counts = call("ne.Scalar", target, ignored)
            labels = call("unsqueeze", call("where.self", counts, target, zeros[0]), -1)
            picked = call("squeeze.dim", call("gather", base, -1, labels), -1)
            loss = call("where.self", counts, call("neg", picked), zeros[1])
            total = call("_to_copy", call("sum", counts), dtype=value.dtype)
            if reduction:
                loss = call("sum", loss)
            if reduction == 1:
                loss = call("div.Tensor", loss, total)
        for user in list(node.users):
            user.replace_all_uses_with((loss, total)[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
