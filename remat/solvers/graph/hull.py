"""Compute the lower convex hull of a graph problem's (bytes, cost) pairs; the hull bounds the cost at every capacity.

Without a capacity, but with a price for each saved byte, the best decision is a minimum cut. The decisions that are
best at some price are the vertices of the lower hull of the (bytes, cost) pairs of all decisions. No decision lies
below the line between two neighbouring vertices. The line between two neighbouring vertices therefore bounds the cost
at every capacity between the vertices' bytes.

The bound is that of Everett, "Generalized Lagrange multiplier method", Operations Research 11 (1963). The search for
the price follows Eisner and Severance, Journal of the ACM 23 (1976).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from remat.solvers.graph.flow import Losses, Network
from remat.solvers.graph.pareto import lower_hull, pareto
from remat.solvers.graph.problem import GraphProblem, evaluate, infeasible
from remat.solvers.graph.reduction import reduce_graph
from remat.solvers.kernel import required

#: Limit on the sum of all bytes and costs times their prices, so that every flow fits 64-bit integers.
ROOM = 2**60
_FIGURES = attrgetter("saved_bytes", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertex:
    """A decision at a vertex of the hull: its bytes, cost, and saved nodes of the reduced problem."""

    saved_bytes: int
    cost: int
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Two neighbouring vertices of the hull, and the prices at which both are the best decisions.

    Attributes:
        fits: the vertex with fewer saved bytes.
        over: the vertex with more saved bytes; equal to ``fits`` at the end of the hull.
        price: price of one saved byte.
        scale: price of one unit of cost.
        value: the smallest ``price`` · bytes + ``scale`` · cost of all decisions.
    """

    fits: Vertex
    over: Vertex
    price: int
    scale: int
    value: int

    def bound(self, capacity: int) -> int:
        """Return a proven lower bound on the cost of any decision that saves at most ``capacity`` bytes."""
        if self.scale == 0:
            return self.fits.cost
        return max(0, -((self.price * capacity - self.value) // self.scale))


#: The fields that determine a problem's hull: all but names, unit, capacity and hints.
_SHAPE = ("inputs", "cost", "size", "savable", "recomputable", "in_forward", "needed")
#: Cache of the hulls that are still in use, by the ids of the `_SHAPE` fields of their problems.
_HULLS: weakref.WeakValueDictionary[tuple[int, ...], Hull] = weakref.WeakValueDictionary()


class Hull:
    """Lower convex hull of the (saved bytes, cost) pairs of all decisions of a graph problem.

    Edges of the hull are computed on demand: by `edge` for one capacity, by `vertices` for all capacities. `Hull`
    ignores the problem's capacity. Minimum cuts are computed on the *core*, the smaller problem to which the graph
    problem is reduced (see ``reduction``). The attribute ``least`` is the hull's vertex with the fewest saved bytes,
    and ``least_bytes`` is that number of bytes.
    """

    def __init__(self, problem: GraphProblem) -> None:
        import numpy as np

        self.problem = problem
        self.reduction = reduce_graph(problem)
        self.core = self.reduction.core
        self._network = Network(self.core)
        self._size = np.asarray(self.core.size, dtype=np.int64)
        self._cost = np.asarray(self.core.cost, dtype=np.int64)
        self._total_size = sum(self.core.size)
        self._total_cost = sum(self.core.cost)
        self._edges: dict[tuple[int, int], Edge] = {}
        self._compiled: tuple[tuple[int, int], Any] | None = None
        self.least = least = self._vertex(1, 0)[0]
        scale = max(1, (ROOM - self._total_size) // max(1, self._total_cost))
        self._vertices = [least]
        # The first of these two cuts has the least cost and, among such cuts, the fewest bytes. In 64 bits,
        # `scale` may be too small for that. Then only the second cut is sure to have the least cost.
        self._insert(self._vertex(1, scale)[0])
        self._insert(self._vertex(0, 1)[0])
        self.least_bytes = least.saved_bytes

    @classmethod
    def of(cls, problem: GraphProblem) -> Hull:
        """Return the hull of a problem; problems that differ only in their capacity share one cached hull."""
        # The cache holds weak references, so a hull stays while some caller holds it.
        key = tuple(id(getattr(problem, f)) for f in _SHAPE)
        hull = _HULLS.get(key)
        if hull is None:
            hull = _HULLS[key] = cls(problem)  # the hull keeps the fields alive, so no id is reused
        return hull

    def check_capacity(self, capacity: int) -> None:
        """Raise `BudgetError` if every decision saves more bytes than the capacity."""
        if capacity < self.least_bytes:
            raise infeasible(capacity, self.least_bytes)

    def compiled(self, edge: Edge) -> Any:
        """Return the reduced problem at an edge's prices as the kernel's `GraphCore`; the last result is cached."""
        key, cached = (edge.price, edge.scale), self._compiled
        if cached is not None and cached[0] == key:
            return cached[1]
        core = required().GraphCore(*_columns(self.core, self.losses(edge)), edge.price)
        # One assignment of key and result, because another thread may call this method for another edge meanwhile.
        self._compiled = (key, core)
        return core

    def edge(self, capacity: int) -> Edge:
        """Return the edge that starts at the hull's last vertex within a capacity, which is at least `least_bytes`."""
        while True:
            i = bisect_right(self._vertices, capacity, key=lambda v: v.saved_bytes) - 1
            fits = self._vertices[i]
            if i + 1 == len(self._vertices):  # saving more avoids no cost
                return Edge(fits=fits, over=fits, price=0, scale=1, value=fits.cost)
            over = self._vertices[i + 1]
            edge = self._edges.get((fits.saved_bytes, over.saved_bytes))
            if edge is not None:
                return edge
            self._refine(fits, over)

    @property
    def ends(self) -> tuple[Vertex, Vertex]:
        """The hull's vertex with the fewest saved bytes, and its vertex with the least cost."""
        return self._vertices[0], self._vertices[-1]

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        """All vertices of the hull, by rising saved bytes."""
        i = 0
        while i + 1 < len(self._vertices):
            fits, over = self._vertices[i : i + 2]
            if (fits.saved_bytes, over.saved_bytes) in self._edges:
                i += 1
            else:
                self._refine(fits, over)
                i = max(0, i - 1)
        return tuple(self._vertices)

    def losses(self, edge: Edge) -> Losses:
        """Return how much saving or recomputing each node of the reduced problem adds to ``edge.value``."""
        return self._network.losses(edge.price * self._size, edge.scale * self._cost)

    def _refine(self, fits: Vertex, over: Vertex) -> None:
        """Insert a vertex below the line between two vertices; if there is none, store the two as an edge."""
        price, scale = self._prices(fits.cost - over.cost, over.saved_bytes - fits.saved_bytes)
        vertex, value = self._vertex(price, scale)
        of_line = min(price * v.saved_bytes + scale * v.cost for v in (fits, over))
        if value < of_line and self._insert(vertex):
            return
        self._edges[fits.saved_bytes, over.saved_bytes] = Edge(
            fits=fits, over=over, price=price, scale=scale, value=value
        )

    def _prices(self, cost: int, saved_bytes: int) -> tuple[int, int]:
        """Return prices of a byte and of a unit of cost at which ``saved_bytes`` bytes are worth ``cost`` units."""
        total = cost * self._total_size + saved_bytes * self._total_cost
        if total <= ROOM:
            times = ROOM // max(1, total)
            return cost * times, saved_bytes * times
        # Rounding may miss the exact slope, but the bound holds at any price.
        return cost * ROOM // total, max(1, saved_bytes * ROOM // total)

    def _vertex(self, price: int, scale: int) -> tuple[Vertex, int]:
        """Return the decision with the smallest sum ``price`` · bytes + ``scale`` · cost, and this smallest sum."""
        cut = self._network.cut(price * self._size, scale * self._cost)
        saved_bytes = int(self._size[list(cut.saved)].sum()) if cut.saved else 0
        if scale:  # cheaper than following the decision through the graph
            cost = (cut.value - price * saved_bytes) // scale
        else:
            cost = evaluate(self.core, cut.saved).recompute_cost
        return Vertex(saved_bytes=saved_bytes, cost=cost, saved=cut.saved), cut.value

    def _insert(self, vertex: Vertex) -> bool:
        """Add a vertex to the hull if it lies below the hull, and return whether it was added."""
        vertices = pareto((*self._vertices, vertex), _FIGURES)
        self._vertices = lower_hull(vertices, _FIGURES)
        return any(v is vertex for v in self._vertices)


def _columns(core: GraphProblem, losses: Losses) -> tuple[Any, ...]:
    """Return the arguments of the kernel's class `GraphCore` for a reduced problem and the losses of its nodes."""
    needed = set(core.needed)
    flags = [
        core.savable[i] | core.recomputable[i] << 1 | (i in needed) << 2 for i in range(len(core))
    ]
    starts, sources, flows = [0], list[int](), list[int]()
    for i, reads in enumerate(core.inputs):
        sources += reads
        flows += [losses.edges.get((j, i), 0) for j in reads]
        starts.append(len(sources))
    return core.size, losses.save, losses.recompute, flags, starts, sources, flows
