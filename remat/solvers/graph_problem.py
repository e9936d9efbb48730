"""The graph problem: which values to save from forward to backward, on the whole graph, in plain integers.

Every value that can be computed from the inputs of a training step is a node. A decision names the
nodes that are *saved*; whatever else backward reads is *recomputed* from them. ``evaluate`` is the
one yardstick: it follows the decision through the graph and counts bytes and cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from remat.errors import BudgetError, ProblemError
from remat.solvers import columns
from remat.solvers.problem import Limits, Problem, read_indices
from remat.solvers.solution import GraphSolution


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem(Problem[GraphSolution]):
    """A rematerialisation problem over ``n`` nodes in topological order.

    Sequences may be any ordered iterables and are kept as tuples; all but ``needed`` have length ``n``.
    Indices refer to positions in them. Sums may not exceed 2**63 - 1.

    Attributes:
        names: what each node is called, for messages.
        inputs: for each node, the nodes it is computed from (all at smaller positions).
        cost: cost of running the node once more, in ``unit``.
        size: bytes that saving the node takes; 0 for what is alive anyway.
        savable: whether the node may be saved.
        recomputable: whether the node may run again in backward.
        in_forward: whether forward runs the node whatever is decided. A node outside it costs
            nothing the first time it runs, in either half.
        needed: the nodes that backward reads.
        unit: unit of ``cost``.
        capacity: bytes that may be saved in total; None: as many as one likes.
        known: legal decisions (positions of the nodes to save) that a solver may start from, whether
            or not they fit the capacity: the minimum cuts of a compiler's rules, the one that
            recomputes least first. They are no part of the problem.
    """

    kind: ClassVar[str] = "graph"
    method: ClassVar[str] = "solve_graph"
    expected: ClassVar[str] = (
        "indices are due: return an iterable of node indices, or Answer(saved, bound)"
    )
    solution: ClassVar[type[GraphSolution]] = GraphSolution
    bytes_taken: ClassVar[str] = "saved_bytes"
    bound_text: ClassVar[str] = "every decision costs at least"
    own_text: ClassVar[str] = "its own decision costs"

    names: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    cost: tuple[int, ...]
    size: tuple[int, ...]
    savable: tuple[bool, ...]
    recomputable: tuple[bool, ...]
    in_forward: tuple[bool, ...]
    needed: tuple[int, ...]
    unit: str = "flops"
    capacity: int | None = None
    known: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        where = "GraphProblem."
        names = columns.texts(where + "names", self.names)
        self._put(names=names, inputs=columns.earlier_nodes(where + "inputs", self.inputs, names))
        for label in ("cost", "size"):
            self._put(**{label: columns.amounts(where + label, getattr(self, label), names)})
        for label in ("savable", "recomputable", "in_forward"):
            self._put(**{label: columns.flags(where + label, getattr(self, label), names)})
        last = len(names) - 1
        self._put(
            needed=columns.integers(where + "needed", self.needed, 0, last),
            capacity=columns.capacity(where + "capacity", self.capacity),
        )

    def __len__(self) -> int:
        return len(self.names)

    def knowing(self, known: tuple[tuple[int, ...], ...]) -> GraphProblem:
        """The same problem with decisions that are known to be legal."""
        return self._with(known=known)

    def priced(self, cost: tuple[int, ...], unit: str) -> GraphProblem:
        """The same problem under other costs, in another unit; only the costs are checked again."""
        return self._with(cost=columns.amounts("GraphProblem.cost", cost, self.names), unit=unit)

    def read(self, entries: list[Any]) -> tuple[int, ...]:
        return read_indices(entries, len(self), "node")

    def measure(self, choice: tuple[int, ...]) -> dict[str, Any]:
        try:
            done = evaluate(self, choice)
        except ProblemError as error:
            raise ProblemError(f"returned a decision that cannot run: {error}") from None
        return {
            "saved": done.saved,
            "cost": done.recompute_cost,
            "saved_bytes": done.saved_bytes,
        }

    def excess(self, figures: Mapping[str, Any]) -> str:
        return f"an overweight decision: {figures['saved_bytes']} bytes"

    def limits(self) -> Limits:
        return Limits(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures of a decision: saved and recomputed nodes, bytes and cost.

    Attributes:
        saved: the nodes that are saved and that backward really reads, in node order.
        recomputed: the nodes that run again in backward, in node order.
        saved_bytes: bytes of ``saved``.
        recompute_cost: summed cost of what runs a second time, in the problem's unit.
    """

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    saved_bytes: int
    recompute_cost: int


def evaluate(problem: GraphProblem, saved: Iterable[int]) -> Evaluation:
    """Follows a decision through the graph.

    Args:
        problem: the problem.
        saved: positions of the nodes to save. Saving a node that nothing in backward reads is legal
            and counts for nothing.

    Returns:
        The bytes, the cost and the sets that the decision comes to.

    Raises:
        ProblemError: the decision saves what cannot be saved, or leaves backward with a node that
            is neither saved nor recomputable; the message names the node.
    """
    n = len(problem)
    keep = bytearray(n)
    for i in saved:
        if not 0 <= i < n:
            raise ProblemError(f"decision saves node {i}; expected 0..{n - 1}")
        if not problem.savable[i]:
            raise ProblemError(f"decision saves '{problem.names[i]}', which cannot be saved")
        keep[i] = 1
    read = bytearray(n)
    again = bytearray(n)
    stack = list(problem.needed)
    while stack:
        i = stack.pop()
        if read[i]:
            continue
        read[i] = 1
        if keep[i]:
            continue
        if not problem.recomputable[i]:
            raise ProblemError(
                f"backward reads '{problem.names[i]}', which is neither saved nor recomputable"
            )
        again[i] = 1
        stack.extend(problem.inputs[i])
    kept = tuple(i for i in range(n) if keep[i] and read[i])
    forward = bytearray(problem.in_forward)
    stack = [i for i in kept if not forward[i]]
    while stack:
        i = stack.pop()
        if not forward[i]:
            forward[i] = 1
            stack.extend(problem.inputs[i])
    recomputed = tuple(i for i in range(n) if again[i])
    return Evaluation(
        saved=kept,
        recomputed=recomputed,
        saved_bytes=sum(problem.size[i] for i in kept),
        recompute_cost=sum(problem.cost[i] for i in recomputed if forward[i]),
    )


def conflict(problem: GraphProblem, fixed: Sequence[bool] | None = None) -> tuple[int, ...] | None:
    """A chain of nodes that no decision can satisfy, or None.

    The chain ends in a node that backward reads and starts in one that may neither be saved nor
    recomputed; every node between cannot be saved, so each must be recomputed from the one before.

    Args:
        problem: the problem.
        fixed: nodes that may not be recomputed in addition to the problem's own.
    """
    n = len(problem)
    parent = [-2] * n
    stack = []
    for i in problem.needed:
        if not problem.savable[i] and parent[i] == -2:
            parent[i] = -1
            stack.append(i)
    while stack:
        i = stack.pop()
        if not problem.recomputable[i] or (fixed is not None and fixed[i]):
            chain = [i]
            while parent[chain[-1]] >= 0:
                chain.append(parent[chain[-1]])
            return tuple(chain)
        for j in problem.inputs[i]:
            if not problem.savable[j] and parent[j] == -2:
                parent[j] = i
                stack.append(j)
    return None


def infeasible(capacity: int, least_bytes: int) -> BudgetError:
    """The error for a capacity that no decision keeps to."""
    return BudgetError(
        f"no decision saves as little as {capacity} bytes; the least possible is {least_bytes}: "
        "raise the budget, or loosen MUST_SAVE tags"
    )
