"""Bounds on the simulated peak of a decision, computed without splitting the graph.

`remat.graph.memory.liveness` simulates forward and backward node by node. The bounds in this module use the same
lifetimes of storages as the simulation, but several nodes may share a program point. Each position in the joint graph
has two program points in forward, and two in backward. Forward runs the node of a position at the position's first
program point, and nodes that only backward needs at the second. Backward runs recomputations for a position's node at
the first program point, and the node itself at the second. The lower and the upper bound are equal unless the peak is
at a program point that several nodes share.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.joint import Role, split_outputs
from remat.graph.memory.liveness import sums_of
from remat.graph.memory.storages import leaves_of, storage_bytes, workspace_bytes
from remat.graph.problems.lowering import Decision
from remat.passes.core.state import State

#: Bytes, first and last program point at which they are surely alive, and first and last program point at which they may be alive.
#: They are surely alive at no program point if the first is after the last.
Span = tuple[int, int, int, int, int]


def peak_bounds(state: State, decision: Decision) -> tuple[int, int] | None:
    """Return a lower and an upper bound on the simulated peak of a decision, in bytes.

    The result is None if the nodes run in an order that this module cannot derive. The reasons are node orders,
    offloads or copies of inputs in the decision, hooks on saved tensors, and nodes with effects in backward, such as
    random draws.

    Args:
        state: the prepared graph.
        decision: the decision.
    """
    if decision.is_ordered or decision.offloads or decision.snapshots or state.hooks:
        return None
    return _Step(state, [state.index.by_name[name] for name in decision.saved]).bounds()


class _Step:
    """The nodes that forward and backward run, and the program points at which they run.

    Args:
        state: the prepared graph.
        saved: positions of the saved values.
    """

    def __init__(self, state: State, saved: Iterable[int]) -> None:
        self._index, roles, storages = state.index, state.roles, state.storages
        self._owner, self._size, self._mutated = storages.owner, storages.nbytes, storages.mutated
        self._late, self._required = roles.tangent_closure, roles.required_forward
        self._placeholders, position = roles.placeholders, self._index.position
        self._outputs, self._gradients = (
            [position[v] for v in values if isinstance(v, fx.Node)]
            for values in split_outputs(state.joint)[:2]
        )
        keep = frozenset(saved)
        self._backward = self._reached(self._gradients, keep | self._placeholders.keys())
        read = (j for i in self._backward for j in self._index.inputs[i])
        self._saved_for_backward = keep.intersection((*read, *self._gradients))
        required = [i for i, is_required in enumerate(self._required) if is_required]
        self._forward = sorted([*required, *self._reached(self._saved_for_backward, required)])
        self._start = roles.first_late
        self._end = 4 * len(self._index)

    def _reached(self, roots: Iterable[int], there: Iterable[int]) -> list[int]:
        """Return which nodes must run to compute the nodes ``roots`` if the values of ``there`` are in memory."""
        seen, stack, reached = bytearray(len(self._index)), [*roots], list[int]()
        for i in there:
            seen[i] = 1
        while stack:
            i = stack.pop()
            if not seen[i]:
                seen[i] = 1
                reached.append(i)
                stack += self._index.inputs[i]
        return sorted(reached)

    def bounds(self) -> tuple[int, int] | None:
        """Return a lower and an upper bound on the simulated peak; None if the order of the nodes is unknown."""
        index, roles = self._index, self._placeholders.items()
        tuples = [*self._tuples(self._forward), *self._tuples(self._backward)]
        users = (index.nodes[u].target for i, _ in tuples for u in index.users[i])
        special = {*index.special}.intersection(self._backward)
        if (
            any(self._late[i] for i in self._backward if i < self._start)
            or any(ops.may_have_effects(index.nodes[i]) for i in special)
            or any(target is not operator.getitem for target in users)
        ):
            return None
        inputs = {self._owner[i] for i, r in roles if r not in (Role.TANGENT, Role.BACKWARD_SEED)}
        spans = [*self._of_forward(inputs), *self._of_backward(inputs), *self._inside()]
        low = ((nbytes, *sure) for nbytes, *sure, _, _ in spans if sure[0] <= sure[1])
        high = ((nbytes, first, last) for nbytes, _, _, first, last in spans)
        resident = sum(self._size[o] for o in inputs)
        return tuple(resident + max(sums_of(each, self._end + 1)) for each in (low, high))  # type: ignore[return-value, arg-type]

    def _tuples(self, runs: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield, for each operator with several results, its position and the bytes of results that no node reads."""
        index, there = self._index, frozenset(runs)
        for i in runs:
            value = index.values[i]
            if isinstance(value, (tuple, list)) and index.nodes[i].op == "call_function":
                nbytes = sum(map(storage_bytes, leaves_of(value)))
                yield i, nbytes - sum(self._size[u] for u in index.users[i] if u in there)

    def _allocates(self, i: int) -> bool:
        return self._owner[i] == i and self._index.nodes[i].op == "call_function"

    def _of_forward(self, inputs: set[int]) -> Iterator[Span]:
        """Yield the size and lifetime of each storage that forward allocates, except the storages of ``inputs``."""
        owner, program_point = self._owner, self._program_points
        last = [0] * len(self._index)
        for i in self._forward:
            at = program_point[i]
            for j in (i, *self._index.inputs[i]):
                if at > last[owner[j]]:
                    last[owner[j]] = at
        least, most = self._last_in_backward
        held, saved = (
            {owner[i] for i in nodes} for nodes in (self._outputs, self._saved_for_backward)
        )
        again = frozenset(self._backward)
        for o in filter(self._allocates, self._forward):
            # Of the nodes that share a program point, another one than the last reader may run last.
            sure, until = last[o] & ~1, last[o]
            if o in held:
                sure = until = self._end
            elif o in saved:
                # If backward computes the value again, too, a reader may read either.
                sure, until = sure if o in again else max(sure, least[o]), max(until, most[o])
            if o not in inputs:
                yield (
                    self._size[o],
                    program_point[o] + (not self._required[o]),
                    sure,
                    program_point[o],
                    until,
                )

    def _of_backward(self, inputs: set[int]) -> Iterator[Span]:
        """Yield the size and lifetime of each tangent's storage, and of each storage that backward allocates."""
        owner, size, n = self._owner, self._size, len(self._index)
        earliest, latest = self._points_of_backward
        least, most = self._last_in_backward
        apart = {owner[i] for i in (*self._outputs, *self._saved_for_backward)}
        for o in filter(self._allocates, self._backward):
            sure = self._end + 1 if o in apart else latest[o] + (not self._late[o])
            if o not in inputs:
                yield size[o], sure, least[o], earliest[o], most[o]
        tangents = (i for i, role in self._placeholders.items() if role is Role.TANGENT)
        for o in {owner[i] for i in tangents} - inputs:
            ends = (self._end,) * 2 if torch_compat.holds_tangents() else (least[o], most[o])
            yield size[o], 2 * n, ends[0], 2 * n, ends[1]

    def _inside(self) -> Iterator[Span]:
        """Yield the bytes and lifetime of each operator's workspace, and of results that no node reads."""
        earliest, latest = self._points_of_backward
        for runs, first, last, is_main in (
            (self._forward, self._program_points, self._program_points, self._required),
            (self._backward, earliest, latest, self._late),
        ):
            for i in runs:
                if nbytes := workspace_bytes(self._index.nodes[i]):
                    sure = first[i] if is_main[i] else self._end + 1
                    yield nbytes, sure, first[i], first[i], last[i]
            for i, nbytes in self._tuples(runs):
                yield nbytes, self._end + 1, 0, first[i], last[i]

    @cached_property
    def _program_points(self) -> list[int]:
        """The program point at which each node of forward runs; see `remat.graph.problems.forward_order`."""
        index, program_point = self._index, [*range(0, 2 * len(self._index), 2)]
        for i in self._forward:
            reads = index.inputs[i]
            if index.nodes[i].target is operator.getitem:
                program_point[i] = program_point[
                    reads[0]
                ]  # an element is taken right after its tuple
            elif (
                not self._required[i]
                and index.plain[i]
                and self._mutated.isdisjoint([self._owner[j] for j in reads])
            ):
                points = (program_point[j] for j in reads if index.nodes[j].op == "call_function")
                program_point[i] = max(points, default=program_point[i]) | 1
        return program_point

    @cached_property
    def _points_of_backward(self) -> tuple[list[int], list[int]]:
        """The earliest and the latest program point at which each node of backward may run."""
        index, n = self._index, len(self._index)
        earliest, latest = [self._end] * n, [self._end] * n
        for i in reversed(self._backward):
            if self._late[i]:
                earliest[i] = latest[i] = 2 * (n + i) + 1
            elif index.users[i]:
                latest[i] = min([latest[u] for u in index.users[i]]) & ~1
                earliest[i] = min([earliest[u] for u in index.users[i]]) & ~1
                if i > self._start:  # the pass `reorder-backward` may leave the node where it is
                    earliest[i] = min(earliest[i], 2 * (n + i))
        for i in self._backward:
            if index.nodes[i].target is operator.getitem:
                maker = index.inputs[i][0]
                if maker not in self._placeholders:
                    earliest[i], latest[i] = earliest[maker], latest[maker]
        return earliest, latest

    @cached_property
    def _last_in_backward(self) -> tuple[list[int], list[int]]:
        """For each storage, the earliest and the latest program point at which its last use in backward may be."""
        n, owner = len(self._index), self._owner
        earliest, latest = self._points_of_backward
        least, most = [0] * n, [0] * n
        for i in self._backward:
            # Of the nodes that share a program point, the first may have been the last to read its inputs.
            early, at = earliest[i] - (not self._late[i]), latest[i]
            for j in (i, *self._index.inputs[i]):
                o = owner[j]
                if early > least[o]:
                    least[o] = early
                if at > most[o]:
                    most[o] = at
        for i in self._gradients:
            least[owner[i]] = most[owner[i]] = self._end
        return least, most
