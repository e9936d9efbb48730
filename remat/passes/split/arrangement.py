"""Insert views into a decision's node orders, so that the orders list all nodes that run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from remat.errors import PlanError
from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import SavedValueKind, split_outputs
from remat.graph.memory.storages import tensor_bytes
from remat.graph.memory.writes import aliased_argument, is_destination
from remat.graph.problems.lowering import Decision, must_recompute
from remat.graph.problems.replays import is_element, maker_of
from remat.passes.core.state import State
from remat.passes.decide.min_cut import Fusibility


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Orders in which the forward and the backward graph run nodes, as positions in the joint graph.

    Attributes:
        forward: positions of the nodes that forward runs, in order, including views. A node whose
            position is repeated runs again.
        backward: positions of the nodes that backward runs, in the form of ``forward``.
        read: positions of the values that forward hands over to backward, which reads the values.
        snapshots: positions of the inputs of which backward reads a copy taken before forward.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    read: frozenset[int]
    snapshots: frozenset[int]


def arrange(state: State, decision: Decision) -> Arrangement:
    """Return the order of all nodes that forward and backward run, for a decision with node orders.

    A decision's node orders leave out views and elements of tuples. The returned orders have each view
    or element right before its first reader. If the node that a view or element reads runs again, later
    readers get a new view or element.

    Raises:
        PlanError: the decision names an unknown node, leaves out a required node, or runs a node
            before its inputs.
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
    # Backward comes first, because forward has to produce the values that backward reads.
    backward = _GraphBuilder(state, runs, late, hands_over=True, copied=copied)
    backward.run(orders[1])
    backward.need(index.position[o] for o in gradients if isinstance(o, fx.Node))
    forward = _GraphBuilder(state, runs, roles.placeholders.keys() - late, hands_over=False)
    forward.run(orders[0])
    forward.need(index.position[o] for o in outputs if isinstance(o, fx.Node))
    forward.need(sorted(backward.saved_for_backward))
    return Arrangement(
        forward=tuple(forward.order),
        backward=tuple(backward.order),
        read=frozenset(backward.saved_for_backward),
        snapshots=frozenset(backward.snapshots),
    )


def with_views(state: State, arranged: Arrangement, offloads: frozenset[int]) -> Arrangement:
    """Let forward hand over a view of a saved value, if backward reads the value through this view only."""
    # The view is one that forward computes, and that a kernel of its own reads there, such as a convolution. A view
    # takes no bytes. Inductor chooses the memory layout of a value that forward hands over by the value's shape. If a
    # convolution reads an NHWC value as NCHW, the layout for the NHWC shape fits no reader, and both graphs copy the
    # value.
    index, storages, fusion = state.index, state.storages, state.get(Fusibility())
    backward = set(arranged.backward)
    gradients = {index.position[o] for o in split_outputs(state.joint)[1] if isinstance(o, fx.Node)}

    def next_view(i: int) -> int | None:
        readers = [u for u in index.users[i] if u in backward]
        if len(readers) != 1 or i in gradients or not state.roles.required_forward[readers[0]]:
            return None
        view, base = index.nodes[readers[0]], index.nodes[i]
        is_whole = tensor_bytes(view.meta.get("val")) == tensor_bytes(base.meta.get("val"))
        alike = is_whole and SavedValueKind.of(view) is SavedValueKind.of(base)
        return readers[0] if alike and aliased_argument(view) is base else None

    read = set(arranged.read)
    gone: set[int] = set()
    for i in sorted(arranged.read - offloads - backward):
        owner = storages.owner[i]
        fixed = storages.alive[owner] or owner in storages.mutated or arranged.forward.count(i) > 1
        if fixed or index.nodes[i].op != "call_function":
            continue
        chain = [i]
        while (view := next_view(chain[-1])) is not None and not must_recompute(index.nodes[view]):
            chain.append(view)
        while not fusion.is_materialized(chain[-1]) and len(chain) > 1:
            chain.pop()
        read = read - {i} | {chain[-1]}
        gone.update(chain[1:])
    retained = tuple(i for i in arranged.backward if i not in gone)
    return replace(arranged, backward=retained, read=frozenset(read))


def position_of(index: GraphIndex, name: str, verb: str = "runs") -> int:
    """Return the position, in the joint graph, of a node that a decision names.

    Args:
        index: positions of the joint graph's nodes.
        name: name of the node.
        verb: how the decision uses the node ("runs", "saves"), for the message.

    Raises:
        PlanError: the graph has no such node.
    """
    position = index.by_name.get(name)
    if position is None:
        raise PlanError(
            f"the decision {verb} '{name}', but the joint graph has no such node; was it made for another graph?"
        )
    return position


def _run_at(index: GraphIndex, name: str) -> int:
    """Return the position, in the joint graph, of the operator ``name`` in a node order of the decision."""
    position = position_of(index, name)
    if index.nodes[position].op != "call_function":
        raise PlanError(
            f"the decision runs '{name}', which is a {index.nodes[position].op} of the joint graph and "
            "does not run"
        )
    return position


class _GraphBuilder:
    """Builder of the order in which one graph, forward or backward, runs nodes."""

    def __init__(
        self,
        state: State,
        runs: set[int],
        available: Iterable[int],
        *,
        hands_over: bool,
        copied: frozenset[int] = frozenset(),
    ) -> None:
        # Positions of all nodes that the decision runs, and of the values that this graph has so far.
        self._index, self._runs, self._hands_over = state.index, runs, hands_over
        self._owner = state.storages.owner
        self._copied = copied
        self._available = set(available)
        self._ran: set[int] = set()
        # Positions of the nodes in running order, of the values that forward must hand over, and of copied inputs
        # that the graph reads.
        self.order: list[int] = []
        self.saved_for_backward: set[int] = set()
        self.snapshots: set[int] = set()

    def run(self, order: Iterable[int]) -> None:
        """Append nodes to the graph's order of running, each node after the views that the node reads."""
        inputs = self._index.inputs
        for i in order:
            self.need(inputs[i], reader=i)
            self._forget_views(i)
            self.order.append(i)
            self._available.add(i)
            self._ran.add(i)

    def need(self, wanted: Iterable[int], reader: int = -1) -> None:
        """Make values available to a reader: insert missing views, and record values that forward hands over."""
        nodes, inputs = self._index.nodes, self._index.inputs
        stack = list(wanted)[::-1]
        while stack:
            i = stack[-1]
            if i in self._available:
                stack.pop()
                continue
            node = nodes[i]
            is_given = node.op == "placeholder" or i in self._runs
            if is_element(node) and not is_given:
                maker = self._index.position[maker_of(node)]
                # Forward hands over the elements of a tuple, never the tuple itself.
                is_given = self._hands_over and maker in self._runs and maker not in self._ran
            missing = [] if is_given else [j for j in inputs[i] if j not in self._available]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            self._available.add(i)
            if not is_given:
                if node.op == "call_function" and self._owner[i] == i and not is_element(node):
                    raise PlanError(
                        f"the decision runs '{node.name}' neither in forward nor in backward, but something reads it"
                    )
                self.order.append(i)
            elif i in self._copied:
                if reader >= 0 and is_destination(node, nodes[reader]):
                    raise PlanError(
                        f"the decision runs '{nodes[reader].name}' in backward, where it writes to "
                        f"'{node.name}'; forward has to"
                    )
                self.snapshots.add(i)
            elif self._hands_over:
                self.saved_for_backward.add(i)
            else:
                whose = f" for '{nodes[reader].name}'" if reader >= 0 else ""
                raise PlanError(
                    f"the decision runs forward in an order in which '{node.name}' is not there{whose}"
                )

    def _forget_views(self, i: int) -> None:
        """Mark views of node ``i``, which runs again, as missing, so that later readers get new views."""
        stack = [i]
        while stack:
            for u in self._index.users[stack.pop()]:
                if u in self._available and u not in self._runs:
                    self._available.discard(u)
                    stack.append(u)
