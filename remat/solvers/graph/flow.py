"""Compute minimum cuts of a graph problem by maximum flow, with OR-Tools or, if it is missing, with SciPy.

OR-Tools uses the push-relabel method in int64.

Each node is split into an *in* and an *out* vertex. Cutting a node's arc in→out saves the node, and
cutting its arc source→in recomputes the node. The arc out(u)→in(v) from an input u to a node v is
never cut, because a recomputed node needs each of its inputs. If a node must not be recomputed, its
*in* vertex is merged with the source. If backward reads a node, its *out* vertex is merged with the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remat.errors import ProblemError
from remat.solvers.columns import INT64_MAX
from remat.solvers.graph.problem import GraphProblem, conflict
from remat.solvers.graph.scipy_flow import ScipyFlow

_SOURCE, _SINK = 0, 1
#: `Network.cut_at` scales prices to a sum of at most this, so that every flow fits 64-bit integers.
_ROOM = 2**58


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumCut:
    """A minimum cut: the total price of its saved and recomputed nodes, and the saved nodes in node order."""

    value: int
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Value of a minimum cut, and each node's *loss*: how much saving or recomputing the node adds to this value.

    The total price of a decision is the cut's ``value`` plus the losses of the decision's saved nodes, recomputed
    nodes, and ``edges`` between nodes.

    Attributes:
        value: the smallest total price of any decision.
        save: for each node, the loss if the node is saved.
        recompute: for each node, the loss if the node is recomputed.
        edges: for each edge (input, reader), the loss if the input is available in backward but the
            reader is not recomputed. Edges that are not in the dict have loss 0.
    """

    value: int
    save: list[int]
    recompute: list[int]
    edges: dict[tuple[int, int], int]


class InfeasibleCutError(ProblemError):
    """Raised if backward needs a node that can be neither saved nor recomputed.

    Attributes:
        chain: the nodes that show the conflict, as `conflict` returns them.
    """

    def __init__(self, problem: GraphProblem, chain: Sequence[int]) -> None:
        path = " → ".join(f"'{problem.names[i]}'" for i in chain)
        super().__init__(
            f"backward reads '{problem.names[chain[-1]]}', but nothing on the way to it may be "
            f"saved, and its origin may not be recomputed: {path}"
        )
        self.chain = tuple(chain)


class Network:
    """Flow network of one graph problem, in which each finite cut is a decision which nodes to save.

    Each call of `cut` or `losses` passes the prices of saving and recomputing each node, in one common
    unit. `cut` and `losses` raise a `ProblemError` if the prices' sum exceeds 64-bit integers.

    Args:
        problem: the nodes and edges, with the nodes that may be saved or recomputed.
        fixed: for each node, True forbids its recomputation even if the problem allows it. None:
            only the problem decides.

    Raises:
        InfeasibleCutError: backward needs a node that can be neither saved nor recomputed.
    """

    def __init__(self, problem: GraphProblem, *, fixed: Sequence[bool] | None = None) -> None:
        import numpy as np

        chain = conflict(problem, fixed)
        if chain is not None:
            raise InfeasibleCutError(problem, chain)
        n = len(problem)
        self._problem = problem
        # Merging vertices with the source or the sink takes far fewer arcs than arcs of infinite capacity.
        out = [-1] * n
        inn = [_SOURCE] * n
        count = 2
        save_tails: list[int] = []
        save_heads: list[int] = []
        saves: list[int] = []  # node of each in→out arc
        again: list[int] = []  # node of each source→in arc
        need_tails: list[int] = []
        need_heads: list[int] = []
        edges: list[tuple[int, int]] = []
        for i in problem.needed:
            out[i] = _SINK
        free: Sequence[bool] = problem.recomputable
        if fixed is not None:
            free = [r and not f for r, f in zip(free, fixed, strict=True)]
        inputs = problem.inputs
        # A node gets vertices only if backward reads it, or if a recomputable node with vertices does. The
        # loop runs in reverse topological order, because a reader gives vertices to its inputs.
        for i in range(n - 1, -1, -1):
            if out[i] == -1:
                continue
            if free[i]:
                inn[i] = vertex = count
                count += 1
                again.append(i)
                for j in inputs[i]:
                    if out[j] == -1:
                        out[j] = count
                        count += 1
                    if out[j] != _SINK:
                        need_tails.append(out[j])
                        need_heads.append(vertex)
                        edges.append((j, i))
            save_tails.append(inn[i])
            save_heads.append(out[i])
            saves.append(i)
        self._count = count
        self._edges = edges
        self._saves = np.asarray(saves, dtype=np.int64)
        self._savable = np.asarray([problem.savable[i] for i in saves], dtype=bool)
        self._again = np.asarray(again, dtype=np.int64)
        self._in = np.asarray(save_tails, dtype=np.int64)
        self._out = np.asarray(save_heads, dtype=np.int64)
        self._again_in = np.asarray([inn[i] for i in again], dtype=np.int64)
        self._need = (
            np.asarray(need_tails, dtype=np.int64),
            np.asarray(need_heads, dtype=np.int64),
        )

    def cut(self, weight: Any, penalty: Any = None) -> MinimumCut:
        """Return the decision whose saved and recomputed nodes have the smallest total price.

        If several decisions are cheapest, the one that recomputes least is returned, which is the cut nearest to
        backward. The argument ``penalty`` has the prices of recomputation; if it is None, recomputation is free.
        """
        import numpy as np

        flow = self._flow(weight, penalty)
        if flow is None:
            return MinimumCut(value=0, saved=())
        sink_side = np.zeros(self._count, dtype=bool)
        sink_side[_SINK] = True
        sink_side[np.asarray(flow[0].get_sink_side_min_cut(), dtype=np.int64)] = True
        saved = self._saves[sink_side[self._out] & ~sink_side[self._in]]
        return MinimumCut(value=int(flow[0].optimal_flow()), saved=tuple(sorted(saved.tolist())))

    def cut_at(self, weight: Sequence[float], penalty: Sequence[float]) -> tuple[int, ...]:
        """Return the nodes that `cut` saves at prices in floating point, which are scaled to integers."""
        scale = min(2.0**20, _ROOM / max(1.0, sum(weight) + sum(penalty)))
        scaled = ([int(x * scale) for x in prices] for prices in (weight, penalty))
        return self.cut(*scaled).saved

    def losses(self, weight: Any, penalty: Any) -> Losses:
        """Return each node's *loss*: how much saving or recomputing the node adds to the minimum cut's total price."""
        import numpy as np

        n = len(self._problem)
        save, again = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        through = np.zeros(len(self._need[0]), dtype=np.int64)
        solved = self._flow(weight, penalty)
        value = 0
        if solved is not None:
            flow, caps, paid = solved
            value = int(flow.optimal_flow())
            left = caps - np.asarray(flow.flows(np.arange(len(caps))), dtype=np.int64)
            k, m = len(self._saves), len(self._need[0])
            save[self._saves] = left[:k]
            through = caps[k : k + m] - left[k : k + m]
            again[self._again[paid]] = left[k + m :]
        edges: dict[tuple[int, int], int] = {}
        for edge, passing in zip(self._edges, through.tolist(), strict=True):
            edges[edge] = edges.get(edge, 0) + passing
        return Losses(value=value, save=save.tolist(), recompute=again.tolist(), edges=edges)

    def _flow(self, weight: Any, penalty: Any) -> tuple[Any, Any, Any] | None:
        """Return the maximum flow, the arcs' capacities, and a mask of recomputable nodes whose penalty is above 0."""
        import numpy as np

        if not len(self._saves):  # backward reads no node
            return None
        weights = np.asarray(weight, dtype=np.int64)
        penalties = None if penalty is None else np.asarray(penalty, dtype=np.int64)
        # Sum in doubles, because a sum in int64 would overflow without an error.
        total = sum(int(x.sum(dtype=np.float64)) for x in (weights, penalties) if x is not None)
        infinite = 2 * total + 1  # more than the price of any decision
        if infinite > INT64_MAX // 2:
            raise ProblemError(
                f"the prices of the cut sum to about {total}; expected less than {INT64_MAX // 4}: "
                "scale them down"
            )
        need = len(self._need[0])
        caps = [
            np.where(self._savable, weights[self._saves], infinite),
            np.full(need, infinite, dtype=np.int64),
        ]
        tails, heads = [self._in, self._need[0]], [self._out, self._need[1]]
        paid = np.zeros(len(self._again), dtype=bool)
        if penalties is not None:
            fee = penalties[self._again]
            paid = fee > 0
            tails.append(np.full(int(paid.sum()), _SOURCE, dtype=np.int64))
            heads.append(self._again_in[paid])
            caps.append(fee[paid])
        arcs = np.concatenate(tails), np.concatenate(heads), np.concatenate(caps)
        return _solved(*arcs, most=infinite), arcs[2], paid


def _solved(tails: Any, heads: Any, capacities: Any, *, most: int) -> Any:
    """Solve a maximum flow with OR-Tools or, if OR-Tools is missing, with SciPy."""
    try:
        from ortools.graph.python import max_flow
    except ModuleNotFoundError:
        return ScipyFlow(tails, heads, capacities, source=_SOURCE, sink=_SINK, most=most)
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, capacities)
    status = flow.solve(_SOURCE, _SINK)
    if status != flow.OPTIMAL:
        raise ProblemError(f"the maximum flow ended with {status.name}, expected OPTIMAL")
    return flow
