"""Proven lower bounds on the cost of every schedule of a step within a peak.

Take one operator of backward. While it runs, each value that a later run reads is alive, or is recomputed afterwards.
The other bytes that are alive are known: weights, outputs, tangents, and the gradients so far. The remaining bytes of
the peak are the capacity of a graph problem: which values to save, if only the later runs read values. A schedule costs
at least as much as the optimum of this problem, for every node order, and however often forward's operators run. The
bound assumes that operators that only backward runs, such as those that depend on a tangent, run once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from remat.graph.joint import Role, split_outputs
from remat.graph.lowering import SavedKind
from remat.graph.storages import Sizes
from remat.passes.core.state import State
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.hull import Hull


class PeakBounds:
    """Lower bounds on the cost of every schedule of one prepared graph within a peak.

    Args:
        state: the prepared graph, as `remat.planning.pipelines.prepare` returns it.
        problem: the graph problem of ``state``: which values to save, and what recomputing the others costs.
    """

    def __init__(self, state: State, problem: GraphProblem) -> None:
        self._state, self._problem = state, problem
        self._sizes = Sizes(state.joint.memories)
        self._hulls: dict[int, tuple[Hull, int]] = {}
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

    def bound(self, peak_bytes: int, moments: Iterable[int]) -> int:
        """Return a lower bound on the cost of every schedule within a peak.

        Args:
            peak_bytes: limit on the peak, in bytes.
            moments: positions in the joint graph of nodes that backward runs under every decision, such as nodes that
                depend on a tangent. For each node, one bound is computed from the bytes alive while the node runs.

        Returns:
            The highest of these bounds; 0 if ``moments`` is empty.
        """
        found = [0]
        for moment in dict.fromkeys(moments):
            if moment not in self._hulls:
                self._hulls[moment] = self._hull(moment)
            hull, taken = self._hulls[moment]
            capacity = max(hull.least_bytes, peak_bytes - taken)
            found.append(hull.edge(capacity).bound(capacity))
        return max(found)

    def _hull(self, moment: int) -> tuple[Hull, int]:
        """Build the graph problem in which only runs after ``moment`` read values; return its hull.

        Args:
            moment: position in the joint graph of a node that backward runs under every decision.

        Returns:
            The lower convex hull of the problem's (saved bytes, cost) pairs, and the bytes that are alive under every
            decision while the node runs.
        """
        state, problem, sizes = self._state, self._problem, self._sizes
        index, late, lowered = state.index, state.roles.tangent_closure, state.lowered()
        before = self._reach(moment, index.inputs)
        after = self._reach(moment, index.users)
        alive = dict(self._always)

        def live(i: int) -> None:
            alive.update(sizes.of_all([index.nodes[i]]))

        for i in (moment, *index.inputs[moment]):
            live(i)
        for i in before:
            if any(u == moment or u in after for u in index.users[i]):
                live(i)
        made = {index.position[g] for g in self._gradients}
        for i in made & before:
            live(i)
        # Reads of inputs with a snapshot are ignored. Fewer reads can only lower the bound, so it stays valid.
        copied = {
            at
            for at, kind in zip(lowered.position, lowered.kind, strict=True)
            if kind is SavedKind.SNAPSHOT
        }
        reads = {j for i in after for j in index.inputs[i] if not late[j] and j not in copied}
        reads |= {i for i in made & after if not late[i]}
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
            known=(),
        )
        return Hull(narrowed), sum(alive.values())

    def _reach(self, moment: int, edges: tuple[tuple[int, ...], ...]) -> set[int]:
        """Return the nodes of backward that ``moment`` depends on, or those that depend on ``moment``.

        Args:
            moment: position in the joint graph of a node that backward runs under every decision. The result leaves out
                this node.
            edges: for each position, the positions of the node's inputs, or those of its users. The nodes that can be
                reached over these edges are returned, by position.
        """
        late = self._state.roles.tangent_closure
        found: set[int] = set()
        stack = [moment]
        while stack:
            for j in edges[stack.pop()]:
                if late[j] and j not in found:
                    found.add(j)
                    stack.append(j)
        return found
