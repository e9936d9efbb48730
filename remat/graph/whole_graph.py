"""Split a step that is one graph into forward and backward for planning, and join both again.

PyTorch can trace a whole training step, or an inference, as one graph. `whole_graph` rewrites the graph of a whole
step as a joint graph, which remat can plan. `joined` makes one graph of the forward and backward of a plan.

The *line* between forward and backward is the first node that AOTAutograd marks as part of backward. In a graph
without marks, as from `make_fx`, the line is the node at which most bytes are alive. *Late* nodes form the joint
graph's backward. A node is late if it depends on the node at the line. In a graph without marks, all nodes from the
line on are late. The line decides which values may be computed twice, and changes no result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.copying import RUN_OF, Copier, run_of
from remat.graph.index import inputs_of
from remat.graph.joint import JointGraph, make_module, output_node, outputs_of
from remat.graph.memory.liveness import MemoryCurve, memory_curve
from remat.graph.memory.storages import Memories, storage_key
from remat.graph.memory.writes import root_of, written_by
from remat.torch_compat import pytree

#: Metadata key of nodes of a joined graph: 0 for a node of the plan's forward, 1 for one of its backward.
SIDE = "remat_side"
#: Suffix of the node that stands for the write of an input, in the joint graph of a step that is one graph.
_WRITTEN = "_written"
#: Number of nodes of backward among which the loss's gradient is looked for. Few come before the gradient: constants,
#: and nodes that depend on weights alone.
_GRADIENT_CANDIDATES = 64
#: Part of messages about what `torch.export` returns.
_OF_EXPORT = "; of a torch.export.ExportedProgram, give ep.run_decompositions().graph_module"
#: Metadata key, at the output of the joint graph, for the metadata and the pytree of the original graph's output.
_OF_OUTPUT = "of_output"


def whole_graph(gm: fx.GraphModule, *, lower: str = "eager", name: str = "") -> JointGraph:
    """Rewrite the graph of a whole step as a joint graph.

    Functionalisation leaves writes to inputs at the end of the graph. Each write to an input moves right behind the
    last node that needs the old contents. The optimizer's arithmetic moves together with the optimizer's writes. In
    the joint graph, an empty output takes the place of each write to an input.

    Args:
        gm: the graph of the step, which is not changed. Its nodes need fake values in ``meta["val"]``.
        lower: lowering that the graph was traced for, ``"inductor"`` or ``"eager"``.
        name: name of the graph in messages; empty: the name of the module's class.

    Raises:
        ProblemError: the graph has no node to run, or a node without a fake value.
    """
    _check(gm)
    nodes = list(gm.graph.nodes)
    writes = _final_writes(nodes)
    nodes = _with_early_updates(nodes, writes)
    late, forced = _line(gm, nodes, writes)
    graph = fx.Graph()
    copier = Copier(graph, gm.graph, quick=False)
    values = outputs_of(gm.graph)
    returned = {v for v in values if isinstance(v, fx.Node)}
    stands: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op == "output":
            continue
        if node in writes:
            new = writes[node][1]
            copy = _stand_in(graph, copier.copies[new], f"{writes[node][0].name}{_WRITTEN}")
            stands[node] = copier.copies[node] = copy
        else:
            copier.copy([node])
            copy = copier.copies[node]
        for key in ("partitioner_tag", SIDE):  # marks of an earlier plan
            copy.meta.pop(key, None)
        if node.op == "call_function" and (node in late or node in forced):
            where = "backward" if node in late else "forward"
            copy.meta["partitioner_tag"] = f"must_be_in_{where}"
    rows = [(v, copier.copies.get(v, v) if isinstance(v, fx.Node) else v) for v in values]
    rows += [(w, stands[w]) for w in writes if w not in returned]
    is_late = [isinstance(v, fx.Node) and v in late for v, _ in rows]
    order = sorted(range(len(rows)), key=is_late.__getitem__)
    original = output_node(gm.graph)
    tree = pytree.tree_structure(original.args[0])
    graph.output(tuple(rows[k][1] for k in order)).meta[_OF_OUTPUT] = original.meta, tree
    places = tuple(order.index(k) for k in range(len(values)))
    graph.set_codegen(torch_compat.codegen_of(gm.graph))
    return JointGraph(
        graph_module=make_module(gm, graph),
        num_fwd_outputs=is_late.count(False),
        static_inputs=tuple(range(len(gm.graph.find_nodes(op="placeholder")))),
        lower=lower,
        name=name or type(gm).__name__,
        places=places,
    )


def joined(joint: JointGraph, forward: fx.GraphModule, backward: fx.GraphModule) -> fx.GraphModule:
    """Join the forward and backward of a plan into one graph that computes what the original graph computes.

    The joined graph has the inputs and outputs of the step's original graph. The second run of a node NAME is called
    ``NAME_again``.
    """
    graph = fx.Graph()
    inputs = joint.graph.find_nodes(op="placeholder")
    copiers = [Copier(graph, joint.graph, quick=False) for _ in range(2)]
    copiers[0].copy(inputs)
    node_of = {n.name: copiers[0].copies[n] for n in inputs}
    for side, (copier, module) in enumerate(zip(copiers, (forward, backward), strict=True)):
        earlier = frozenset(node_of)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                copier.copies[node] = node_of[node.name]
            elif node.op != "output":
                copier.copy([node], apart=node.name in earlier)
                node_of[node.name] = copier.copies[node]
        for node in copier.copies.values():
            node.meta.setdefault(SIDE, side)
    traced = {n.name: n for n in joint.graph.nodes}
    returned = outputs_of(forward.graph)[: joint.num_fwd_outputs], outputs_of(backward.graph)
    values = [
        copier.copies[v] if isinstance(v, fx.Node) else v
        for copier, outputs in zip(copiers, returned, strict=True)
        for v in outputs
    ]
    out = graph.output(tuple(values))
    for node in graph.nodes:
        _restore_meta(node, traced)
    written = _write_back(graph, out)
    values = [written.get(v, v) for v in values]
    values = [values[k] for k in joint.places]
    # A joint graph that was read from a text returns a tuple.
    meta, tree = output_node(joint.graph).meta.get(_OF_OUTPUT, ({}, None))
    out.args = (tuple(values) if tree is None else pytree.tree_unflatten(values, tree),)
    out.meta.update(meta)
    for node in reversed(written):
        graph.erase_node(node)
    graph.set_codegen(torch_compat.codegen_of(joint.graph))
    module = make_module(joint.graph_module, graph)
    module.meta.update(joint.graph_module.meta)
    return module


def curve_of_one(gm: fx.GraphModule) -> MemoryCurve:
    """Return the simulated bytes alive at each node of a graph that runs alone, with its inputs and outputs."""
    nothing = fx.Graph()
    nothing.output(())
    return memory_curve(gm, make_module({}, nothing), len(outputs_of(gm.graph)), Memories())


def _check(gm: object) -> None:
    if not isinstance(gm, fx.GraphModule):
        raise ProblemError(
            f"the graph is a {type(gm).__name__}; expected a torch.fx.GraphModule whose nodes have fake values, such as "
            f"torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode='fake')(*args) returns{_OF_EXPORT}"
        )
    foreign = [n for n in gm.graph.nodes if n.op in ("call_module", "call_method")]
    if foreign:
        raise ProblemError(
            f"'{foreign[0].name}' is a {foreign[0].op}; expected a graph of ATen operators, as make_fx or AOTAutograd "
            f"trace it{_OF_EXPORT}"
        )
    unknown = [
        n
        for n in gm.graph.nodes
        # A check of a size has no value.
        if n.op in ("placeholder", "call_function") and "val" not in n.meta and n.users
    ]
    if unknown:
        raise ProblemError(
            f"'{unknown[0].name}' has no fake value in meta['val']; trace the graph with make_fx(…, "
            "tracing_mode='fake'), or run torch.fx.passes.fake_tensor_prop.FakeTensorProp on it"
        )
    if not any(n.op == "call_function" for n in gm.graph.nodes):
        raise ProblemError("the graph runs no operator, so there is nothing to plan")


def _final_writes(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Return the pair (input, written value) for each ``copy_`` into an input, if no later node reads the input."""
    position = {n: i for i, n in enumerate(nodes)}
    inputs = Counter(_memory(n) for n in nodes if n.op == "placeholder")
    written = _overwritten(nodes)
    copies = [n for n in nodes if n.target is torch.ops.aten.copy_.default]
    into = [n.args[0] for n in copies]
    final = {}
    for copy in copies:
        target, value = copy.args[:2]
        if not isinstance(target, fx.Node) or not isinstance(value, fx.Node):
            continue
        read = {u for v in _views_of(target) for u in v.users} - {copy}
        is_last = all(u.op == "output" or position[u] < position[copy] for u in read)
        alone = into.count(target) == 1 and all(u.op == "output" for u in copy.users)
        # The write may move. Another input must not see this, and nothing may overwrite the value before.
        movable = inputs[_memory(target)] == 1 and _memory(value) not in written
        alike = _form(value) == _form(target)
        if target.op == "placeholder" and is_last and alone and movable and alike:
            final[copy] = (target, value)
    return final


def _memory(node: fx.Node) -> int | None:
    return storage_key(node.meta.get("val"))


def _overwritten(nodes: Iterable[fx.Node]) -> set[int | None]:
    """Return the keys of the storages to which the given nodes write."""
    writers = [n for n in nodes if n.op == "call_function" and not ops.is_plain(n)]
    return {_memory(w) for n in writers for w in written_by(n)}


def _form(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.dtype, value.device, value.shape)


def _views_of(base: fx.Node) -> set[fx.Node]:
    """Return a node and all views of its memory."""
    views = [base]
    for node in views:
        views += [u for u in node.users if root_of(u) is base and u not in views]
    return {*views}


def _with_early_updates(
    nodes: list[fx.Node], writes: Mapping[fx.Node, tuple[fx.Node, fx.Node]]
) -> list[fx.Node]:
    """Move nodes that run after backward, such as the optimizer's, right behind the last of their inputs."""
    position = {n: i for i, n in enumerate(nodes)}
    # A gradient then lives until its parameter is updated, and not until all are.
    start = max((i for i, n in enumerate(nodes) if _is_of_backward(n)), default=-1)
    if start < 0:
        return nodes
    last = _last_needs(nodes[: start + 1])
    # A node that reads memory with several contents keeps its place.
    fixed = _overwritten(n for n in nodes if n not in writes)
    rank: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        moves = node in writes or (
            i > start
            and node.op == "call_function"
            and ops.is_plain(node)
            and fixed.isdisjoint(map(_memory, node.all_input_nodes))
        )
        rank[node] = max((rank[j] for j in node.all_input_nodes), default=0) if moves else i
        if node in writes:
            # A write stays behind all nodes that read the old contents, or that may read values computed again from
            # them.
            rank[node] = max(rank[node], last.get(writes[node][0], 0))
    return sorted(nodes, key=lambda n: (rank[n], position[n]))


def _last_needs(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return for each node the last position that reads its result, or a value that forward computes from it."""
    last: dict[fx.Node, int] = {}
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        own = i if _is_of_backward(node) else max(i, last.get(node, 0))
        for read in node.all_input_nodes:
            last[read] = max(last.get(read, 0), own)
    return last


def _is_of_backward(node: fx.Node) -> bool:
    """Return whether AOTAutograd marked a node as traced in backward."""
    return bool(node.meta.get("autograd_backward")) or (
        node.meta.get("partitioner_tag") == "is_backward"
    )


def _line(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], writes: Mapping[fx.Node, tuple[fx.Node, fx.Node]]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes of backward, and the nodes before the line whose results are read from the line on."""
    marked = [i for i, n in enumerate(nodes) if n.op == "call_function" and _is_of_backward(n)]
    if marked:
        at, late = marked[0], _behind_gradients(nodes, marked)
        # A node with an effect, or that reads memory with several contents, does not move across the line.
        after_line = [n for n in nodes[at:] if n.op == "call_function"]
        fixed = _overwritten(n for n in nodes if n not in writes)
        late |= {
            n
            for n in after_line
            if ops.may_have_effects(n) or not fixed.isdisjoint(map(_memory, n.all_input_nodes))
        }
        late = _dependents(nodes[at:], late)
    else:
        at = _peak_position(gm, nodes)
        late = {n for n in nodes[at:] if n.op == "call_function"}
    before = {n for n in nodes[:at] if n.op == "call_function"}
    forced = {n for n in before if any(u not in before and u not in writes for u in n.users)}
    return late, forced


def _behind_gradients(nodes: Sequence[fx.Node], marked: Sequence[int]) -> set[fx.Node]:
    """Return the nodes that depend on the gradient of the loss; all of backward if no such gradient is found."""
    # Other nodes of backward, such as a mask of an activation, depend on forward's values alone, so they may run
    # before the line. The gradient is the first node of backward on which all results of backward depend. With
    # several losses there is none, and all of backward is late.
    returned = {n for n in nodes if any(u.op == "output" for u in n.users)}
    returned |= {n for n in nodes if n.target is torch.ops.aten.copy_.default}
    after_line = nodes[marked[0] :]
    everything = _dependents(after_line, {nodes[i] for i in marked})
    results = returned & everything
    for i in marked[:_GRADIENT_CANDIDATES]:
        if results <= (dependents := _dependents(after_line, {nodes[i]})):
            return dependents
    return everything


def _dependents(nodes: Iterable[fx.Node], dependents: set[fx.Node]) -> set[fx.Node]:
    """Add to ``dependents`` all nodes that read a result of one of its nodes, or memory that one of these writes."""
    written: set[int | None] = set()
    for node in nodes:
        reads = inputs_of(node)
        if node.op == "call_function" and (
            not dependents.isdisjoint(reads)
            or (written and not written.isdisjoint(map(_memory, reads)))
        ):
            dependents.add(node)
        if node in dependents:
            written |= _overwritten([node])
    return dependents


def _peak_position(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> int:
    """Return the position of the node at which most bytes are alive in a graph that runs alone."""
    curve = curve_of_one(gm)
    name = curve.runs[curve.nbytes.index(curve.peak_bytes)]
    return next(i for i, n in enumerate(nodes) if n.name == name)


def _stand_in(graph: fx.Graph, value: fx.Node, name: str) -> fx.Node:
    """Append to a graph a node that reads a value and returns an empty tensor, in place of a write to an input."""
    stand_in = graph.create_node(
        "call_function", torch.ops.aten.new_zeros.default, (value, [0]), name=name
    )
    fake = value.meta["val"]
    stand_in.meta["val"] = fake.new_zeros([0])
    return stand_in


def _write_back(graph: fx.Graph, out: fx.Node) -> dict[fx.Node, fx.Node]:
    """Insert the writes for the nodes that `_stand_in` appended, and return a dict from these nodes to the writes."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    inputs = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    written: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        target = inputs.get(run_of(node).removesuffix(_WRITTEN))
        if node.op != "call_function" or target is None or not run_of(node).endswith(_WRITTEN):
            continue
        value = node.args[0]
        readers = (u for v in _views_of(target) for u in (v, *v.users) if u is not out)
        # The last node that reads the old contents of the input.
        last_reader = max((node, *readers), key=position.__getitem__)
        with graph.inserting_after(last_reader):
            copy = graph.call_function(torch.ops.aten.copy_.default, (target, value))
        position[copy] = position[last_reader]
        copy.meta = {**node.meta, "val": target.meta["val"]}
        copy.meta.pop(RUN_OF, None)
        written[node] = copy
    return written


def _restore_meta(node: fx.Node, traced: Mapping[str, fx.Node]) -> None:
    """Remove from a node of the joined graph the metadata that only a separate forward or backward needs."""
    node.meta.pop("partitioner_tag", None)
    origin = traced.get(node.name)
    if origin is not None and not origin.meta.get("autograd_backward"):
        node.meta.pop("autograd_backward", None)
