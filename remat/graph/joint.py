"""A joint graph, and the few conventions of AOTAutograd that everything else builds on."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


class Role(enum.Enum):
    """What a placeholder of a joint graph stands for."""

    PRIMAL = "primal"
    TANGENT = "tangent"
    FORWARD_SEED = "forward seed or offset"
    BACKWARD_SEED = "backward seed or offset"
    BACKWARD_STATE = "backward state"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointGraph:
    """Forward and backward of one training step in one FX graph, as AOTAutograd traces it.

    Attributes:
        graph_module: the joint graph: placeholders are primals and tangents, outputs are forward's
            own outputs followed by one gradient (or None) per input. Every node carries a fake
            tensor (or symbol) in ``meta["val"]``.
        num_fwd_outputs: how many of the outputs belong to forward.
        static_inputs: positions of the primals whose memory outlives the step (parameters, buffers).
        lower: the lowering that the graph was traced for, ``"inductor"`` or ``"eager"``.
        name: what the graph is called in tables and messages.
        received: primals that an earlier graph of the same step hands over: (position of the
            primal, index of that graph in the captured list, index of its forward output).
    """

    graph_module: fx.GraphModule
    num_fwd_outputs: int
    static_inputs: tuple[int, ...] = ()
    lower: str = "eager"
    name: str = "joint"
    received: tuple[tuple[int, int, int], ...] = ()

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def fingerprint(self) -> str:
        """A digest of operators, edges, constants, shapes, dtypes and devices; names do not count."""
        return fingerprint(self)

    def copy(self) -> JointGraph:
        """The same joint graph over nodes of its own; fake values are shared, names are kept."""
        return JointGraph(
            graph_module=copy_module(self.graph_module),
            num_fwd_outputs=self.num_fwd_outputs,
            static_inputs=self.static_inputs,
            lower=self.lower,
            name=self.name,
            received=self.received,
        )


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Copies nodes and shallow metadata; submodules and constants are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copied = graph.node_copy(node, env.__getitem__)
        copied.meta = dict(node.meta)
        env[node] = copied
    graph._codegen = module.graph._codegen
    return make_module(module, graph)


def make_module(owner: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A graph module over ``graph`` whose code is generated only when it is first called."""
    with fx._lazy_graph_module._use_lazy_graph_module(True):
        return fx._lazy_graph_module._make_graph_module(owner, graph)


def role_of(node: fx.Node) -> Role:
    """The role of a placeholder, by the names and values that AOTAutograd gives it."""
    from torch.fx.experimental._backward_state import BackwardState

    name = str(node.target)
    if "tangents" in name:
        return Role.TANGENT
    if "bwd_seed" in name or "bwd_base_offset" in name:
        return Role.BACKWARD_SEED
    if "fwd_seed" in name or "fwd_base_offset" in name:
        return Role.FORWARD_SEED
    if isinstance(node.meta.get("val"), BackwardState):
        return Role.BACKWARD_STATE
    return Role.PRIMAL


def output_node(graph: fx.Graph) -> fx.Node:
    """The one output node of a graph."""
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def split_outputs(
    joint: JointGraph,
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Forward outputs, backward outputs, and the AOTAutograd descriptors of each (None without)."""
    out = output_node(joint.graph)
    values = pytree.arg_tree_leaves(*out.args)
    descs = out.meta.get("desc")
    described = pytree.arg_tree_leaves(descs) if descs is not None else [None] * len(values)
    n = joint.num_fwd_outputs
    return values[:n], values[n:], described[:n], described[n:]


def fingerprint(joint: JointGraph) -> str:
    """Digest of what a plan depends on; see `JointGraph.fingerprint`."""
    position: dict[fx.Node, int] = {}
    digest = hashlib.sha256(f"remat-joint-1;{joint.num_fwd_outputs};".encode())
    for i, node in enumerate(joint.graph.nodes):
        position[node] = i
        # `{!r}` of an FX node is its name; nodes are written as positions instead.
        args = fx.map_arg((node.args, node.kwargs), lambda n: _Position(position[n]))
        target = node.op if node.op in ("placeholder", "output") else f"{node.op} {node.target}"
        tag = node.meta.get("recompute")
        line = f"{target} {args!r} {_describe(node.meta.get('val'))} {tag}\n"
        digest.update(line.encode())
    return digest.hexdigest()


class _Position(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def _describe(value: Any) -> str:
    """Shape, stride, dtype and device of a fake value, as text that is the same in every process."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"{value.layout} {tuple(value.shape)} {value.dtype} {value.device}"
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_describe, value)) + "]"
    return type(value).__name__
