"""The two modules of a split: what forward hands to backward, and the graphs of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from remat.graph.copying import Copier
from remat.graph.fake import cloned, refresh
from remat.graph.forward_order import ForwardOrder
from remat.graph.joint import HandedKind, Role, make_module, split_outputs
from remat.graph.lowering import Decision
from remat.graph.source import located
from remat.graph.writes import aliased_argument, is_destination
from remat.passes.core.state import State
from remat.passes.split.arrangement import arrange, position_of
from remat.passes.split.convention import write_output


class Extraction:
    """One splitting of one joint graph.

    Attributes:
        saved: nodes whose values forward hands to backward as tensors, in that order.
        unchecked: the same for tensors whose version counter autograd does not check.
        objects: nodes whose opaque objects it hands over.
        sizes: nodes whose symbolic sizes it hands over.
        snapshots: positions of the inputs of which forward hands over a copy.
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
        self._forward_nodes: Sequence[int] | None = None
        self._backward_nodes: Sequence[int]
        self._snapshots_read: set[int]
        read: Iterable[int]
        if decision.is_ordered:
            found = arrange(state, decision)
            self._forward_nodes, self._backward_nodes = found.forward, found.backward
            read, self._snapshots_read = found.read, set(found.snapshots)
        else:
            self._backward_nodes, read = self._reach_backward(set(keep))
        handed: dict[HandedKind, list[fx.Node]] = {kind: [] for kind in HandedKind}
        for i in sorted(read):
            node = self._index.nodes[i]
            handed[HandedKind.of(node)].append(node)
        self.saved, self.unchecked, self.objects, self.sizes = handed.values()
        self.snapshots = sorted(self._snapshots_read)
        self._bind_symbols()

    def _reach_backward(self, keep: set[int]) -> tuple[list[int], set[int]]:
        """The nodes that run in backward, in joint order, and the positions handed over to it."""
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
        self._snapshots_read = set()
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
            if not self._kept_copies:
                stack.extend(index.inputs[i])
                continue
            for j in index.inputs[i]:
                if j in self._kept_copies and not is_destination(index.nodes[j], index.nodes[i]):
                    self._snapshots_read.add(j)
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
        return sorted(runs), read

    def _is_destination(self, i: int) -> bool:
        node = self._index.nodes[i]
        return i in self._state.storages.rewritten or any(
            self._roles.tangent_closure[u] and is_destination(node, self._index.nodes[u])
            for u in self._index.users[i]
        )

    def _bind_symbols(self) -> None:
        """Hands over every symbol that backward's inputs mention, bindings first."""
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
            if places is None:
                places = dict(find_symbol_binding_fx_nodes(self._joint.graph))
            binding += [places[s] for s in sorted(new, key=lambda s: s.name) if s in places]
            bound |= new
        self.sizes = list(dict.fromkeys([*binding, *derived]))

    def _placeholders(self, *roles: Role) -> list[fx.Node]:
        return [self._index.nodes[i] for i, r in self._roles.placeholders.items() if r in roles]

    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Builds forward and backward."""
        forward, copies = self._forward()
        backward = self._backward(copies)
        source = self._joint.graph_module
        return make_module(source, forward), make_module(source, backward)

    def _reach_forward(self, outputs: Sequence[Any]) -> Sequence[int]:
        """The nodes that run in forward, in order."""
        index, roles = self._index, self._roles
        handed = [*self.saved, *self.unchecked, *self.objects, *self.sizes]
        stack = [index.position[n] for n in (*outputs, *handed) if isinstance(n, fx.Node)]
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
            raise PlanError("\n".join(["forward outputs depend on backward, through:", *lines]))
        return ForwardOrder(index, roles, self._state.storages).sorted(running)

    def _forward(self) -> tuple[fx.Graph, dict[int, Any]]:
        index = self._index
        outputs, _, descs, _ = split_outputs(self._joint)
        running = self._forward_nodes
        if running is None:
            running = self._reach_forward(outputs)
        graph = fx.Graph()
        copier = Copier(graph, self._joint.graph)
        env = copier.copies
        # Forward is given the hooks' state too and reads nothing of it: inputs keep their positions.
        copier.copy(self._placeholders(Role.PRIMAL, Role.FORWARD_SEED, Role.BACKWARD_STATE))
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
        runs = [index.nodes[i] for i in self._backward_nodes]
        _copy_runs(copier, runs, snapshot)
        for node in graph.nodes:
            if node.op != "placeholder":
                node.meta["autograd_backward"] = True
        values = [snapshot.get(o, env.get(o)) if isinstance(o, fx.Node) else o for o in outputs]
        write_output(graph.output(()), values, descs)
        return graph


def _copy_runs(
    copier: Copier, nodes: list[fx.Node], snapshot: Mapping[fx.Node, fx.Node] | None = None
) -> None:
    """Copies nodes; of several runs of one the last has its name, unless what was handed over has it.

    What reads an input of which there is a snapshot reads that; what only writes to it gets the input.
    """
    if not snapshot and len({*nodes, *copier.copies}) == len(nodes) + len(copier.copies):
        copier.copy(nodes)
        return
    copies, copied = copier.copies, snapshot or {}
    moved: set[fx.Node | None] = {*copied.values()}
    left = Counter(nodes)
    left.update(copier.copies.keys())
    for node in nodes:

        def lookup(n: fx.Node, reader: fx.Node = node) -> fx.Node:
            return copied[n] if n in copied and not is_destination(n, reader) else copies[n]

        left[node] -= 1
        copier.copy([node], lookup, apart=left[node] > 0)
        if aliased_argument(copies[node]) in moved:
            refresh(copies[node])  # a view of the input is one of the snapshot now
            moved.add(copies[node])


def _is_static(value: Any) -> bool:
    """Whether a value is seen at a glance to be a tensor without symbolic sizes."""
    return isinstance(value, torch.Tensor) and not torch_compat.has_symbolic_sizes(value)
