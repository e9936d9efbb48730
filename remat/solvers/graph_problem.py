"""The graph problem: what to keep from forward to backward, on the whole graph, in plain integers.

Every value that can be computed from the inputs of a training step is a node. A decision names the
nodes that are *saved*; whatever else backward reads is *recomputed* from them. ``evaluate`` is the
one yardstick: it follows the decision through the graph and counts bytes and cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from remat.errors import BudgetError, ProblemError
from remat.solvers.problem import INT64_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem:
    """A rematerialisation problem over ``n`` nodes in topological order.

    All sequences have length ``n``; indices refer to positions in them. Sums may not exceed 2**63 - 1.

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
        n = len(self.names)
        for label in ("inputs", "cost", "size", "savable", "recomputable", "in_forward"):
            if len(getattr(self, label)) != n:
                raise ProblemError(
                    f"GraphProblem.{label} has {len(getattr(self, label))} entries, expected {n}, "
                    "one for each name"
                )
        for label in ("cost", "size"):
            _check_numbers(label, getattr(self, label), self.names)
        for label in ("savable", "recomputable", "in_forward"):
            for i, x in enumerate(getattr(self, label)):
                if type(x) is not bool:
                    raise ProblemError(
                        f"GraphProblem.{label}[{i}] ({self.names[i]}) is {x!r}; expected True or False"
                    )
        for i, inputs in enumerate(self.inputs):
            if any(type(j) is not int or not 0 <= j < i for j in inputs):
                raise ProblemError(
                    f"GraphProblem.inputs[{i}] ({self.names[i]}) is {inputs}; nodes must be in "
                    "topological order, each input before its reader"
                )
        for i in self.needed:
            if type(i) is not int or not 0 <= i < n:
                raise ProblemError(
                    f"GraphProblem.needed names a node outside 0..{n - 1}: {i!r}; expected positions"
                )
        _check_capacity(self.capacity)

    def __len__(self) -> int:
        return len(self.names)

    def within(self, capacity: int | None) -> GraphProblem:
        """The same problem under another capacity, in bytes; nothing else is checked again."""
        _check_capacity(capacity)
        return self._with(capacity=capacity)

    def knowing(self, known: tuple[tuple[int, ...], ...]) -> GraphProblem:
        """The same problem with decisions that are known to be legal."""
        return self._with(known=known)

    def priced(self, cost: tuple[int, ...], unit: str) -> GraphProblem:
        """The same problem under other costs, in another unit; only the costs are checked again."""
        _check_numbers("cost", cost, self.names)
        return self._with(cost=cost, unit=unit)

    def _with(self, **changes: object) -> GraphProblem:
        same = object.__new__(GraphProblem)
        for f in fields(self):
            object.__setattr__(same, f.name, changes.get(f.name, getattr(self, f.name)))
        return same


def _check_numbers(label: str, numbers: tuple[int, ...], names: tuple[str, ...]) -> None:
    for i, x in enumerate(numbers):
        if type(x) is not int or x < 0:
            raise ProblemError(
                f"GraphProblem.{label}[{i}] ({names[i]}) is {x!r}; expected an int of 0 or more"
            )
    if sum(numbers) > INT64_MAX:
        raise ProblemError(
            f"GraphProblem.{label} sums to {sum(numbers)}; expected at most 2**63 - 1: use a coarser unit"
        )


def _check_capacity(capacity: object) -> None:
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise ProblemError(
            f"GraphProblem.capacity is {capacity!r}; expected bytes, an int of 0 or more, or None"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a decision saves, recomputes, takes and costs.

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
