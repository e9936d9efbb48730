"""Define the graph problem: choose the values of a training step to save for backward.

Every value that can be computed from the inputs of the training step is a node. A *decision* is a
set of saved nodes. Unsaved nodes that backward reads are *recomputed* from the saved nodes.
`evaluate` defines the bytes and the cost of a decision, both integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from remat.errors import BudgetError, ProblemError
from remat.solvers import columns
from remat.solvers.problem import Problem
from remat.solvers.solution import GraphSolution


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem(Problem[GraphSolution]):
    """Choose nodes to save whose bytes stay within a capacity, so that recomputing the other nodes costs least.

    A node is a value of the training step. The nodes are in topological order, and a node's index
    is its position in this order. Arguments may be any ordered iterables and are stored as
    tuples. The sum of ``cost`` and the sum of ``size`` may not exceed 2**63 - 1.

    Attributes:
        names: name of each node, for messages.
        inputs: for each node, the nodes from which it is computed, all at smaller positions.
        cost: cost of one further run of each node, in ``unit``.
        size: bytes that saving each node takes; 0 for a value that stays alive even if not saved.
        savable: whether each node may be saved.
        recomputable: whether each node may run again in backward.
        in_forward: whether forward runs each node even if nothing is saved. Any other node first
            runs in backward, or in forward if a saved node needs it. The first run of a node adds
            no recompute cost.
        needed: the nodes that backward reads.
        unit: unit of ``cost``.
        capacity: bytes that may be saved in total; None: no limit.
        hints: legal decisions that a solver may start from, each as positions of the nodes to save.
            Hints are minimum cuts under a compiler's rules for recomputation. The cut that
            recomputes least comes first. Hints may exceed the capacity. Problems that differ only in
            ``hints`` are equal.

    Raises:
        ProblemError: an argument is invalid; the message names it.
    """

    kind: ClassVar[str] = "graph"
    method: ClassVar[str] = "solve_graph"
    noun: ClassVar[str] = "decision"
    solution: ClassVar[type[GraphSolution]] = GraphSolution
    bytes_taken: ClassVar[str] = "saved_bytes"

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
    hints: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        self._check(columns.typed, "names", kind=str)
        self._check(columns.earlier_nodes, "inputs", names=self.names)
        self._check(columns.amounts, "cost", "size", names=self.names)
        flags = "savable", "recomputable", "in_forward"
        self._check(columns.typed, *flags, kind=bool, names=self.names)
        self._check(columns.integers, "needed", high=len(self) - 1)
        self._check(columns.capacity, "capacity")

    def __len__(self) -> int:
        return len(self.names)

    def priced(self, cost: tuple[int, ...], unit: str) -> GraphProblem:
        """Return a copy of this problem with other costs of nodes, perhaps in another unit; check only the costs."""
        return self._with(cost=columns.amounts(self._label("cost"), cost, self.names), unit=unit)

    def measure(self, choice: tuple[int, ...]) -> dict[str, Any]:
        evaluation = evaluate(self, choice)
        return {
            "saved": evaluation.saved,
            "cost": evaluation.recompute_cost,
            "saved_bytes": evaluation.saved_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Bytes and cost of a decision.

    Attributes:
        saved: the saved nodes that backward reads, in node order; other saved nodes are left out.
        recomputed: the nodes that run again in backward, in node order.
        saved_bytes: total bytes of ``saved``.
        recompute_cost: total cost of the second runs of nodes. A recomputed node whose first run is
            in backward adds no cost.
    """

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    saved_bytes: int
    recompute_cost: int


def evaluate(problem: GraphProblem, saved: Iterable[int]) -> Evaluation:
    """Compute the bytes and the cost of a decision, given as the positions of the saved nodes.

    Raises:
        ProblemError: an entry of ``saved`` is no node or cannot be saved, or backward reads a node
            that is neither saved nor recomputable. The message names the node.
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
    saved_and_read = tuple(i for i in range(n) if keep[i] and read[i])
    # A saved node with `in_forward` False runs in forward after all, with its inputs. If backward runs one
    # of them again, that second run has a cost.
    forward = bytearray(problem.in_forward)
    stack = [i for i in saved_and_read if not forward[i]]
    while stack:
        i = stack.pop()
        if not forward[i]:
            forward[i] = 1
            stack.extend(problem.inputs[i])
    recomputed = tuple(i for i in range(n) if again[i])
    return Evaluation(
        saved=saved_and_read,
        recomputed=recomputed,
        saved_bytes=sum(problem.size[i] for i in saved_and_read),
        recompute_cost=sum(problem.cost[i] for i in recomputed if forward[i]),
    )


def always_saved(problem: GraphProblem) -> tuple[int, ...]:
    """Return the savable nodes that every decision should save: those of 0 bytes, and those that cannot be recomputed.

    Nodes that backward does not read are included, but `evaluate` ignores saved nodes that backward does not read.
    """
    return tuple(
        i
        for i in range(len(problem))
        if problem.savable[i] and (not problem.recomputable[i] or not problem.size[i])
    )


def worth_saving(problem: GraphProblem, saved: Iterable[int]) -> list[int]:
    """Return the recomputed nodes that a decision could save to lower its cost, highest cost per byte first."""
    again = (
        i
        for i in evaluate(problem, saved).recomputed
        if problem.savable[i] and problem.cost[i] and problem.in_forward[i]
    )
    return sorted(again, key=lambda i: (-problem.cost[i] / (1 + problem.size[i]), i))


def conflict(problem: GraphProblem, fixed: Sequence[bool] | None = None) -> tuple[int, ...] | None:
    """Return a chain of nodes that makes the problem infeasible; None if the problem is feasible.

    The first node of the chain can be neither saved nor recomputed. Each later node of the chain cannot be saved, so it
    must be recomputed from the node before it. Backward reads the last node of the chain. If ``fixed`` is True for a
    node, the node may not be recomputed, even if the problem allows the recomputation.
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
    """Build the error for a problem in which every decision saves more than ``capacity`` bytes."""
    return BudgetError(
        f"no decision saves as little as {capacity} bytes; the least possible is {least_bytes}: "
        "raise the budget, or loosen MUST_SAVE tags"
    )
