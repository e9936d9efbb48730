"""Minimum cuts of a graph problem, on OR-Tools' push-relabel maximum flow in 64-bit integers.

Each node is split into an *in* and an *out* vertex. After the cut a vertex on the sink side means:
*in*, the node is recomputed in backward; *out*, backward has the value. So the arc in→out, cut,
saves the node; the arc source→in, cut, recomputes it; and out(u)→in(v), never cut, says that a
recomputed node needs each of its inputs. A node that must not be recomputed has its *in* merged
with the source, and one that backward reads has its *out* merged with the sink, which leaves a
network far smaller than one with infinite arcs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remat.errors import ProblemError
from remat.solvers.graph_problem import GraphProblem, conflict

INT64_MAX = 2**63 - 1
_SOURCE, _SINK = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A minimum cut.

    Attributes:
        value: capacity of the cut.
        saved: positions of the nodes whose in→out arc is cut, in node order.
    """

    value: int
    saved: tuple[int, ...]


class InfeasibleCutError(ProblemError):
    """No finite cut exists.

    Attributes:
        chain: positions of the nodes that make it so, the one that cannot be recomputed first.
    """

    def __init__(self, problem: GraphProblem, chain: Sequence[int]) -> None:
        path = " → ".join(f"'{problem.names[i]}'" for i in chain)
        super().__init__(
            f"backward reads '{problem.names[chain[-1]]}', but nothing on the way to it may be "
            f"saved, and its origin may not be recomputed: {path}"
        )
        self.chain = tuple(chain)


class Network:
    """The vertices and arcs of one graph problem, built once; every cut brings its own prices.

    Args:
        problem: nodes, edges, and what may be saved and recomputed.
        fixed: nodes that may not be recomputed in addition to the problem's own.

    Raises:
        InfeasibleCutError: backward reads something that can neither be saved nor recomputed.
    """

    def __init__(self, problem: GraphProblem, *, fixed: Sequence[bool] | None = None) -> None:
        import numpy as np

        chain = conflict(problem, fixed)
        if chain is not None:
            raise InfeasibleCutError(problem, chain)
        n = len(problem)
        self._problem = problem
        out = [-1] * n
        inn = [_SOURCE] * n
        count = 2
        save_tails: list[int] = []
        save_heads: list[int] = []
        saves: list[int] = []  # node of each in→out arc
        again: list[int] = []  # node of each source→in arc
        need_tails: list[int] = []
        need_heads: list[int] = []
        for i in problem.needed:
            out[i] = _SINK
        # Only what backward can reach upwards through recomputable nodes takes part.
        for i in range(n - 1, -1, -1):
            if out[i] == -1:
                continue
            if problem.recomputable[i] and not (fixed is not None and fixed[i]):
                inn[i] = vertex = count
                count += 1
                again.append(i)
                for j in problem.inputs[i]:
                    if out[j] == -1:
                        out[j] = count
                        count += 1
                    if out[j] != _SINK:
                        need_tails.append(out[j])
                        need_heads.append(vertex)
            save_tails.append(inn[i])
            save_heads.append(out[i])
            saves.append(i)
        self._count = count
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

    def cut(self, weight: Any, penalty: Any = None) -> Cut:
        """The cheapest way to give backward what it reads: Σ weight saved + Σ penalty recomputed.

        Of all minimum cuts the one nearest to backward is returned: it recomputes least.

        Args:
            weight: price of saving each node of the problem, ints of 0 or more (sequence or array).
            penalty: price of recomputing each node likewise; all free where None.

        Raises:
            ProblemError: the prices sum past the range of 64-bit integers.
        """
        import numpy as np
        from ortools.graph.python import max_flow

        if not len(self._saves):
            return Cut(value=0, saved=())
        total = sum(map(int, weight)) + (sum(map(int, penalty)) if penalty is not None else 0)
        infinite = total + 1
        if infinite > INT64_MAX // 4:
            raise ProblemError(
                f"the prices of the cut sum to {total}; expected less than {INT64_MAX // 4}: "
                "scale them down"
            )
        price = np.asarray(weight, dtype=np.int64)[self._saves]
        tails = [self._in, self._need[0]]
        heads = [self._out, self._need[1]]
        caps = [
            np.where(self._savable, price, infinite),
            np.full(len(self._need[0]), infinite, dtype=np.int64),
        ]
        if penalty is not None:
            fee = np.asarray(penalty, dtype=np.int64)[self._again]
            paid = fee > 0
            tails.append(np.full(int(paid.sum()), _SOURCE, dtype=np.int64))
            heads.append(self._again_in[paid])
            caps.append(fee[paid])
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(
            np.concatenate(tails), np.concatenate(heads), np.concatenate(caps)
        )
        status = flow.solve(_SOURCE, _SINK)
        if status != flow.OPTIMAL:
            raise ProblemError(f"the maximum flow ended with {status.name}, expected OPTIMAL")
        sink_side = np.zeros(self._count, dtype=bool)
        sink_side[_SINK] = True
        sink_side[np.asarray(flow.get_sink_side_min_cut(), dtype=np.int64)] = True
        chosen = self._saves[sink_side[self._out] & ~sink_side[self._in]]
        return Cut(value=int(flow.optimal_flow()), saved=tuple(sorted(map(int, chosen))))


def min_cut(
    problem: GraphProblem,
    *,
    weight: Sequence[int],
    penalty: Sequence[int] | None = None,
    fixed: Sequence[bool] | None = None,
) -> Cut:
    """One cut of one problem; see `Network`, which serves many cuts of the same problem."""
    return Network(problem, fixed=fixed).cut(weight, penalty)


def lagrangian_bound(problem: GraphProblem, capacity: int, *, rounds: int = 24) -> int:
    """A proven lower bound on the recompute cost of every decision within ``capacity`` bytes.

    For a price p/q on a byte, the cut with weights p·size and penalties q·cost minimises
    q·cost + p·bytes over all decisions; less p·capacity and divided by q, its value is a lower
    bound whatever the price. The best price is found by bisection between prices whose decision
    fits and prices whose decision does not.

    Args:
        problem: the problem.
        capacity: bytes that may be saved.
        rounds: cuts to spend at most; more only sharpen the bound.

    Returns:
        The bound, in the problem's unit; 0 where nothing better is proven.
    """
    import numpy as np

    size = np.asarray(problem.size, dtype=object)
    cost = np.asarray(
        [c if f else 0 for c, f in zip(problem.cost, problem.in_forward, strict=True)], dtype=object
    )
    total_size, total_cost = int(sum(size)), int(sum(cost))
    if total_size == 0 or total_cost == 0:
        return 0
    network = Network(problem)
    room = INT64_MAX // 8
    best = 0
    low, high = 0.0, float("inf")  # prices known to be too low and too high
    price = total_cost / total_size
    for _ in range(rounds):
        q = max(1, int(room / (total_cost + price * total_size)))
        p = max(1, int(price * q))
        if q * total_cost + p * total_size > INT64_MAX // 4:
            break
        cut = network.cut(p * size, q * cost)
        best = max(best, -(-(cut.value - p * capacity) // q))
        used = sum(problem.size[i] for i in cut.saved)
        if used == capacity or (high < float("inf") and low > 0 and high < low * 1.0001):
            break
        if used > capacity:
            low = price
            price = price * 8 if high == float("inf") else (low * high) ** 0.5
        else:
            high = price
            price = price / 8 if low == 0.0 else (low * high) ** 0.5
    return best
