"""Restrict which kernels Inductor fuses in backward and in a chunked loss, and order all kernels as planned.

Importing this module imports Inductor.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Any

import networkx as nx

from remat.graph import ops
from remat.graph.capture.tokens import CHUNK
from remat.graph.memory.fused_kernels import NEAR_SUMS
from remat.graph.whole_graph import SIDE
from remat.torch_compat import (
    CustomSchedulerPass,
    ExternKernelSchedulerNode,
    InductorChoices,
    WeakDep,
)


class KeptWaits(CustomSchedulerPass):
    """Pass of Inductor's scheduler that makes readers of an in-place write wait for that write.

    If the user gave Inductor a scheduler pass, the user's pass runs before this pass.
    """

    def __init__(self, first: CustomSchedulerPass | None = None) -> None:
        self._first = first

    def uuid(self) -> Any:
        """Return a key that identifies this pass, and the scheduler pass of the user, in Inductor's caches."""
        return "remat.kept-waits", None if self._first is None else self._first.uuid()

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Before fusion, make each node of a schedule that reads an in-place write depend on the write."""
        nodes = nodes if self._first is None else self._first(nodes)
        for node in nodes:
            # Groups of a ``_foreach`` operator have no ``mutation_renames``, and Inductor does not rebuild their loops.
            written = set(getattr(node, "mutation_renames", {}).values())
            for name in sorted({read.name for read in node.read_writes.reads} & written):
                # If Inductor rebuilds the kernel's loops, it keeps only dependencies that are an order.
                node.add_fake_dep(WeakDep(name, mutating_buf=name))
        return nodes


class PlannedOrder(CustomSchedulerPass):
    """Pass of Inductor's scheduler that moves no operator ahead of its planned position.

    Operators that draw random numbers keep their order.
    """

    # Inductor runs a fused kernel at the position of its first node, after all operators that the kernel depends on.
    # This moves those operators ahead, and their results stay alive longer. In a diffusion transformer that recomputes
    # its layers, the peak of that order was 57 % higher. Here the kernel waits for its operators instead.

    def uuid(self) -> str:
        """Return a text that identifies the pass in Inductor's cache keys."""
        return "remat.planned-order"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Return the nodes of a schedule in their planned order, each after the nodes that it depends on."""
        makers = {name: k for k, node in enumerate(nodes) for name in node.get_buffer_names()}
        order = nx.DiGraph()
        order.add_nodes_from(range(len(nodes)))
        read = (
            (makers[d.name], k)
            for k, n in enumerate(nodes)
            for d in n.unmet_dependencies
            if d.name in makers
        )
        order.add_edges_from((before, k) for before, k in read if before != k)
        drawn = sorted((n.min_order, k) for k, n in enumerate(nodes) if _draws(n))
        order.add_edges_from((before, k) for (_, before), (_, k) in pairwise(drawn))
        try:
            ordered = nx.lexicographical_topological_sort(order, lambda k: nodes[k].min_order)
            return [nodes[k] for k in ordered]
        except nx.NetworkXUnfeasible:
            # A fused kernel depends on a draw, and an earlier draw on the kernel.
            return nodes


class NearFusions(InductorChoices):
    """Inductor's fusion rules, with a ban on fusions that would keep values alive longer in backward.

    A fused kernel runs only after all operators that its parts depend on. An early part of the kernel may thus run
    later than it would without fusion. An extern operator is one for which Inductor generates no kernel, such as a
    matrix product. A kernel's position is its index in the schedule as it was before any fusion.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scheduler: Any = None
        self._waits: dict[str, int] = {}
        self._operators: list[int] = []
        self._marks: dict[str, tuple[set[int], set[int]]] = {}

    def uuid(self) -> str:
        """Return a text that identifies these fusion rules in Inductor's cache keys."""
        return f"remat.near-fusions.0.{NEAR_SUMS}.read.chunks.sides"

    def can_fuse_horizontal(  # type: ignore[override]  # a static method there, called on an instance
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Return whether to fuse two kernels that read the same value; Inductor calls this method."""
        if not InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return False
        if self._crosses(scheduler, node1, node2):
            return False
        # In a backward that recomputes layers, the earlier kernel would wait for whole layers, until an extern
        # operator that the later kernel depends on. A GPT-2 that recomputes its attention took 9 % more memory.
        stands, waits = self._places(scheduler, node1, node2)
        return waits <= stands

    def can_fuse_vertical(  # type: ignore[override]  # a static method there, too
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Return whether to fuse a kernel with a reader of its result; Inductor calls this method."""
        if not InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return False
        if self._crosses(scheduler, node1, node2):
            return False
        stands, waits = self._places(scheduler, node1, node2)
        if not node1.is_reduction():
            # An extern operator that reads the result would wait, too. In a Llama that recomputes its activations, the
            # gradients of weights waited for later products, and the peak was 5 % higher.
            return not _is_read_before(node1, waits)
        # The result of a reduction is small, but the fused kernel would keep the reduction's large inputs alive until
        # the extern operators in between have run, of which `NEAR_SUMS` are allowed. The gradient of a weight that
        # several layers share is a sum of such reductions: a network that uses two layers six times took 1.9 times as
        # much memory with these fusions.
        before, until = (bisect_right(self._operators, place) for place in (stands, waits))
        return until <= before + NEAR_SUMS

    def _places(self, scheduler: Any, node1: Any, node2: Any) -> tuple[int, int]:
        """Return two positions: of the earlier kernel, and of the last extern operator that the later kernel needs."""
        self._look_at(scheduler)
        first, other = sorted((node1, node2), key=lambda n: n.min_order)
        waits = max((self._waits.get(n.get_name(), -1) for n in other.get_nodes()), default=-1)
        return int(first.max_order), waits

    def _crosses(self, scheduler: Any, node1: Any, node2: Any) -> bool:
        """Return whether two kernels belong to different chunks of a loss, or to forward and backward of one graph."""
        # The logits of both chunks would be alive together. In a step that is one graph, a node that runs again reads
        # what its first run reads, so both runs would become one kernel, whose result lives on to backward.
        self._look_at(scheduler)
        names = [n.get_name() for n in (*node1.get_nodes(), *node2.get_nodes())]
        marks = [self._marks[name] for name in names if name in self._marks]
        return any(len(set().union(*each)) > 1 for each in zip(*marks, strict=True))

    def _look_at(self, scheduler: Any) -> None:
        """Compute what the fusion rules need to know about a schedule, unless this is already computed."""
        # Computed once for each schedule, because Inductor calls the fusion rules for many pairs of kernels.
        if self._scheduler is scheduler:
            return
        placed = _placed(scheduler)
        self._scheduler, self._waits = scheduler, _waits(scheduler)
        self._operators = [n.min_order for n in placed if isinstance(n, ExternKernelSchedulerNode)]
        self._marks = {n.get_name(): marks for n in placed if any(marks := _marks(n))}


def _is_read_before(node: Any, place: int) -> bool:
    """Return whether a result of ``node`` is read by an extern operator that the schedule runs before ``place``."""
    readers = (user.node for result in node.get_outputs() for user in result.users)
    return any(isinstance(r, ExternKernelSchedulerNode) and r.min_order < place for r in readers)


def _draws(node: Any) -> bool:
    """Return whether a node of a schedule is an operator that draws, or may draw, random numbers."""
    if not isinstance(node, ExternKernelSchedulerNode) or node.node is None:
        return False
    return any(map(ops.draws_in_order, node.node.get_origins()))


def _marks(node: Any) -> tuple[set[int], set[int]]:
    """Return a node's loss chunks and, if one graph is the whole step, the node's side: forward or backward."""
    origins = node.node.get_origins() if getattr(node, "node", None) is not None else ()
    chunks = {chunk for o in origins if (chunk := o.meta.get(CHUNK, -1)) >= 0}
    sides = [o.meta[SIDE] for o in origins if SIDE in o.meta]
    return chunks, {max(sides)} if sides else set()


def _placed(scheduler: Any) -> list[Any]:
    """Return the nodes that have a position in a schedule, in the order of their positions."""
    placed = (n for n in scheduler.name_to_node.values() if hasattr(n, "min_order"))
    return sorted(placed, key=lambda n: n.min_order)


def _waits(scheduler: Any) -> dict[str, int]:
    """Return a dict from each node of a schedule to the position of the last extern operator that the node needs."""
    places: dict[str, int] = {}
    for node in _placed(scheduler):
        last = -1
        for read in node.unmet_dependencies:
            buffer = scheduler.name_to_buf.get(read.name)
            maker = (
                None if buffer is None else scheduler.name_to_node.get(buffer.defining_op_name())
            )
            if maker is None or maker.get_name() not in places:
                continue
            last = max(last, places[maker.get_name()])
            if isinstance(maker, ExternKernelSchedulerNode):
                last = max(last, maker.min_order)
        places[node.get_name()] = last
    return places
