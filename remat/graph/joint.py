"""A joint graph, and the few conventions of AOTAutograd that everything else builds on."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from remat import torch_compat
from remat.errors import first_line
from remat.graph import ops
from remat.graph.collection import paused_collection
from remat.graph.copying import Copier
from remat.graph.storages import SYMBOLIC, Memories, leaves_of


class Role(enum.Enum):
    """Kind of a placeholder of a joint graph."""

    PRIMAL = "primal"
    TANGENT = "tangent"
    FORWARD_SEED = "forward seed or offset"
    BACKWARD_SEED = "backward seed or offset"
    BACKWARD_STATE = "backward state"

    @property
    def in_backward(self) -> bool:
        """Whether it is given to backward alone, so that what reads it belongs there."""
        return self not in (Role.PRIMAL, Role.FORWARD_SEED)


#: The mark of a saved tensor whose version counter autograd does not check.
UNCHECKED = "saved_tensor_with_no_vc_check"


class HandedKind(enum.IntEnum):
    """AOTAutograd's kinds of saved values, in the order of forward's outputs."""

    TENSOR = 0
    UNCHECKED = 1
    OBJECT = 2
    SIZE = 3

    @classmethod
    def of(cls, node: fx.Node) -> HandedKind:
        """The kind of a node's value."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return cls.UNCHECKED if node.meta.get(UNCHECKED) else cls.TENSOR
        return cls.SIZE if isinstance(value, (*SYMBOLIC, int, float)) else cls.OBJECT


class Turn(NamedTuple):
    """One run of a graph in a step of which some graph runs several times.

    Attributes:
        at: its place among all runs of the step.
        received: as `JointGraph.received`, by places of runs instead of graphs.
        shared: as `JointGraph.shared`, likewise.
        returned: as `JointGraph.returned`, of this run.
    """

    at: int
    received: tuple[tuple[int, int, int], ...] = ()
    shared: tuple[tuple[int, int, int], ...] = ()
    returned: tuple[int, ...] = ()


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
        shared: primals that an earlier graph of the same step is given too, such as tied weights:
            (position of the primal, index of the first such graph, position of its primal).
        returned: forward outputs that a later graph receives and the step returns besides.
        runs: how often the graph runs in one step: equal layers may be compiled once.
        turns: each of its runs, where some graph of the step runs several times; else empty.
        memories: the memory behind the fake values, as far as somebody has asked for it.
    """

    graph_module: fx.GraphModule
    num_fwd_outputs: int
    static_inputs: tuple[int, ...] = ()
    lower: str = "eager"
    name: str = "joint"
    received: tuple[tuple[int, int, int], ...] = ()
    shared: tuple[tuple[int, int, int], ...] = ()
    returned: tuple[int, ...] = ()
    runs: int = 1
    turns: tuple[Turn, ...] = ()
    memories: Memories = field(default_factory=Memories, repr=False)

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def fingerprint(self) -> str:
        """A digest of operators, edges, constants, shapes, dtypes and devices; names do not count.

        Which of its custom operators are declared pure (`remat.declare_pure`) is part of it.
        """
        return fingerprint(self)

    def copy(self) -> JointGraph:
        """The same joint graph over nodes of its own; fake values are shared, names are kept."""
        module = copy_module(self.graph_module)
        return replace(self, graph_module=module, memories=self.memories.copy())


@paused_collection()
def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Copies nodes and shallow metadata; submodules and constants are shared."""
    graph = fx.Graph()
    Copier(graph, module.graph).copy(module.graph.nodes)
    graph.set_codegen(torch_compat.codegen_of(module.graph))
    copied = make_module(module, graph)
    copied.meta.update(module.meta)
    return copied


def make_module(owner: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A graph module over ``graph`` whose code is generated only when it is first called.

    Args:
        owner: holds what the graph fetches, or a dict of that by name.
        graph: the graph.
    """
    with torch_compat.use_lazy_graph_module(True):
        return torch_compat.make_graph_module(owner, graph)


def check_structure(module: fx.GraphModule) -> str | None:
    """The first structural fault of a graph as text; None if the graph is valid.

    The words are those of `torch.fx.Graph.lint`, which does not ask whether placeholders come first, whether
    one output node ends the graph, and whether what reads a node is in the graph.
    """
    try:
        module.graph.lint()
    except (RuntimeError, ValueError) as error:
        return first_line(error)
    nodes = list(module.graph.nodes)
    kinds = [n.op for n in nodes]
    if kinds.count("output") != 1 or kinds[-1] != "output":
        return "it has no output node at its end, or nodes behind it"
    inputs = kinds.count("placeholder")
    late = next((n for n in nodes[inputs:] if n.op == "placeholder"), None)
    if late is not None:
        return f"placeholder '{late.name}' stands behind a node that is none"
    there = set(nodes)
    for node in nodes:
        if not there.issuperset(node.users):
            return f"'{node.name}' has a user that is not in the graph"
    return None


def primal_place(name: str) -> int | None:
    """The place of a primal among all, by the name that AOTAutograd gives it; None: it is something else."""
    head, _, number = name.partition("primals_")
    return int(number) - 1 if not head and number.isdigit() else None


def role_of(node: fx.Node) -> Role:
    """The role of a placeholder, by the names and values that AOTAutograd gives it."""
    name = str(node.target)
    if "tangents" in name:
        return Role.TANGENT
    if "bwd_seed" in name or "bwd_base_offset" in name:
        return Role.BACKWARD_SEED
    if "fwd_seed" in name or "fwd_base_offset" in name:
        return Role.FORWARD_SEED
    if isinstance(node.meta.get("val"), torch_compat.BackwardState):
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
    values = outputs_of(joint.graph)
    descs = output_node(joint.graph).meta.get("desc")
    described = leaves_of(descs) if descs is not None else [None] * len(values)
    n = joint.num_fwd_outputs
    return values[:n], values[n:], described[:n], described[n:]


def is_input_mutation(desc: Any) -> bool:
    """Whether a forward output is what AOTAutograd writes to an input after the step."""
    return type(desc).__name__ in ("InputMutationAOTOutput", "MetadataMutationAOTOutput")


def overwritten_after(joint: JointGraph, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Of some placeholders, those that AOTAutograd overwrites with outputs of forward when that has run."""
    descs = [d for d in split_outputs(joint)[2] if is_input_mutation(d)]
    mutated = {repr(d.mutated_input) for d in descs if hasattr(d, "mutated_input")}
    return [
        n
        for n in (nodes if mutated else ())
        if n.op == "placeholder" and repr(n.meta.get("desc")) in mutated
    ]


def primals_of(joint: JointGraph) -> list[fx.Node]:
    """The primals of a joint graph, in their order."""
    return [n for n in joint.graph.find_nodes(op="placeholder") if role_of(n) is Role.PRIMAL]


def outputs_of(graph: fx.Graph) -> list[Any]:
    """The values that a graph returns, as a flat list."""
    args = output_node(graph).args
    return leaves_of(args[0] if len(args) == 1 else args)


@paused_collection()
def fingerprint(joint: JointGraph) -> str:
    """Digest of what a plan depends on; see `JointGraph.fingerprint`.

    A line for each node, then the words that lines refer to by number. Of what a call makes, shape
    and dtype are written: given its arguments, strides and device follow.
    """
    # Nodes are written as positions. No argument of a node is ever `bytes`, so nothing else looks so.
    written: dict[fx.Node, bytes] = {}
    words: dict[str, int] = {}
    number: dict[Any, int] = {}  # of an operator, by identity, and of the form of a value
    declared: set[str] = set()
    lines = [f"remat-joint-2;{joint.num_fwd_outputs};"]
    for i, node in enumerate(joint.graph.nodes):
        written[node] = b"%d" % i
        op, target, meta = node.op, node.target, node.meta
        value = meta.get("val")
        args = fx.map_arg(node.args, written.__getitem__)
        call = number.get(id(target))
        if call is None:
            text = op if op in ("placeholder", "output") else f"{op} {target}"
            call = number[id(target)] = words.setdefault(text, len(words))
            declared.update(ops.declared_operators(node))
        elif isinstance(target, torch_compat.HigherOrderOperator):  # its graphs are others
            declared.update(ops.declared_operators(node))
        form = _static_form(value) if op == "call_function" else None
        if form is None:
            lines.append(f"{call} {args!r} {_describe(value)} {meta.get('recompute')}")
        else:
            made = number.get(form)
            if made is None:
                text = f"{tuple(form[0])} {form[1]}"
                made = number[form] = words.setdefault(text, len(words))
            lines.append(f"{call} {args!r} {made} {meta.get('recompute')}")
        if node.kwargs:
            lines.append(repr(fx.map_arg(node.kwargs, written.__getitem__)))
    if declared:
        lines.append(f"pure: {', '.join(sorted(declared))}")
    return hashlib.sha256("\n".join((*lines, *words)).encode()).hexdigest()


def operators_digest(joint: JointGraph) -> str:
    """Digest of the operators of a graph in their order: the same for other shapes and constants."""
    calls = (
        f"{n.op} {n.target}" for n in joint.graph.nodes if n.op not in ("placeholder", "output")
    )
    return hashlib.sha256("\n".join(calls).encode()).hexdigest()


def _static_form(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    """Shape and dtype of a tensor whose sizes and strides are numbers."""
    if not isinstance(value, torch.Tensor):
        return None
    if not torch_compat.has_symbolic_sizes(value):
        return value.shape, value.dtype
    if value.layout is not torch.strided:
        return None
    # A guard may have made numbers of symbols, and a graph read from text knows the numbers alone.
    sizes = [
        s if isinstance(s, int) else s.node.maybe_as_int() for s in (*value.shape, *value.stride())
    ]
    known = [s for s in sizes if s is not None]
    return (torch.Size(known[: value.dim()]), value.dtype) if len(known) == len(sizes) else None


def _describe(value: Any) -> str:
    """Shape, stride, dtype and device of a fake value, as text that is the same in every process."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"{value.layout} {tuple(value.shape)} {value.dtype} {value.device}"
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_describe, value)) + "]"
    return type(value).__name__
