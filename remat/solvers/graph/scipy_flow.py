"""Compute maximum flows in 64-bit integers with SciPy, whose own flows have 32 bits; used if OR-Tools is missing."""

from __future__ import annotations

from typing import Any

#: Bits of the capacities and flows that SciPy gets. SciPy subtracts flows from capacities in 32 bits with a sign.
_BITS = 30


class ScipyFlow:
    """Maximum flow by SciPy, with those methods of OR-Tools' ``SimpleMaxFlow`` that `Network` calls.

    Capacities are scaled down to 32 bits, and SciPy solves the scaled problem. SciPy then solves the residual graph
    repeatedly, and each time the capacities are scaled down less. When capacities are no longer scaled down, a residual
    graph without flow proves that the flow is maximum. The constructor's arguments are those of `_solved` in
    `remat.solvers.graph.flow`. No arc may have a reverse arc.
    """

    def __init__(
        self, tails: Any, heads: Any, capacities: Any, *, source: int, sink: int, most: int
    ) -> None:
        import numpy as np

        self._sink, self._count = sink, int(max(tails.max(), heads.max(), source, sink)) + 1
        pairs, self._pair = np.unique(tails * self._count + heads, return_inverse=True)
        self._tails, self._heads = pairs // self._count, pairs % self._count
        self._capacities = capacities
        # Arcs between the same vertices are joined. No arc can carry more than the whole flow.
        self._ahead = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(self._ahead, self._pair, np.minimum(capacities, most))
        self._back = np.zeros(len(pairs), dtype=np.int64)
        # What a scale leaves of the flow is less than a unit of that scale for each pair of vertices.
        scale, step = max(0, most.bit_length() - _BITS), max(1, _BITS - len(pairs).bit_length())
        while True:
            progress = self._send(source, scale)
            if not progress and not scale:
                break
            scale = max(0, scale - step)

    def _send(self, source: int, scale: int) -> bool:
        """Add the residual graph's maximum flow to the flow, in units of ``2**scale``; return whether any was added."""
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow

        most = 2**_BITS - 1
        both = np.concatenate([self._ahead, self._back])
        graph = csr_array(
            (
                np.minimum(both >> scale, most).astype(np.int32),
                (
                    np.concatenate([self._tails, self._heads]),
                    np.concatenate([self._heads, self._tails]),
                ),
            ),
            shape=(self._count, self._count),
        )
        solved = maximum_flow(graph, source, self._sink)
        moved = np.asarray(solved.flow[self._tails, self._heads]).ravel().astype(np.int64) << scale
        self._ahead -= moved
        self._back += moved
        return bool(solved.flow_value)

    def optimal_flow(self) -> int:
        """Return the value of the maximum flow."""
        return int(self._back[self._heads == self._sink].sum())

    def flows(self, arcs: Any) -> Any:
        """Return the flow through each of the arcs at the given positions, in int64."""
        import numpy as np

        left, flows = self._back.tolist(), np.zeros(len(self._capacities), dtype=np.int64)
        for arc, (pair, capacity) in enumerate(
            zip(self._pair.tolist(), self._capacities.tolist(), strict=True)
        ):
            flows[arc] = flow = min(left[pair], capacity)
            left[pair] -= flow
        return flows[arcs]

    def get_sink_side_min_cut(self) -> Any:
        """Return the vertices from which the residual graph reaches the sink."""
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order

        ahead, back = self._ahead > 0, self._back > 0
        # The arcs are reversed, so the search starts at the sink.
        rows = np.concatenate([self._heads[ahead], self._tails[back]])
        columns = np.concatenate([self._tails[ahead], self._heads[back]])
        ones = np.ones(len(rows), dtype=np.int8)
        graph = csr_array((ones, (rows, columns)), shape=(self._count, self._count))
        return breadth_first_order(graph, self._sink, return_predecessors=False)
