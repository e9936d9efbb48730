"""Represent joint graphs, with the conventions of AOTAutograd on which the rest of remat builds."""

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
from remat.graph.memory.storages import SYMBOLIC, Memories, leaves_of
from remat.graph.memory.writes import by_target


class Role(enum.Enum):
    """Kind of a placeholder of a joint graph: input, tangent, random seed or backward state."""

    PRIMAL = "primal"
    TANGENT = "tangent"
    FORWARD_SEED = "forward seed or offset"
    BACKWARD_SEED = "backward seed or offset"
    BACKWARD_STATE = "backward state"

    @property
    def in_backward(self) -> bool:
        """Whether only backward receives the placeholder, so that its readers run in backward."""
        return self not in (Role.PRIMAL, Role.FORWARD_SEED)


#: Metadata key of AOTAutograd for a saved tensor whose version counter autograd does not check.
UNCHECKED = "saved_tensor_with_no_vc_check"


class SavedValueKind(enum.IntEnum):
    """Kind of a value that forward saves for backward; forward returns the saved values sorted by kind.

    For an ``UNCHECKED`` tensor, autograd does not compare version counters.
    """

    TENSOR = 0
    UNCHECKED = 1
    OBJECT = 2
    SIZE = 3

    @classmethod
    def of(cls, node: fx.Node) -> SavedValueKind:
        """Return the kind of saved value to which a node's value belongs."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return cls.UNCHECKED if node.meta.get(UNCHECKED) else cls.TENSOR
        return cls.SIZE if isinstance(value, (*SYMBOLIC, int, float)) else cls.OBJECT


class Turn(NamedTuple):
    """One run of a joint graph among all graph runs of the step.

    After a graph break, a step runs several joint graphs. A graph may run several times in a step,
    for example if equal layers are compiled once.

    Attributes:
        at: index of this run among all graph runs of the step, in their order.
        received: primals that an earlier graph run returned: (position of the primal, index of the
            earlier run, index among the forward outputs of that run).
        shared: primals that an earlier graph run received too: (position of the primal, index of the
            first such run, position of the primal in that run).
        returned: indices of this run's forward outputs that both a later run and the step's caller
            receive.
        dropped: indices of this run's forward outputs that no later run receives, and that nobody
            holds once backward has reached this run.
    """

    at: int
    received: tuple[tuple[int, int, int], ...] = ()
    shared: tuple[tuple[int, int, int], ...] = ()
    returned: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointGraph:
    """Forward and backward of one training step in one FX graph, as AOTAutograd traces it.

    Attributes:
        graph_module: the joint graph. Placeholders are primals and tangents, and in some graphs
            random seeds or a backward state. Outputs are forward's own outputs, followed by one
            gradient (or None) per input. Every node carries a fake tensor (or symbol) in
            ``meta["val"]``.
        num_fwd_outputs: number of leading outputs that belong to forward.
        static_inputs: positions of the primals whose memory outlives the step (parameters,
            buffers).
        lower: lowering that the graph was traced for, ``"inductor"`` or ``"eager"``.
        name: name of the graph in tables and messages.
        received: primals that an earlier graph of the same step returned: (position of the primal,
            index of the earlier graph in the captured list, index among that graph's forward
            outputs).
        shared: primals that an earlier graph of the same step received too, such as tied weights:
            (position of the primal, index of the first such graph, position in that graph).
        returned: indices of forward outputs that both a later graph and the step's caller receive.
        dropped: indices of forward outputs that are freed before backward reaches the graph; see `Turn`.
        runs: number of runs of the graph in one step; above 1 if equal layers are compiled once.
        turns: one `Turn` per run of this graph, if some graph of the step runs several times;
            otherwise empty.
        places: if the step is one graph, the position of each output of the step among the joint graph's outputs; empty
            for a joint graph of AOTAutograd. See `remat.graph.whole_graph`.
        memories: cache of the storages behind the fake values.
    """

    graph_module: fx.GraphModule
    num_fwd_outputs: int
    static_inputs: tuple[int, ...] = ()
    lower: str = "eager"
    name: str = "joint"
    received: tuple[tuple[int, int, int], ...] = ()
    shared: tuple[tuple[int, int, int], ...] = ()
    returned: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    runs: int = 1
    turns: tuple[Turn, ...] = ()
    places: tuple[int, ...] = ()
    memories: Memories = field(default_factory=Memories, repr=False)

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def fingerprint(self) -> str:
        """SHA-256 digest of the graph's operators, edges, constants, shapes, dtypes and devices, without names.

        The digest also depends on which custom operators of the graph are declared pure.
        """
        return fingerprint(self)

    def copy(self) -> JointGraph:
        """Return a copy of the joint graph with new nodes, which keep their names and share the fake values."""
        module = copy_module(self.graph_module)
        return replace(self, graph_module=module, memories=self.memories.copy())


@paused_collection()
def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph module with new nodes; submodules, constants and entries of metadata are shared."""
    graph = fx.Graph()
    Copier(graph, module.graph).copy(module.graph.nodes)
    graph.set_codegen(torch_compat.codegen_of(module.graph))
    copied = make_module(module, graph)
    copied.meta.update(module.meta)
    return copied


def make_module(owner: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module that generates its code at the first call, and has the attributes of a module or dict."""
    with torch_compat.use_lazy_graph_module(True):
        return torch_compat.make_graph_module(owner, graph)


def check_structure(module: fx.GraphModule) -> str | None:
    """Return a description of the first structural fault of a graph; None if the graph is valid.

    A valid graph passes `torch.fx.Graph.lint`. Its placeholders come first, a single output node ends the graph, and
    every user of a node is in the graph.
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
        return f"placeholder '{late.name}' stands behind a node that is not a placeholder"
    # `lint` checks the inputs of nodes, but not their users.
    in_graph = set(nodes)
    for node in nodes:
        if not in_graph.issuperset(node.users):
            return f"'{node.name}' has a user that is not in the graph"
    return None


def primal_place(name: str) -> int | None:
    """Return the zero-based index that a primal's name states: 0 for ``primals_1``; None for another name."""
    head, _, number = name.partition("primals_")
    return int(number) - 1 if not head and number.isdigit() else None


def role_of(node: fx.Node) -> Role:
    """Return the role of a placeholder, derived from the name and value that AOTAutograd gave the placeholder."""
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
    """Return the output node of a graph, which must be its last node."""
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def tangent_dependents(graph: fx.Graph) -> set[fx.Node]:
    """Return backward's inputs, such as tangents, and all nodes that depend on these inputs."""
    dependent: set[fx.Node] = set()
    for node in graph.nodes:
        is_backward_input = node.op == "placeholder" and role_of(node).in_backward
        if is_backward_input or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def split_outputs(
    joint: JointGraph,
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Split the outputs of a joint graph into forward and backward outputs.

    Returns:
        Forward outputs, backward outputs, and AOTAutograd's descriptors of both; a descriptor is None if
        the graph has none.
    """
    values = outputs_of(joint.graph)
    descs = output_node(joint.graph).meta.get("desc")
    described = leaves_of(descs) if descs is not None else [None] * len(values)
    n = joint.num_fwd_outputs
    return values[:n], values[n:], described[:n], described[n:]


def is_input_mutation(desc: Any) -> bool:
    """Return whether AOTAutograd writes a forward output with a given descriptor to an input after forward."""
    return type(desc).__name__ in ("InputMutationAOTOutput", "MetadataMutationAOTOutput")


def overwritten_after(joint: JointGraph, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the placeholders among ``nodes`` that AOTAutograd overwrites with forward outputs after forward."""
    descs = [d for d in split_outputs(joint)[2] if is_input_mutation(d)]
    mutated = {repr(d.mutated_input) for d in descs if hasattr(d, "mutated_input")}
    return [
        n
        for n in (nodes if mutated else ())
        if n.op == "placeholder" and repr(n.meta.get("desc")) in mutated
    ]


def primals_of(joint: JointGraph) -> list[fx.Node]:
    """Return the primals of a joint graph in graph order."""
    return [n for n in joint.graph.find_nodes(op="placeholder") if role_of(n) is Role.PRIMAL]


def outputs_of(graph: fx.Graph) -> list[Any]:
    """Return the values that a graph returns, as a flat list."""
    args = output_node(graph).args
    return leaves_of(args[0] if len(args) == 1 else args)


@paused_collection()
def fingerprint(joint: JointGraph) -> str:
    """Return a SHA-256 digest of a joint graph's structure, without names.

    The digested text has one line per node. Each line of the text refers to operators and results by number, and a
    table after the lines explains the numbers.
    """
    # In arguments, a node is replaced by its position as `bytes`. No other argument has this type, so the text of
    # a position cannot be mistaken for a constant.
    written: dict[fx.Node, bytes] = {}
    words: dict[str, int] = {}
    # Numbers in `words`: of an operator by its `id`, of a result by its shape and dtype.
    number: dict[Any, int] = {}
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
        elif isinstance(target, torch_compat.HigherOrderOperator):  # each call gets other graphs
            declared.update(ops.declared_operators(node))
        # Strides and device of a static result follow from the operator and its arguments.
        form = _static_form(value) if op == "call_function" else None
        if form is None:
            lines.append(f"{call} {args!r} {_describe(value)} {meta.get('recompute')}")
        else:
            result = number.get(form)
            if result is None:
                text = f"{tuple(form[0])} {form[1]}"
                result = number[form] = words.setdefault(text, len(words))
            lines.append(f"{call} {args!r} {result} {meta.get('recompute')}")
        if node.kwargs:
            lines.append(repr(fx.map_arg(node.kwargs, written.__getitem__)))
    # `remat.declare_pure` decides which nodes may run again, so a declaration changes the plan.
    if declared:
        lines.append(f"pure: {', '.join(sorted(declared))}")
    return hashlib.sha256("\n".join((*lines, *words)).encode()).hexdigest()


def operators_digest(joint: JointGraph) -> str:
    """Return a SHA-256 digest of a graph's operators in graph order, without shapes and constants."""
    nodes = [n for n in joint.graph.nodes if n.op not in ("placeholder", "output")]
    calls = by_target(nodes, lambda n: f"{n.op} {n.target}")
    return hashlib.sha256("\n".join(calls).encode()).hexdigest()


def _static_form(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    """Return shape and dtype of a tensor whose sizes and strides are ints; None for any other value."""
    if not isinstance(value, torch.Tensor):
        return None
    if not torch_compat.has_symbolic_sizes(value):
        return value.shape, value.dtype
    if value.layout is not torch.strided:
        return None
    # A guard may have specialised symbols to numbers. If the graph is written as text and read again, it has only
    # the numbers, and its digest must be the same.
    sizes = [
        s if isinstance(s, int) else s.node.maybe_as_int() for s in (*value.shape, *value.stride())
    ]
    static = [s for s in sizes if s is not None]
    return (torch.Size(static[: value.dim()]), value.dtype) if len(static) == len(sizes) else None


def _describe(value: Any) -> str:
    """Describe shape, strides, dtype and device of a fake value as text that is the same in every process."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"{value.layout} {tuple(value.shape)} {value.dtype} {value.device}"
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_describe, value)) + "]"
    return type(value).__name__
