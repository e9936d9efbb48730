"""Predict from a graph alone which nodes fuse into kernels, and what each kernel writes to memory.

The rules for fusion are those of Inductor on a CPU, except where a rule names another device.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Container, Iterable

import torch
from torch import fx

from remat.graph import ops
from remat.graph.fusion import (
    added_product,
    generates,
    is_grouped,
    is_passed_on,
    is_scatter,
    producer_of,
    readers_of,
)
from remat.graph.index import inputs_of
from remat.graph.memory.storages import hint
from remat.graph.memory.writes import by_target

#: A sum in backward and its reader form one kernel only if at most this number of unfusible operators run between
#: the sum and the reader. `remat.integrations.near_fusions` makes Inductor keep this limit.
NEAR_SUMS = 1
#: A pointwise result that several nodes read is computed again in each reader's kernel if one element needs at most
#: this number of memory reads. Otherwise the result is written to memory once.
_MOST_READS = 4
#: Expensive pointwise operators. If several nodes read the result, it is written to memory once, and no reader's
#: kernel computes it again.
_HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")


class Kernels:
    """Predicted kernels of a forward or backward graph, and the program points at which they run.

    Each operator that cannot fuse, such as a matrix product, ends a segment of the graph. The operators
    that fuse within a segment form one kernel, which runs at the position of the kernel's last operator.
    A program point is the index of a node's run among all runs of the step.

    Args:
        nodes: the call nodes of the graph.
        start: program point of the first node.
        returned: the nodes that the graph returns.

    Attributes:
        fuses: by node, whether the node can fuse with other nodes.
        passed_on: by node, whether the node is a view or an element of a tuple.
    """

    def __init__(self, nodes: list[fx.Node], start: int, returned: set[fx.Node]) -> None:
        # Results are cached, because each is needed many times per node, and a search predicts dozens of plans.
        self.passed_on = {n: is_passed_on(n) for n in nodes}
        self._numel = functools.cache(numel)
        self._producer = functools.cache(producer_of)
        self.fuses = {n: generates(n) for n in nodes}
        self._order = {n: k for k, n in enumerate(nodes)}
        self._segments: dict[fx.Node, frozenset[int]] = {}
        self._program_points: list[int] = [start]
        self._own: dict[fx.Node, int] = {}
        #: For each node, the first segment that can read the node's result, and whether the kernel of this
        #: segment computes the result.
        self._ready: dict[fx.Node, tuple[int, bool]] = {}
        #: Segments of the kernels that read a value, by (node that computes the value, number of elements that
        #: the kernel computes).
        self._read_at: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
        #: `_reads` maps a node to the values that are read from memory for its result. `_heavy` says whether the
        #: result needs an expensive operator. Both include inlined inputs, which the node's kernel computes.
        self._reads: dict[fx.Node, frozenset[fx.Node]] = {}
        self._heavy: dict[fx.Node, bool] = {}
        #: For each node, whether every kernel that reads its result computes the result again, so that no
        #: kernel writes the result.
        self._inlined: dict[fx.Node, bool] = {}
        #: For each addition that Inductor merges with a matrix product, the product. Both run at the position
        #: of the addition.
        self._products = {add: mm for add in nodes if (mm := added_product(add)) is not None}
        # Such a sum becomes part of an `addmm`, which is a kernel of its own and fuses with no
        # node.
        self.fuses |= dict.fromkeys(self._products, False)
        self._merged_products = {*self._products.values()}
        heavy = dict(zip(nodes, by_target(nodes, _is_heavy), strict=True))
        plain = by_target(nodes, ops.is_plain)
        self._draws = {
            n for n, p in zip(nodes, plain, strict=True) if not p and ops.draws_in_order(n)
        }
        segment = 0
        for program_point, node in enumerate(nodes, start):
            self._segments[node] = frozenset((self._segment(node, segment),))
            if self.fuses[node] or is_grouped(node):
                if segment in self._segments[node]:
                    self._program_points[segment] = program_point
            elif not self.passed_on[node]:
                self._own[node] = program_point
                if is_scatter(node.target):  # its kernel computes the written values
                    self._program_points[segment] = program_point
                if node in self._products:
                    self._own[self._products[node]] = program_point
                segment += 1
                self._program_points.append(program_point + 1)
            inputs = inputs_of(node)
            inlined = [n for n in inputs if self._inlined.get(n) and n not in returned]
            self._reads[node] = frozenset().union(
                *(self._reads[n] if n in inlined else (self._producer(n),) for n in inputs)
            )
            self._heavy[node] = heavy[node] or any(self._heavy[n] for n in inlined)
            self._inlined[node] = self._inlines(node)

    def _segment(self, node: fx.Node, now: int) -> int:
        """Return the segment in which a node runs, and record which kernels later nodes may join."""
        inputs_ready = [self._ready[n] for n in inputs_of(node) if n in self._ready]
        ready = max((at for at, _ in inputs_ready), default=0)
        joins = (ready, True) in inputs_ready
        if self.passed_on[node]:
            self._ready[node] = ready, joins
        elif not self.fuses[node]:
            self._ready[node] = now + (not is_grouped(node)), False
        else:
            # A fusible operator joins an earlier kernel that computes one of its inputs, if no other input is
            # computed later. Otherwise, it joins one that reads one of its inputs and computes as many elements.
            at = ready if joins else self._sharing_segment(node, ready, now)
            if at is None:
                at = now
                self._ready[node] = ready, ready == now
            else:
                self._pull(inputs_of(node), at)
                self._ready[node] = at, True
            for read in inputs_of(node):
                self._read_at[self._producer(read), self._numel(node)].append(at)
            return at
        return now

    def _sharing_segment(self, node: fx.Node, ready: int, now: int) -> int | None:
        """Return the first earlier segment whose kernel reads an input of a node and computes equally many elements."""
        size = self._numel(node)
        candidates = (
            at
            for read in inputs_of(node)
            for at in self._read_at.get((self._producer(read), size), ())
        )
        return min((at for at in candidates if ready <= at < now), default=None)

    def _pull(self, read: Iterable[fx.Node], to: int) -> None:
        """Move nodes and, recursively, their inputs from later segments into segment ``to``."""
        waiting = [*read]
        while waiting:
            node = waiting.pop()
            if node in self._segments and min(self._segments[node]) > to:
                self._segments[node] = frozenset((to,))
                waiting += inputs_of(node)

    def overwriter(
        self, readers: Iterable[fx.Node], program_point: int, writing: Container[fx.Node]
    ) -> fx.Node | None:
        """Return the output node whose result may overwrite a storage that no later kernel reads.

        An output node is a node whose result is written to memory. The search for output nodes begins at the
        nodes of a storage's last kernel that read the storage, and follows results that stay in registers.

        Args:
            readers: nodes that read the storage.
            program_point: program point at which the storage is read for the last time.
            writing: nodes whose results are written to memory.
        """
        outputs: set[fx.Node] = set()
        waiting = [n for n in readers if self.last(n) == program_point]
        seen = {*waiting}
        while waiting:
            node = waiting.pop()
            if node in writing or not self.fuses[node]:
                outputs.add(node)
            else:
                new = {n for n in readers_of(node) if n in self.fuses} - seen
                waiting += new
                seen |= new
        if len(outputs) < 2:
            return outputs.pop() if outputs else None
        last = max(outputs, key=self._order.__getitem__)
        # Inductor lets no result overwrite the storage if the last output does not depend on all others.
        return last if self._depends_on(last, outputs - {last}) else None

    def _depends_on(self, node: fx.Node, others: set[fx.Node]) -> bool:
        """Return whether a node depends on all ``others``, which come before the node."""
        first = min(map(self._order.__getitem__, others))
        waiting, seen = [node], {node}
        while waiting:
            new = {n for n in inputs_of(waiting.pop()) if self._order.get(n, -1) >= first} - seen
            waiting += new
            seen |= new
        return others <= seen

    def first(self, node: fx.Node) -> int:
        """Return the program point at which the first of the kernels that compute a node runs."""
        return self._own.get(node, self._program_points[min(self._segments[node])])

    def last(self, node: fx.Node) -> int:
        """Return the program point at which the last of the kernels that compute a node runs."""
        return self._own.get(node, self._program_points[max(self._segments[node])])

    def _inlines(self, node: fx.Node) -> bool:
        """Return whether every kernel that reads a node's result computes the result again."""
        if not self.fuses[node] or not self._is_pointwise(node):
            return self.passed_on[node]
        # An operand of `as_strided` is always written.
        if any(ops.packet(u.target) is torch.ops.aten.as_strided for u in node.users):
            return False
        alone = len(node.users) < 2
        return alone or (len(self._reads[node]) <= _MOST_READS and not self._heavy[node])

    def _is_pointwise(self, node: fx.Node) -> bool:
        """Return whether a node draws no random numbers, and reads no input with more elements than its result."""
        largest = max(map(self._numel, inputs_of(node)), default=0)
        return largest <= self._numel(node) and node not in self._draws

    def _is_summed_at_once(self, node: fx.Node, at: frozenset[int]) -> bool:
        """Return whether a node is a sum in backward that runs in a kernel of its own, before its readers."""
        if not at or not node.meta.get("autograd_backward") or self._is_pointwise(node):
            return False
        smaller = self._numel(node) < max(map(self._numel, inputs_of(node)), default=0)
        # remat forbids Inductor to fuse such a sum with its readers; see `remat.integrations.near_fusions`.
        return smaller and min(at) > max(self._segments[node]) + NEAR_SUMS

    def place(
        self, node: fx.Node, keys: list[int], readers: dict[int, list[fx.Node]], returned: set[int]
    ) -> list[int]:
        """Move a node into the kernels that read its results, if these kernels can compute the node.

        Args:
            keys: keys of the storages that the node allocates.
            readers: by storage key, the nodes that read the storage.
            returned: keys of the storages that the graph returns.

        Returns:
            Those of ``keys`` whose storages are written to memory. Other results stay in registers.
        """
        if not self.fuses[node]:
            return [] if node in self._merged_products else keys
        flows = [
            k
            for k in keys
            if k not in returned and all(self.fuses[r] or is_scatter(r.target) for r in readers[k])
        ]
        at = frozenset(s for k in flows for r in readers[k] for s in self._segments[r])
        if self._is_summed_at_once(node, at):
            at = frozenset()
        if at and len(flows) == len(keys) and (len(at) == 1 or self._inlined[node]):
            self._segments[node] = at
        own_segments = self._segments[node]
        return [
            k
            for k in keys
            if k not in flows or any(not self._segments[r] <= own_segments for r in readers[k])
        ]


def _is_heavy(node: fx.Node) -> bool:
    """Return whether a node is an expensive pointwise operator, such as ``exp`` or ``tanh``."""
    name = str(node.target)
    return any(f".{op}." in name for op in _HEAVY)


def numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, torch.Tensor) else 0
