"""Proven lower bounds on the cost of every schedule of a step within a peak.

While an operator of backward runs, each value that a later run reads is alive, or is recomputed afterwards. All other
bytes alive while an operator of backward runs are known: weights, outputs, tangents, and the gradients so far. The
remaining bytes of the peak are the capacity of a graph problem, which chooses the values to save for later runs. A
schedule costs at least as much as the optimum of this graph problem, for every node order, and however often forward's
operators run. The bound assumes that operators that only backward runs, such as those that depend on a tangent, run
once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter

from torch import fx

from remat.graph.joint import Role, split_outputs
from remat.graph.memory.storages import Sizes
from remat.graph.problems.lowering import SavedKind
from remat.passes.core.state import State
from remat.planning.context import GraphContext
from remat.planning.search.effort import DEFAULT
from remat.planning.search.schedules import Schedules
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.pareto import pareto
from remat.solvers.graph.problem import GraphProblem


class PeakBounds:
    """Computes lower bounds on the cost of every schedule of one prepared graph within a peak.

    Args:
        state: the prepared graph, as `remat.planning.pipelines.prepare` returns it.
        problem: the graph problem of ``state``: which values to save, and what recomputing the others costs.
    """

    def __init__(self, state: State, problem: GraphProblem) -> None:
        self._state, self._problem = state, problem
        self._sizes = Sizes(state.joint.memories)
        self._hulls: dict[int, tuple[Hull, int]] = {}
        # These bytes are alive under every decision, so they are not available for saved values.
        outputs, gradients, _, _ = split_outputs(state.joint)
        roles, nodes = state.roles, state.index.nodes
        there = [
            nodes[i]
            for i, role in roles.placeholders.items()
            if role in (Role.PRIMAL, Role.FORWARD_SEED, Role.BACKWARD_STATE)
        ]
        #: Bytes of the storages that are alive throughout backward, by key of the storage.
        self._always = self._sizes.of_all((*there, *(o for o in outputs if isinstance(o, fx.Node))))
        self._gradients = [g for g in gradients if isinstance(g, fx.Node)]

    def bound(self, peak_bytes: int, program_points: Iterable[int]) -> int:
        """Return a lower bound on the cost of every schedule within a peak.

        Args:
            peak_bytes: limit on the peak, in bytes.
            program_points: positions in the joint graph of nodes that backward runs under every decision, such as nodes
                that depend on a tangent. For each node, one bound is computed from the bytes alive while the node runs.

        Returns:
            The highest of the bounds for each program point; 0 if ``program_points`` is empty.
        """
        bounds = [0]
        for program_point in dict.fromkeys(program_points):
            if program_point not in self._hulls:
                self._hulls[program_point] = self._hull(program_point)
            hull, alive_bytes = self._hulls[program_point]
            capacity = max(hull.least_bytes, peak_bytes - alive_bytes)
            bounds.append(hull.edge(capacity).bound(capacity))
        return max(bounds)

    def _hull(self, program_point: int) -> tuple[Hull, int]:
        """Return the hull of the graph problem for runs after ``program_point``, and the bytes alive at this point."""
        state, problem, sizes = self._state, self._problem, self._sizes
        index, late, lowered = state.index, state.roles.tangent_closure, state.lowered()
        before = self._reach(program_point, index.inputs)
        after = self._reach(program_point, index.users)
        alive = dict(self._always)

        def live(i: int) -> None:
            alive.update(sizes.of_all([index.nodes[i]]))

        for i in (program_point, *index.inputs[program_point]):
            live(i)
        for i in before:
            if any(u == program_point or u in after for u in index.users[i]):
                live(i)
        gradients = {index.position[g] for g in self._gradients}
        for i in gradients & before:
            live(i)
        # Reads of inputs with a snapshot are ignored. Fewer reads can only lower the bound, so it stays valid.
        copied = {
            at
            for at, kind in zip(lowered.position, lowered.kind, strict=True)
            if kind is SavedKind.SNAPSHOT
        }
        reads = {j for i in after for j in index.inputs[i] if not late[j] and j not in copied}
        reads |= {i for i in gradients & after if not late[i]}
        needed = {at for j in reads if (at := lowered.of_position[j]) >= 0}
        owner = state.storages.owner
        # Saving a value takes no bytes if its storage is alive in any case.
        free = [
            not size or any(k in alive for k in sizes.keys(index.nodes[owner[at]]))
            for size, at in zip(problem.size, lowered.position, strict=True)
        ]
        narrowed = replace(
            problem,
            needed=tuple(sorted(needed)),
            size=tuple(0 if f else size for f, size in zip(free, problem.size, strict=True)),
            hints=(),
        )
        return Hull(narrowed), sum(alive.values())

    def _reach(self, program_point: int, edges: tuple[tuple[int, ...], ...]) -> set[int]:
        """Return the nodes of backward to which ``edges`` (to inputs or to users) lead from ``program_point``."""
        late = self._state.roles.tangent_closure
        reached: set[int] = set()
        stack = [program_point]
        while stack:
            for j in edges[stack.pop()]:
                if late[j] and j not in reached:
                    reached.add(j)
                    stack.append(j)
        return reached


def line_of_bounds(
    schedules: Schedules,
    bound: Callable[[int, Iterable[int]], int],
    starts: Iterable[Iterable[int]],
) -> tuple[tuple[int, int], ...]:
    """Return a lower bound on the cost of every schedule, as a step function of the peak.

    No schedule of the step lies below the line. A bound that is proven for one peak also holds for all lower peaks. The
    line is therefore constant between the peaks at which bounds are computed.

    Args:
        schedules: the decisions of the graph, by the peaks of their schedules.
        bound: function that takes a peak in bytes and program points, and returns a lower bound on the cost within
            this peak, such as `PeakBounds.bound`.
        starts: decisions, each as its saved nodes of the graph problem. The highest peak of the Pareto-optimal
            decisions is the end of the line. The program points for ``bound`` are those where two of these
            decisions have most bytes alive.

    Returns:
        Vertices (peak bytes, cost) of the line, from the least possible peak upwards.
    """
    best = pareto(map(schedules.candidate, starts), lambda t: (t.peak_bytes, t.cost))
    low, high = schedules.least_possible, best[-1].peak_bytes
    program_points = [m for t in (best[0], best[len(best) // 2]) for m in schedules.highest(t)]
    peaks = sorted({low + (high - low) * k // DEFAULT.bounds for k in range(DEFAULT.bounds + 1)})
    costs = accumulate((bound(p, program_points) for p in peaks), min)
    line: dict[int, int] = {}
    for cost, flat in groupby(zip(peaks, costs, strict=True), key=itemgetter(1)):
        end = max(peak_bytes for peak_bytes, _ in flat)
        line |= {low: cost, end: cost}
        low = end + 1
    return tuple(line.items())


def bound_with_offloads(
    context: GraphContext, bounds: PeakBounds, peak_bytes: int, program_points: Iterable[int]
) -> int:
    """Return a lower bound on the cost of every decision with offloads within a peak, for any node order.

    Let T be the cost that a decision adds to the step. Values in the host's memory during backward were sent during
    forward, and forward takes at most its operators' time plus T. The decision therefore offloads at most B bytes,
    where B is what the link can send during forward, limited by the host's memory. If the offloaded bytes stayed on the
    device, the peak would rise by at most B. The cost T is therefore at least the bound without offloads for a peak
    that is higher by B. The result is the least T that is not below the bound computed with this T.

    Args:
        context: the prepared graph.
        bounds: bounds without offloads.
        peak_bytes: limit on the peak, in bytes.
        program_points: positions in the joint graph of nodes that backward runs under every decision. The bound without
            offloads is computed from the bytes alive while each of these nodes runs.
    """
    at_points, forward = tuple(program_points), context.forward_time

    def least(added: int) -> int:
        # `bytes_in` rounds down, which would make the bound too high.
        sent_bytes = context.request.link.bytes_in(forward + added) + 1
        if context.request.host_memory is not None:
            sent_bytes = min(sent_bytes, context.request.host_memory)
        return bounds.bound(peak_bytes + sent_bytes, at_points)

    # For any smaller T, the bound `least(T)` is above T, so no decision costs T.
    return bisect_left(range(least(0)), True, key=lambda added: least(added) <= added)
