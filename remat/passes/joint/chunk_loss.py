"""Split the final linear layer and the loss of a language model along the tokens."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from remat.errors import PlanError, ProblemError
from remat.graph import ops, tokens
from remat.graph.fake import refresh
from remat.graph.index import are_plain, inputs_of
from remat.graph.joint import Role, output_node, outputs_of, role_of
from remat.graph.storages import fake_mode_of
from remat.graph.tokens import Rule, Span, is_tensor, rule_of, shape_of
from remat.passes.core import pipeline_text
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State

_aten = torch.ops.aten
#: A value with at least 1/4 of the logits' elements has a vocabulary dimension.
_LARGE = 4
#: A second product is split too if its result has at least 1/2 of the elements of the first's.
_ALSO = 2
#: Metadata of the captured graph that does not hold for slices.
_NOT_OF_SLICES = ("val", "tensor_meta", "eager_input_vals")
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Split the final linear layer and the loss of a language model into chunks of tokens.

    The logits are often the largest values of a step. After the pass, the step computes them chunk by chunk, and
    only the values of one chunk need to be alive together. Gradients of the hidden states are concatenated.
    Gradients of the weight and the bias are summed over the chunks, so they may differ from those of the step by
    rounding.

    Attributes:
        chunks: number of chunks. The last chunk may be shorter. 1: leave the step unchanged.
        in_forward: whether the chunks of backward may run right after those of forward, before the gradient of the
            loss is known. Their results are then multiplied by this gradient. If that is not possible, backward
            runs its chunks itself, and a plan may recompute the logits of each chunk.
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
            raise ProblemError(
                f"chunks is {self.chunks!r}; expected a number of chunks, 1 or more"
            )

    def run(self, state: State) -> PassResult:
        """Split the loss.

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
                region = _Region(graph, logits, state.joint.num_fwd_outputs)
                least = least or math.prod(shape_of(logits)) // _ALSO
                _Split(region, self.chunks, in_forward=self.in_forward).run()
                done += 1
            graph.lint()
            made = edit.result(f"{done} losses in {self.chunks} chunks", losses=done)
        # A plan records the number in any case, so that it does not depend on the default.
        chunk = f"{self.name}(chunks={self.chunks}{'' if self.in_forward else ',in-forward=false'})"
        return replace(made, state=replace(made.state, chunk=chunk))


def read_chunk(text: str) -> ChunkLoss | None:
    """Return the pass that a plan records as text; None for empty text."""
    if not text:
        return None
    (made,) = pipeline_text.read_pipeline(text, passes={ChunkLoss.name: ChunkLoss}, readers={})
    assert isinstance(made, ChunkLoss)
    return made


def _refused(reason: str) -> PlanError:
    return PlanError(f"the loss cannot be split into chunks: {reason}")


def _tangent_closure(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on a tangent, or that backward alone receives."""
    found: set[fx.Node] = set()
    for n in nodes:
        if (n.op == "placeholder" and role_of(n).in_backward) or not found.isdisjoint(inputs_of(n)):
            found.add(n)
    return found


def _find_logits(graph: fx.Graph, least: int) -> fx.Node | None:
    """Return the largest result of a product in forward on which no other product of forward depends.

    Args:
        graph: the joint graph.
        least: number of elements below which the result is None. 0 for the first search.

    Raises:
        PlanError: it is the first search, and there is no such product.
    """
    late = _tangent_closure(graph.nodes)
    leads: set[fx.Node] = set()
    found: list[fx.Node] = []
    for n in reversed(list(graph.nodes)):
        if n.op == "output" or n in late:
            continue
        is_product = n.target in (*tokens.PRODUCTS, _aten.bmm.default, _aten.baddbmm.default)
        if any(u in leads for u in n.users):
            leads.add(n)
        elif is_product:
            leads.add(n)
            if n.target in tokens.PRODUCTS and n.users and _CHUNK not in n.meta:
                found.append(n)
    found = [n for n in found if math.prod(shape_of(n)) >= max(1, least)]
    if found:
        return max(found, key=lambda n: math.prod(shape_of(n)))
    if least:
        return None
    raise _refused("the step has no final linear layer whose result the loss reads")


#: Metadata key of a node that runs on a chunk of tokens.
_CHUNK = "remat_chunk"


class _Region:
    """The calls that run chunk by chunk: the product of the logits, and what has their size.

    Attributes:
        graph: the joint graph.
        logits: the product.
        tokens: number of tokens.
        rules: rule of each call of the region, in graph order.
        late: all nodes of the graph that depend on a tangent.
        exits: the calls whose results other nodes of the graph read.
    """

    def __init__(self, graph: fx.Graph, logits: fx.Node, outputs: int) -> None:
        self.graph, self.logits = graph, logits
        self.tokens, vocabulary = shape_of(logits)
        self._large = self.tokens * vocabulary // _LARGE
        if self.tokens < 2:
            raise _refused(f"'{logits.name}' holds the logits of a single token")
        self.nodes = list(graph.nodes)
        self.late = _tangent_closure(self.nodes)
        self._at = {n: i for i, n in enumerate(self.nodes)}
        self._spans: dict[fx.Node, Span] = {}
        self.rules: dict[fx.Node, Rule] = {}
        self._pull(logits, Span(0, 1))
        if logits not in self.rules:
            raise _refused(f"the bias of '{logits.name}' differs between tokens")
        count = 0
        while count < len(self.rules):  # a value that is added late may have earlier readers
            count = len(self.rules)
            for node in self.nodes:
                self._follow(node)
        self._drop_small()
        self.exits = [n for n in self.rules if any(u not in self.rules for u in n.users)]
        self._check_exits(outputs)

    def is_large(self, node: fx.Node) -> bool:
        """Return whether a value has a vocabulary dimension."""
        return is_tensor(node) and math.prod(shape_of(node)) >= self._large

    def _follow(self, node: fx.Node) -> None:
        """Add a call to the region if it reads values of the region and can run on slices.

        Raises:
            PlanError: the call reads a large value and cannot run on slices.
        """
        reads = [n for n in node.all_input_nodes if n in self._spans]
        if not reads or node in self.rules or node.op == "output":
            return
        large = [n for n in reads if self.is_large(n)]
        rule = rule_of(node, self._spans)
        if rule is None:
            if large:
                raise _refused(
                    f"'{node.name}' ({node.target}) reads all of '{large[0].name}', which has the size of the logits"
                )
            return
        if (rule.product or rule.span is None) and not large:
            return
        self.rules[node] = rule
        if rule.span is not None and not rule.product:
            self._spans[node] = rule.span
        for n, span in rule.reads.items():
            self._pull(n, span)

    def _pull(self, node: fx.Node, span: Span) -> None:
        """Add a large value that the region reads, such as the labels in one-hot form, if it can be computed in slices."""
        if node in self.rules or not self.is_large(node):
            return
        rule = rule_of(node, self._spans, span)
        if rule is not None and rule.span == span:
            self.rules[node], self._spans[node] = rule, span
            for n, own in rule.reads.items():
                self._pull(n, own)

    def _drop_small(self) -> None:
        """Drop calls on small values, such as the loss of each token, unless a large value depends on them."""
        kept: set[fx.Node] = set()
        for n in sorted(self.rules, key=self._at.__getitem__, reverse=True):
            if not kept.isdisjoint(n.users) or any(map(self.is_large, (n, *self.rules[n].reads))):
                kept.add(n)
        self.rules = {n: self.rules[n] for n in self.nodes if n in kept}

    def _check_exits(self, outputs: int) -> None:
        """Raise a PlanError if a value of the size of the logits is read as a whole."""
        returned = outputs_of(self.graph)
        for n in self.exits:
            rule = self.rules[n]
            if rule.span is None or (rule.product and n is not self.logits):
                continue
            if self.is_large(n):
                user = next(u for u in n.users if u not in self.rules)
                if n in returned[:outputs]:
                    raise _refused(
                        f"the logits ('{n.name}') are an output of the step; return only the loss"
                    )
                raise _refused(f"'{user.name}' ({user.target}) reads all of '{n.name}'")

    def levels(self, *, tangents: int) -> dict[fx.Node, int]:
        """Return how often each node waits for all chunks of earlier nodes.

        Args:
            tangents: the level of the tangents.
        """
        level: dict[fx.Node, int] = {}
        for n in self.nodes:
            own = 0
            if n.op == "placeholder" and role_of(n).in_backward:
                own = tangents
            for x in n.all_input_nodes:
                waits = x in self.rules and n not in self.rules
                own = max(own, level[x] + waits)
            level[n] = own
        return level


class _Split:
    """Replaces a region by its chunks.

    Args:
        region: the region.
        chunks: number of chunks.
        in_forward: as in `ChunkLoss`.
    """

    def __init__(self, region: _Region, chunks: int, *, in_forward: bool) -> None:
        self.region, self.graph = region, region.graph
        size = -(-region.tokens // chunks)
        starts = range(0, region.tokens, size)
        self.bounds = [(a, min(a + size, region.tokens)) for a in starts]
        self.tangent: fx.Node | None = None
        self._carriers: list[fx.Node] = []
        if in_forward:
            self._find_tangent()
        self.level = region.levels(tangents=0 if self.tangent is not None else 1)
        if self.tangent is not None and any(self.level[n] for n in region.rules):
            self.tangent, self._carriers = None, []
            self.level = region.levels(tangents=1)
        for n in region.rules:
            if self.level[n] > (self.tangent is None and n in region.late):
                raise _refused(
                    f"'{n.name}' ({n.target}) needs a value that is computed from all tokens' logits"
                )
        self._mode = fake_mode_of(region.logits.meta["val"])
        self._end = output_node(self.graph)
        #: Chunks of each call of the region, one for each range of tokens.
        self.made: dict[fx.Node, list[fx.Node]] = {}
        self._sums: dict[fx.Node, fx.Node] = {}
        self.whole: dict[tuple[Any, ...], fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self._new: list[fx.Node] = []

    def _find_tangent(self) -> None:
        """Find the scalar tangent on which backward's part of the region depends linearly, if that is all it needs."""
        region = self.region
        needed = {n for n in region.rules if n in region.late}
        carriers: set[fx.Node] = set()
        stack = list(needed)
        while stack:
            for x in inputs_of(stack.pop()):
                if x in region.late and x not in region.rules and x not in carriers:
                    carriers.add(x)
                    stack.append(x)
        roots = [n for n in carriers if n.op == "placeholder"]
        if len(roots) != 1 or role_of(roots[0]) is not Role.TANGENT or shape_of(roots[0]):
            return
        linear = {roots[0]}
        for n in region.nodes:
            if n in needed or (n in carriers and n is not roots[0]):
                # In 16 bits with a small exponent, gradients of the unscaled loss may vanish.
                if not ops_are_linear(n, linear) or n.meta["val"].dtype is torch.float16:
                    return
                linear.add(n)
        self.tangent = roots[0]
        self._carriers = [n for n in region.nodes if n in carriers and n is not roots[0]]

    def run(self) -> None:
        """Rewrite the graph."""
        region = self.region
        groups: list[list[fx.Node]] = []
        late: list[fx.Node] = []
        replaced: dict[fx.Node, fx.Node] = {}
        levels = sorted({self.level[n] for n in region.rules})
        at = {n: i for i, n in enumerate(region.nodes)}
        for level in levels:
            group = [n for n in region.rules if self.level[n] == level]
            self._new = []
            if self.tangent is not None:
                self._carry()
            for k in range(len(self.bounds)):
                self._build(group, k)
            for n in group:
                if n in region.exits:
                    replaced[n] = self._joined(n)
            groups.append(self._new)
            for new in self._new:
                at[new] = at[group[0]]
        if self.tangent is not None:
            for n in [n for n in replaced if n in region.late]:
                # Scaling a weight's gradient at the end of backward leaves memory for one copy while it runs.
                place = at[n] if region.rules[n].span is not None else len(at)
                self._new, self._meta = [], n.meta
                replaced[n] = self.call(_aten.mul.Tensor, replaced[n], self.tangent)
                at[replaced[n]] = place
                late += self._new
        for n, new in replaced.items():
            for user in [u for u in n.users if u not in region.rules]:
                user.replace_input_with(n, new)
        for n in reversed(region.rules):
            self.graph.erase_node(n)
        self._sort(groups, at)

    def _carry(self) -> None:
        """Copy the nodes between the tangent and the region, with 1 in place of the tangent."""
        assert self.tangent is not None
        value = self.tangent.meta["val"]
        self._meta = {}
        self.copies[self.tangent] = self.call(
            _aten.full.default,
            [],
            1,
            dtype=value.dtype,
            layout=torch.strided,
            device=value.device,
            pin_memory=False,
        )
        for n in self._carriers:
            self._meta = n.meta
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda x: self.copies.get(x, x))
            self.copies[n] = self.call(n.target, *args, **kwargs)

    def _build(self, group: Sequence[fx.Node], k: int) -> None:
        """Build one chunk of the calls of a group."""
        chunk = _Chunk(self, k)
        for n in group:
            self._meta = n.meta
            rule = self.region.rules[n]
            made = rule.build(chunk)
            self.made.setdefault(n, []).append(made)
            if rule.span is not None:
                wanted = rule.span.sliced(shape_of(n), chunk.tokens)
                self._check(n, made, wanted)
                continue
            self._check(n, made, list(shape_of(n)))
            before = self._sums.get(n)
            if before is not None:
                self._sums[n] = self._added(before, made)
            elif made.meta["val"].dtype in _LOW and len(self.bounds) > 1:
                self._sums[n] = self._converted(made, torch.float32)
            else:
                self._sums[n] = made

    def _added(self, before: fx.Node, made: fx.Node) -> fx.Node:
        """Add a chunk's part to the sum over earlier chunks; a product in the sum's type adds while it multiplies."""
        same = made.meta["val"].dtype is before.meta["val"].dtype
        if same and made.target is _aten.mm.default:
            a, b = made.args
            self._new.remove(made)
            self.graph.erase_node(made)
            return self.call(_aten.addmm.default, before, a, b)
        return self.call(_aten.add.Tensor, before, made)

    def _check(self, node: fx.Node, made: fx.Node, wanted: list[int]) -> None:
        """Raise a PlanError if a chunk has another shape or type than expected."""
        got, value = list(shape_of(made)), node.meta["val"]
        if got != wanted or made.meta["val"].dtype is not value.dtype:
            raise _refused(
                f"a chunk of '{node.name}' ({node.target}) has shape {got}, expected {wanted}"
            )

    def _joined(self, node: fx.Node) -> fx.Node:
        """Return the whole value of a call, from its chunks."""
        rule, value = self.region.rules[node], node.meta["val"]
        self._meta = node.meta
        if rule.span is None:
            made = self._sums[node]
            if rule.mean != 1:
                made = self.call(_aten.div.Tensor, made, rule.mean)
            return self._converted(made, value.dtype)
        whole = self.call(_aten.cat.default, list(self.made[node]), rule.span.start)
        sizes = list(shape_of(node))
        if sizes == list(shape_of(whole)):
            return whole
        return self.call(_aten.view.default, whole, sizes)

    def _converted(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype is dtype:
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call to the nodes that replace the region."""
        with self.graph.inserting_before(self._end):
            node: fx.Node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in self._meta.items() if k not in _NOT_OF_SLICES}
        node.meta[_CHUNK] = True
        if self.tangent is not None:
            node.meta.pop("partitioner_tag", None)  # backward's chunks may run in forward
        try:
            refresh(node, self._mode)
        except RuntimeError as error:
            raise _refused(f"{target} does not run on a chunk: {error}") from None
        self._new.append(node)
        return node

    def _sort(self, groups: Sequence[Sequence[fx.Node]], at: Mapping[fx.Node, int]) -> None:
        """Sort the graph: the nodes of each group stand together, all others keep their order if they can.

        Args:
            groups: the nodes that replace the region.
            at: wanted place of each node.

        Raises:
            PlanError: calls with effects, or that draw random numbers, cannot keep their order.
        """
        nodes = [n for n in self.graph.nodes if n.op != "output"]
        units: list[list[fx.Node]] = [list(g) for g in groups]
        inside = {n for g in groups for n in g}
        units += [[n] for n in nodes if n not in inside]
        unit_of = {n: i for i, unit in enumerate(units) for n in unit}
        before: list[set[int]] = [{unit_of[x] for n in u for x in inputs_of(n)} for u in units]
        plain = are_plain(nodes)
        special = [n for n, p in zip(nodes, plain, strict=True) if not p and n.op == "call_function"]
        for a, b in itertools.pairwise(special):
            before[unit_of[b]].add(unit_of[a])
        after: list[list[int]] = [[] for _ in units]
        for i, earlier in enumerate(before):
            earlier.discard(i)
            for j in earlier:
                after[j].append(i)
        waits = [len(b) for b in before]
        ready = [(at[u[0]], i) for i, u in enumerate(units) if not waits[i]]
        heapq.heapify(ready)
        order: list[fx.Node] = []
        while ready:
            _, i = heapq.heappop(ready)
            order += units[i]
            for j in after[i]:
                waits[j] -= 1
                if not waits[j]:
                    heapq.heappush(ready, (at[units[j][0]], j))
        if len(order) < len(nodes):
            raise _refused("calls with effects would run in another order")
        for n in order:
            self._end.prepend(n)


class _Chunk:
    """Slices of the values that a region reads, for one range of tokens; see `tokens.Slices`."""

    def __init__(self, split: _Split, k: int) -> None:
        self._split, self._k = split, k
        self.start, self.stop = split.bounds[k]
        self.tokens = self.stop - self.start

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call; nodes that depend on the tangent are replaced as in `_Split.copies`."""
        copies = self._split.copies
        args, kwargs = fx.map_arg((args, kwargs), lambda n: copies.get(n, n))
        return self._split.call(target, *args, **kwargs)

    def take(self, node: fx.Node, span: Span, sizes: Sequence[int]) -> fx.Node:
        """Return the slice of an argument; see `tokens.Slices.take`."""
        split = self._split
        if node in split.made or node in split.region.rules:
            return split.made[node][self._k]
        node = split.copies.get(node, node)
        flat, whole = self._flat(node, span, sizes)
        if not whole:
            return flat
        dim = max(0, span.start)
        key = (flat, self._k)
        if key not in split.whole:
            split.whole[key] = self.call(
                _aten.slice.Tensor, flat, dim, self.start, self.stop
            )
        return split.whole[key]

    def _flat(self, node: fx.Node, span: Span, sizes: Sequence[int]) -> tuple[fx.Node, bool]:
        """Return a value with one dimension in place of the span, and whether the value holds tokens."""
        shape = shape_of(node)
        holds = tokens.spans_in(shape, span, 0, sizes) is not None
        if not holds and (span.stop <= 1 or span.stop - max(0, span.start) == 1):
            return node, False
        key = (node, span)
        known = self._split.whole.get(key)
        if known is None:
            known = node
            if holds:
                lead = [1] * -min(0, span.start)
                full = [*shape[: max(0, span.start)], *sizes, *shape[span.stop :]]
                if [*lead, *shape] != full:
                    known = self.call(_aten.expand.default, known, full)
                span = span.moved(len(lead))
                known = self._view(known, span.sliced(full, math.prod(sizes)))
            else:
                start = max(0, span.start)
                known = self._view(known, [*shape[:start], 1, *shape[span.stop :]])
            self._split.whole[key] = known
        return known, holds

    def _view(self, node: fx.Node, sizes: list[int]) -> fx.Node:
        if sizes == list(shape_of(node)):
            return node
        value = node.meta["val"]
        try:
            with value.fake_mode:
                value.view(sizes)
        except (RuntimeError, ValueError):  # strides of an expanded or permuted value
            node = self.call(_aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(_aten.view.default, node, sizes)


def _is_zero(value: Any) -> bool:
    """Return whether an argument is the number 0, or a tensor of zeros."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value == 0
    if value.target is _aten.full.default:
        return bool(value.args[1] == 0)
    if value.target is _aten.scalar_tensor.default:
        return bool(value.args[0] == 0)
    return False


#: Calls that are linear in the arguments at these positions together, if all others are constant.
_LINEAR: dict[Any, tuple[int, ...]] = {
    _aten.add.Tensor: (0, 1),
    _aten.sub.Tensor: (0, 1),
    _aten.where.self: (1, 2),
    _aten.slice_scatter.default: (0, 1),
    _aten.scatter.src: (0, 3),
    _aten.scatter_add.default: (0, 3),
    _aten._log_softmax_backward_data.default: (0,),
    _aten._softmax_backward_data.default: (0,),
    _aten.nll_loss_backward.default: (0,),
    _aten.tanh_backward.default: (0,),
    _aten.div.Tensor: (0,),
    _aten.div.Scalar: (0,),
    _aten.mul.Scalar: (0,),
    **dict.fromkeys(
        (
            torch.ops.prims.convert_element_type.default,
            _aten._to_copy.default,
            _aten.clone.default,
            _aten.alias.default,
            _aten.detach.default,
            _aten.expand.default,
            _aten.neg.default,
            _aten.view.default,
            _aten.reshape.default,
            _aten._unsafe_view.default,
            _aten.permute.default,
            _aten.t.default,
            _aten.transpose.int,
            _aten.unsqueeze.default,
            _aten.squeeze.dim,
            _aten.squeeze.dims,
            _aten.slice.Tensor,
            _aten.gather.default,
            _aten.sum.default,
            _aten.sum.dim_IntList,
            _aten.mean.default,
            _aten.mean.dim,
        ),
        (0,),
    ),
}


def ops_are_linear(node: fx.Node, linear: set[fx.Node]) -> bool:
    """Return whether a call is linear in its arguments that are ``linear``."""
    carried = [x in linear if isinstance(x, fx.Node) else False for x in node.args]
    if any(x in linear for x in node.kwargs.values() if isinstance(x, fx.Node)):
        return False
    if node.target in (_aten.mul.Tensor, _aten.mm.default):  # bilinear
        return sum(carried) == 1
    places = _LINEAR.get(node.target)
    if places is None or any(c and k not in places for k, c in enumerate(carried)):
        return False
    return all(
        carried[k] or _is_zero(node.args[k]) for k in places if k < len(node.args)
    )


def _split_nll(graph: fx.Graph) -> None:
    """Replace each ``nll_loss_forward`` by calls that compute one loss for each token, and their sum or mean."""
    for node in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        base, target, weight, reduction, ignored = node.args
        assert isinstance(base, fx.Node)
        if weight is not None:
            raise _refused(f"'{node.name}' has class weights, which the eager lowering does not split")
        if len(shape_of(base)) != 2:
            continue
        mode = fake_mode_of(base.meta["val"])
        value = base.meta["val"]

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            made: fx.Node = graph.call_function(target, args, kwargs)
            made.meta = {k: v for k, v in node.meta.items() if k not in _NOT_OF_SLICES}  # noqa: B023
            refresh(made, mode)  # noqa: B023
            return made

        with graph.inserting_before(node):
            zero = {"layout": torch.strided, "device": value.device, "pin_memory": False}
            counts = call(_aten.ne.Scalar, target, ignored)
            first = call(_aten.full.default, [], 0, dtype=torch.int64, **zero)
            none = call(_aten.full.default, [], 0, dtype=value.dtype, **zero)
            safe = call(_aten.where.self, counts, target, first)
            picked = call(_aten.gather.default, base, 1, call(_aten.unsqueeze.default, safe, 1))
            loss = call(_aten.neg.default, call(_aten.squeeze.dim, picked, 1))
            loss = call(_aten.where.self, counts, loss, none)
            total = call(_aten.sum.default, counts)
            total = call(_aten._to_copy.default, total, dtype=value.dtype)
            if reduction:
                loss = call(_aten.sum.default, loss)
            if reduction == 1:
                loss = call(_aten.div.Tensor, loss, total)
        for user in list(node.users):
            user.replace_all_uses_with((loss, total)[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(node)
