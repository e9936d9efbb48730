"""Build the forward and the backward graph that a decision defines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    find_symbol_binding_fx_nodes,
    free_symbols,
    is_symbol_binding_fx_node,
)

from remat import torch_compat
from remat.errors import PlanError
from remat.graph import ops
from remat.graph.capture.errors import RANDPERM_PATTERN
from remat.graph.capture.fake import cloned, refresh_views
from remat.graph.capture.source import located
from remat.graph.copying import Copier
from remat.graph.joint import Role, SavedValueKind, make_module, split_outputs
from remat.graph.memory.storages import storage_key
from remat.graph.memory.writes import is_destination
from remat.graph.problems.forward_order import forward_sorted
from remat.graph.problems.lowering import Decision
from remat.passes.core.state import State
from remat.passes.split.arrangement import Arrangement, arrange, position_of, with_views
from remat.passes.split.convention import write_output


class Extraction:
    """One partition of a joint graph by a decision; `modules` builds forward and backward.

    Args:
        state: the state with the joint graph.
        decision: the saved values and, optionally, the node orders.

    Raises:
        PlanError: the decision names an unknown node, has orders that cannot run, or makes backward
            read an overwritten input.

    Attributes:
        saved: nodes of the tensors that forward hands to backward, in the order of the joint graph.
            Autograd checks the version counters of these tensors.
        unchecked: nodes of handed-over tensors whose version counters autograd does not check.
        objects: nodes of the opaque objects that forward hands to backward.
        sizes: nodes of the symbolic sizes that forward hands to backward.
        snapshots: positions of the inputs of which forward hands a copy to backward.
    """

    def __init__(self, state: State, decision: Decision) -> None:
        self._state = state
        self._joint = state.joint
        self._index = state.index
        self._roles = state.roles
        keep = [position_of(self._index, name, "saves") for name in decision.saved]
        self._kept_copies = frozenset(
            position_of(self._index, name, "saves") for name in decision.snapshots
        )
        self._ordered = decision.is_ordered
        self._runs = arrange(state, decision) if self._ordered else self._reach_backward(set(keep))
        if state.joint.lower == "inductor" and state.hooks is None:
            away = (position_of(self._index, o.name, "offloads") for o in decision.offloads)
            self._runs = with_views(state, self._runs, frozenset(away))
        by_kind: dict[SavedValueKind, list[fx.Node]] = {kind: [] for kind in SavedValueKind}
        for i in sorted(self._runs.read):
            node = self._index.nodes[i]
            by_kind[SavedValueKind.of(node)].append(node)
        # The dict has the order of `SavedValueKind`, which is the order of AOTAutograd's convention.
        self.saved, self.unchecked, self.objects, self.sizes = by_kind.values()
        self.snapshots = sorted(self._runs.snapshots)
        self._bind_symbols()

    def _reach_backward(self, keep: set[int]) -> Arrangement:
        """Find the nodes of backward, in the order of the joint graph, for a decision without node orders."""
        index, roles = self._index, self._roles
        _, outputs, _, _ = split_outputs(self._joint)
        stack = [index.position[o] for o in outputs if isinstance(o, fx.Node)]
        stack += [
            i
            for i in index.special
            if roles.tangent_closure[i] and ops.may_have_effects(index.nodes[i])
        ]
        runs: set[int] = set()
        read: set[int] = set()
        snapshots: set[int] = set()
        while stack:
            i = stack.pop()
            if i in runs or i in read:
                continue
            if i in keep:
                read.add(i)
                continue
            if i in roles.placeholders:
                if roles.placeholders[i] in (Role.PRIMAL, Role.FORWARD_SEED):
                    read.add(i)
                continue
            runs.add(i)
            # A node that writes to the input needs the input itself, not its copy.
            for j in index.inputs[i]:
                if j in self._kept_copies and not is_destination(index.nodes[j], index.nodes[i]):
                    snapshots.add(j)
                else:
                    stack.append(j)
        storages = self._state.storages
        for gone, why in (
            (storages.mutated, "forward mutated it"),
            (storages.user_mutated, "the user may have written to it"),
        ):
            lost = {i for i in read & gone if not self._is_destination(i)}
            if lost:
                names = ", ".join(index.nodes[i].name for i in sorted(lost))
                raise PlanError(
                    f"backward reads {names} as it was before {why}, but the decision keeps no "
                    "snapshot of it"
                )
        return Arrangement(
            forward=(),  # `_reach_forward` finds these nodes
            backward=tuple(sorted(runs)),
            read=frozenset(read),
            snapshots=frozenset(snapshots),
        )

    def _is_destination(self, i: int) -> bool:
        """Return whether backward may read input ``i`` itself, instead of a copy made before forward."""
        node = self._index.nodes[i]
        # Backward writes to the input, or reads the value that it has after forward's last write.
        return i in self._state.storages.rewritten or any(
            self._roles.tangent_closure[u] and is_destination(node, self._index.nodes[u])
            for u in self._index.users[i]
        )

    def _bind_symbols(self) -> None:
        """Add sizes to ``sizes``, so that backward receives a size for every symbol in the shapes of its inputs."""
        bound: set[Any] = set()
        binding: list[fx.Node] = []
        derived: list[fx.Node] = []
        for node in self.sizes:
            symbol = is_symbol_binding_fx_node(node)
            if symbol is not None and symbol:
                bound.add(symbol)
                binding.append(node)
            else:
                derived.append(node)
        tangents = self._placeholders(Role.TANGENT)
        mentioned = [*derived, *self.saved, *self.unchecked, *tangents]
        mentioned += [self._index.nodes[i] for i in self.snapshots]
        places: dict[Any, fx.Node] | None = None
        for node in mentioned:
            value = node.meta.get("val")
            if value is None or _is_static(value):
                continue
            new = free_symbols(value) - bound
            if not new:
                continue
            if places is None:  # found only if needed, because the search visits the whole graph
                places = dict(find_symbol_binding_fx_nodes(self._joint.graph))
            binding += [places[s] for s in sorted(new, key=lambda s: s.name) if s in places]
            bound |= new
        # Sizes that define a symbol come before sizes that are expressions of symbols.
        self.sizes = list(dict.fromkeys([*binding, *derived]))

    def _placeholders(self, *roles: Role) -> list[fx.Node]:
        """Return the placeholders of the joint graph that have one of the given roles, in graph order."""
        return [self._index.nodes[i] for i, r in self._roles.placeholders.items() if r in roles]

    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Build and return the forward module and the backward module."""
        forward, copies = self._forward()
        backward = self._backward(copies)
        source = self._joint.graph_module
        return make_module(source, forward), make_module(source, backward)

    def _reach_forward(self, outputs: Sequence[Any]) -> Sequence[int]:
        """Return the positions of forward's nodes, in order, for a decision without node orders."""
        index, roles = self._index, self._roles
        saved_values = [*self.saved, *self.unchecked, *self.objects, *self.sizes]
        stack = [index.position[n] for n in (*outputs, *saved_values) if isinstance(n, fx.Node)]
        runs = bytearray(roles.required_forward)
        while stack:
            i = stack.pop()
            if not runs[i]:
                runs[i] = 1
                stack.extend(index.inputs[i])
        running = [i for i, r in enumerate(runs) if r]
        invalid = [i for i in running if roles.tangent_closure[i]]
        if invalid:
            lines = [f"  {located(index.nodes[i])}" for i in invalid[:5]]
            if self._joint.lower == "inductor" and any(
                _slices_randperm(index.nodes[i]) for i in invalid
            ):
                lines.append(RANDPERM_PATTERN)
            raise PlanError("\n".join(["forward outputs depend on backward, through:", *lines]))
        return forward_sorted(running, index, roles, self._state.storages)

    def _forward(self) -> tuple[fx.Graph, dict[int, Any]]:
        """Build the decision's forward graph; also return a dict from a copied input's position to its fake value."""
        index = self._index
        outputs, _, descs, _ = split_outputs(self._joint)
        running = self._runs.forward if self._ordered else self._reach_forward(outputs)
        graph = fx.Graph()
        copier = Copier(graph, self._joint.graph)
        env = copier.copies
        # Forward also receives the backward state, unused, so that all inputs keep their positions.
        copier.copy(self._placeholders(Role.PRIMAL, Role.FORWARD_SEED, Role.BACKWARD_STATE))
        # Snapshots are taken first, before any node of forward can write to an input.
        copies: dict[int, Any] = {}
        snapshots: list[fx.Node] = []
        for i in self.snapshots:
            source = index.nodes[i]
            copy = graph.create_node(
                "call_function",
                torch.ops.aten.clone.default,
                (env[source],),
                name=f"{source.name}_snapshot",
            )
            copies[i] = copy.meta["val"] = cloned(source.meta["val"])
            snapshots.append(copy)
        _copy_runs(copier, [index.nodes[i] for i in running if i not in self._roles.placeholders])
        values = [env[o] if isinstance(o, fx.Node) else o for o in outputs]
        values += [*(env[n] for n in self.saved), *snapshots]
        values += [env[n] for n in (*self.unchecked, *self.objects, *self.sizes)]
        write_output(graph.output(()), values, descs)
        return graph, copies

    def _backward(self, copies: dict[int, Any]) -> fx.Graph:
        """Build the backward graph for the decision; ``copies`` has each copied input's fake value."""
        index = self._index
        _, outputs, _, descs = split_outputs(self._joint)
        graph = fx.Graph()
        copier = Copier(graph, self._joint.graph)
        env = copier.copies
        snapshot: dict[fx.Node, fx.Node] = {}
        copier.take([*self.sizes, *self.saved])
        for i in self.snapshots:
            source = index.nodes[i]
            taken = graph.placeholder(f"{source.name}_snapshot")
            taken.meta = {"val": copies[i]}
            snapshot[source] = taken
        copier.take([*self.unchecked, *self.objects])
        for role in (Role.TANGENT, Role.BACKWARD_SEED, Role.BACKWARD_STATE):
            copier.take(self._placeholders(role))
        runs = [index.nodes[i] for i in self._runs.backward]
        _copy_runs(copier, runs, snapshot)
        gone = {k for n in snapshot if (k := storage_key(n.meta["val"])) is not None}
        if gone:  # views of these inputs have become views of the snapshots
            refresh_views(graph, snapshot.values(), gone)
        for node in graph.nodes:
            if node.op != "placeholder":
                # PyTorch's partitioner sets this too, even on recomputed nodes that were traced in forward.
                node.meta["autograd_backward"] = True
        values = [snapshot.get(o, env.get(o)) if isinstance(o, fx.Node) else o for o in outputs]
        write_output(graph.output(()), values, descs)
        return graph


def _slices_randperm(node: fx.Node) -> bool:
    """Return whether a node is a slice of a random permutation."""
    drawn = node.args[0] if node.target is torch.ops.aten.slice.Tensor else None
    return isinstance(drawn, fx.Node) and ops.packet(drawn.target) is torch.ops.aten.randperm


def _copy_runs(
    copier: Copier, nodes: list[fx.Node], snapshot: Mapping[fx.Node, fx.Node] | None = None
) -> None:
    """Append copies of nodes to a graph, in the given order; a node that occurs twice is copied twice."""
    if not snapshot and len({*nodes, *copier.copies}) == len(nodes) + len(copier.copies):
        copier.copy(nodes)
        return
    copies, copied = copier.copies, snapshot or {}
    left = Counter(nodes)
    left.update(copier.copies.keys())
    for node in nodes:

        def lookup(n: fx.Node, reader: fx.Node = node) -> fx.Node:
            return copied[n] if n in copied and not is_destination(n, reader) else copies[n]

        # The last run gets the node's name, unless a placeholder for a value from forward has it.
        left[node] -= 1
        copier.copy([node], lookup, apart=left[node] > 0)


def _is_static(value: Any) -> bool:
    """Return whether a value is a tensor without symbolic sizes; faster than `free_symbols`."""
    return isinstance(value, torch.Tensor) and not torch_compat.has_symbolic_sizes(value)
