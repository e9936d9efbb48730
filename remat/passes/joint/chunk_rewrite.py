"""Rewrite a joint graph so that a region runs chunk by chunk, each chunk on some of the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx

from remat.graph.capture import tokens
from remat.graph.capture.fake import refresh
from remat.graph.capture.tokens import Span, shape_of
from remat.graph.index import are_plain, inputs_of
from remat.graph.joint import output_node
from remat.graph.memory.storages import fake_mode_of
from remat.passes.joint.chunk_region import Region, refused, scalar_tangent

_aten = torch.ops.aten
#: Keys of a node's metadata whose entries are wrong for a slice of the node's value.
NOT_OF_SLICES = ("val", "tensor_meta", "eager_input_vals")
_LOW = (torch.bfloat16, torch.float16)


class Split:
    """Rewrite of a joint graph that replaces each call of a region by one call per chunk of tokens."""

    def __init__(self, region: Region, chunks: int, *, in_forward: bool) -> None:
        self.region, self.graph = region, region.graph
        size = -(-region.tokens // chunks)
        self._bounds = [(a, min(a + size, region.tokens)) for a in range(0, region.tokens, size)]
        self._carriers = region.carriers()
        self._tangent = scalar_tangent(region, self._carriers) if in_forward else None
        self._level = region.levels(tangents=0)
        if self._tangent is None or any(self._level[n] for n in region.rules):
            self._tangent, self._level = None, region.levels(tangents=1)
        for n in region.rules:
            if self._level[n] > (n in region.late):
                raise refused(
                    f"'{n.name}' ({n.target}) needs a value that is computed from all tokens' logits"
                )
        self._mode = fake_mode_of(region.logits.meta["val"])
        self._end = output_node(self.graph)
        #: For each call of the region, the results of its chunks so far. A call that sums over the tokens is in
        #: `_sums` instead, with the sum of these results.
        self._results: dict[fx.Node, list[fx.Node]] = {}
        self._sums: dict[fx.Node, fx.Node] = {}
        #: Values from outside the region, viewed so that one dimension holds all tokens; and slices of these views.
        self._views: dict[tuple[Any, ...], fx.Node] = {}
        #: Dict from each node between the tangent and the region to a copy that reads 1 in place of the tangent.
        self._copies: dict[fx.Node, fx.Node] = {}
        self._new: list[fx.Node] = []
        self._meta: dict[str, Any] = {}
        self._chunk = -1

    def run(self) -> None:
        """Replace, in place, each call of the region in the joint graph by one call per chunk of tokens."""
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
        """Insert copies of the nodes on the paths from ``tangent`` to the calls that are split into chunks."""
        value = tangent.meta["val"]
        kinds = {"dtype": value.dtype, "device": value.device, "layout": torch.strided}
        self._copies[tangent] = self._call(_aten.full.default, [], 1, **kinds, pin_memory=False)
        for n in self._carriers[1:]:
            self._meta = n.meta
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda x: self._copies.get(x, x))
            self._copies[n] = self._call(n.target, *args, **kwargs)

    def _build(self, node: fx.Node, k: int) -> None:
        """Insert the call that computes the result of ``node`` for chunk ``k`` of the tokens."""
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
        chunk = args[0] if is_same else self._call(target, *args, **kwargs)
        shape = shape_of(node)
        wanted = list(shape) if rule.span is None else rule.span.sliced(shape, stop - start)
        if list(shape_of(chunk)) != wanted or chunk.meta["val"].dtype is not node.meta["val"].dtype:
            raise refused(
                f"a chunk of '{node.name}' ({node.target}) has another shape than expected"
            )
        if rule.span is not None:
            self._results.setdefault(node, []).append(chunk)
        elif before is not None:
            self._sums[node] = self._call(_aten.add.Tensor, before, chunk)
        else:  # a sum over chunks in 16 bits would lose digits
            self._sums[node] = self._converted(chunk, torch.float32) if low else chunk

    def _joined(self, node: fx.Node) -> fx.Node:
        """Return a node that joins the chunks of the value of ``node``, by concatenation or by a sum."""
        self._meta, span = node.meta, self.region.rules[node].span
        if span is None:
            return self._converted(self._sums[node], node.meta["val"].dtype)
        return self._viewed(
            self._call(_aten.cat.default, self._results[node], span.stop - 1), [*shape_of(node)]
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
        """Return the slice of a call's argument that belongs to chunk ``k`` of the tokens."""
        if node in self._results:
            return self._results[node][k]
        node, lacks = self._copies.get(node, node), -min(0, span.start)
        dim = span.stop + lacks - 1
        if (node, span) not in self._views:
            expanded = [
                *node.meta["val"].shape[: max(0, span.start)],
                *sizes,
                *shape_of(node)[span.stop :],
            ]
            view = node
            if expanded != list(shape_of(node)):
                view = self._call(_aten.expand.default, node, expanded)
            flat = span.moved(lacks).sliced(expanded, self.region.tokens)
            self._views[node, span] = self._viewed(view, flat)
        if (node, span, k) not in self._views:
            bounds = self._bounds[k]
            view = self._views[node, span]
            self._views[node, span, k] = self._call(_aten.slice.Tensor, view, dim, *bounds)
        return self._views[node, span, k]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call that replaces a part of the region, and return the new node."""
        with self.graph.inserting_before(self._end):
            node: fx.Node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in self._meta.items() if k not in NOT_OF_SLICES}
        node.meta[tokens.CHUNK] = self._chunk
        if self._tangent is not None:
            node.meta.pop("partitioner_tag", None)  # backward's chunks may run in forward
        refresh(node, self._mode)
        self._new.append(node)
        return node

    def _sort(self, groups: Sequence[Sequence[fx.Node]], at: Mapping[fx.Node, int]) -> None:
        """Sort the graph so that the new nodes of each level are adjacent; other nodes keep their order if possible."""
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
            raise refused("calls with effects would run in another order") from None
        for n in sort:
            self._end.prepend(n)
