"""Order forward and backward by a decision with node orders; views are created at their readers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from remat.errors import PlanError
from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import split_outputs
from remat.graph.lowering import Decision
from remat.graph.replays import is_element, maker_of
from remat.graph.writes import is_destination
from remat.passes.core.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Orders of forward and backward, as positions in the joint graph; a repeated position runs again.

    Attributes:
        forward: what forward runs, views included.
        backward: what backward runs.
        read: what backward reads of what forward has.
        snapshots: inputs of which it reads a copy.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    read: frozenset[int]
    snapshots: frozenset[int]


def arrange(state: State, decision: Decision) -> Arrangement:
    """Follows the order of a decision.

    What stands in neither half's order only looks at memory: it is made right before it is read, and
    anew once what it looks at has run again.

    Raises:
        PlanError: a node is not in the graph, is left out, or runs before what it reads.
    """
    joint, index, roles = state.joint, state.index, state.roles
    orders = [
        [_run_at(index, name) for name in names]
        for names in (decision.forward_order, decision.backward_order)
    ]
    runs = {*orders[0], *orders[1]}
    for i in sorted({*index.special}.difference(orders[0])):
        if roles.required_forward[i] and ops.may_have_effects(index.nodes[i]):
            raise PlanError(
                f"the decision does not run '{index.nodes[i].name}' in forward, where it draws or has "
                "an effect"
            )
    outputs, gradients, _, _ = split_outputs(joint)
    late = {i for i, role in roles.placeholders.items() if role.in_backward}
    copied = frozenset(position_of(index, name) for name in decision.snapshots)
    backward = _GraphBuilder(state, runs, late, hands_over=True, copied=copied)
    backward.run(orders[1])
    backward.need(index.position[o] for o in gradients if isinstance(o, fx.Node))
    forward = _GraphBuilder(state, runs, roles.placeholders.keys() - late, hands_over=False)
    forward.run(orders[0])
    forward.need(index.position[o] for o in outputs if isinstance(o, fx.Node))
    forward.need(sorted(backward.handed))
    return Arrangement(
        forward=tuple(forward.made),
        backward=tuple(backward.made),
        read=frozenset(backward.handed),
        snapshots=frozenset(backward.snapshots),
    )


def position_of(index: GraphIndex, name: str, verb: str = "runs") -> int:
    """The position of a node that a decision names.

    Raises:
        PlanError: the graph has no such node; ``verb`` says what the decision does with it.
    """
    position = index.by_name.get(name)
    if position is None:
        raise PlanError(
            f"the decision {verb} '{name}', but the joint graph has no such node; was it made for another graph?"
        )
    return position


def _run_at(index: GraphIndex, name: str) -> int:
    position = position_of(index, name)
    if index.nodes[position].op != "call_function":
        raise PlanError(
            f"the decision runs '{name}', which is a {index.nodes[position].op} of the joint graph and "
            "does not run"
        )
    return position


class _GraphBuilder:
    """Builder of one graph in the decided order.

    Attributes:
        made: positions in the order in which they are made.
        handed: what it reads without making it.
        snapshots: inputs of which it reads a copy.
    """

    def __init__(
        self,
        state: State,
        runs: set[int],
        there: Iterable[int],
        *,
        hands_over: bool,
        copied: frozenset[int] = frozenset(),
    ) -> None:
        self._index, self._runs, self._hands_over = state.index, runs, hands_over
        self._owner = state.storages.owner
        self._copied = copied
        self._there = set(there)
        self._ran: set[int] = set()
        self.made: list[int] = []
        self.handed: set[int] = set()
        self.snapshots: set[int] = set()

    def run(self, order: Iterable[int]) -> None:
        inputs = self._index.inputs
        for i in order:
            self.need(inputs[i], reader=i)
            self._forget_views(i)
            self.made.append(i)
            self._there.add(i)
            self._ran.add(i)

    def need(self, wanted: Iterable[int], reader: int = -1) -> None:
        """Sees to it that values are there."""
        nodes, inputs = self._index.nodes, self._index.inputs
        stack = list(wanted)[::-1]
        while stack:
            i = stack[-1]
            if i in self._there:
                stack.pop()
                continue
            node = nodes[i]
            handed = node.op == "placeholder" or i in self._runs
            if is_element(node) and not handed:
                maker = self._index.position[maker_of(node)]
                handed = self._hands_over and maker in self._runs and maker not in self._ran
            missing = [] if handed else [j for j in inputs[i] if j not in self._there]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            self._there.add(i)
            if not handed:
                if node.op == "call_function" and self._owner[i] == i and not is_element(node):
                    raise PlanError(
                        f"the decision runs '{node.name}' in neither half, but something reads it"
                    )
                self.made.append(i)
            elif i in self._copied:
                if reader >= 0 and is_destination(node, nodes[reader]):
                    raise PlanError(
                        f"the decision runs '{nodes[reader].name}' in backward, where it writes to "
                        f"'{node.name}'; forward has to"
                    )
                self.snapshots.add(i)
            elif self._hands_over:
                self.handed.add(i)
            else:
                whose = f" for '{nodes[reader].name}'" if reader >= 0 else ""
                raise PlanError(
                    f"the decision runs forward in an order in which '{node.name}' is not there{whose}"
                )

    def _forget_views(self, i: int) -> None:
        """Recreate views of a node after it runs again, so that later readers use the new run."""
        stack = [i]
        while stack:
            for u in self._index.users[stack.pop()]:
                if u in self._there and u not in self._runs:
                    self._there.discard(u)
                    stack.append(u)
