"""Random operators that run in both halves draw the same numbers twice (SPEC A10)."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PlanError
from remat.graph import ops
from remat.graph.index import are_plain
from remat.graph.joint import Role, output_node, role_of
from remat.graph.replays import random_device
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State


@dataclass(frozen=True)
class FunctionalizeRng(Pass):
    """Makes every random operator of backward that forward runs too replay forward's draw.

    Forward runs it with ``run_and_save_rng_state`` and returns the generator's state with the saved
    tensors; backward runs it with ``run_with_rng_state``, which leaves the generator as it found
    it. On devices with graph-safe generators, two generators that advance in step take the place of
    the state. A graph that is not partitioned has no operator twice: nothing is done.
    """

    name: ClassVar[str] = "functionalize-rng"
    stage: ClassVar[Stage] = Stage.SPLIT
    optional: ClassVar[bool] = False
    summary: ClassVar[str] = "replay in backward what forward drew at random"

    def run(self, state: State) -> PassResult:
        if state.forward is None or state.backward is None:
            return PassResult(state=state, modified=False, detail="not partitioned")
        pairs = twice_random(state.forward.graph, state.backward.graph)
        graphsafe = _use_graphsafe([fwd for fwd, _ in pairs])
        states: list[tuple[fx.Node, fx.Node]] = []
        with state.edit() as edit:
            for k, (fwd, bwd) in enumerate(pairs):
                if graphsafe and _supports_graphsafe(random_device(fwd)):
                    _share_generator(fwd, bwd, k)
                else:
                    states.append(_save_and_replay(fwd, bwd))
            if states:
                _hand_over(state, states)
            edit.modified = bool(pairs)
        return edit.result(f"{len(pairs)} operators replayed", replayed=len(pairs))


def twice_random(forward: fx.Graph, backward: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Random operators that stand in both graphs, by name, in forward's order."""
    nodes = list(backward.nodes)
    drawn = {
        n.name: n
        for n, plain in zip(nodes, are_plain(nodes), strict=True)
        if not plain and ops.is_random(n)
    }
    if not drawn:
        return []
    return [
        (n, drawn[n.name])
        for n in forward.nodes
        if n.op == "call_function" and n.name in drawn and n.target == drawn[n.name].target
    ]


def _save_and_replay(fwd: fx.Node, bwd: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Rewrites one pair; returns forward's state and the replay that wants it."""
    if not isinstance(fwd.target, torch_compat.OpOverload):
        raise PlanError(
            f"'{fwd.name}' ({fwd.target}) draws random numbers inside a higher-order operator, which "
            "cannot be replayed; its result must be saved"
        )
    sample = _sample_state(fwd)
    graph = fwd.graph
    with graph.inserting_before(fwd):
        run = graph.call_function(
            torch_compat.rng_prims.run_and_save_rng_state, (fwd.target, *fwd.args), dict(fwd.kwargs)
        )
        torch_compat.rename(run, f"{fwd.name}_drawn")
        run.meta = {**_provenance(fwd), "val": (sample, fwd.meta.get("val"))}
        state = graph.call_function(operator.getitem, (run, 0))
        torch_compat.rename(state, f"{fwd.name}_state")
        state.meta = {**_provenance(fwd), "val": sample}
    # The node itself becomes the drawn value, so that it keeps its name, users and metadata.
    fwd.target, fwd.args, fwd.kwargs = operator.getitem, (run, 1), {}
    return state, bwd


def _hand_over(state: State, states: list[tuple[fx.Node, fx.Node]]) -> None:
    """Adds the generator states to forward's outputs and backward's inputs, after checked tensors."""
    assert state.forward is not None
    assert state.backward is not None
    out = output_node(state.forward.graph)
    values = list(out.args[0])  # type: ignore[arg-type]
    descs = list(out.meta.get("desc") or [None] * len(values))
    at = next(
        (
            k
            for k in range(state.joint.num_fwd_outputs, len(values))
            if not _is_checked_tensor(values[k])
        ),
        len(values),
    )
    values[at:at] = [s for s, _ in states]
    descs[at:at] = [None] * len(states)
    first = state.joint.num_fwd_outputs
    for k in range(first, len(values)):
        kind = type(descs[k]) if descs[k] is not None else torch_compat.SavedForBackwardsAOTOutput
        descs[k] = kind(k - first)
    out.args = (tuple(values),)
    out.meta["desc"] = descs
    out.meta["output_stack_traces"] = [
        v.meta.get("stack_trace") if isinstance(v, fx.Node) else None for v in values
    ]
    graph = state.backward.graph
    before = next(
        n
        for n in graph.nodes
        if n.op != "placeholder"
        or role_of(n) is not Role.PRIMAL
        or not (_is_checked_tensor(n) or _is_size(n))
    )
    for saved, bwd in states:
        with graph.inserting_before(before):
            taken = graph.placeholder(saved.name)
            taken.meta = {"val": saved.meta["val"]}
        bwd.args = (taken, bwd.target, *bwd.args)  # type: ignore[arg-type]
        bwd.target = torch_compat.rng_prims.run_with_rng_state


def _share_generator(fwd: fx.Node, bwd: fx.Node, count: int) -> None:
    """Gives both runs a generator of their own, which AOTAutograd keeps in step."""
    from remat.torch_compat import get_default_generator

    device = random_device(fwd)
    for node, prefix in ((fwd, "fwd"), (bwd, "bwd")):
        graph = node.graph
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            generator = graph.placeholder(f"{prefix}_rng_state_{count}")
            generator.meta["val"] = get_default_generator(device).clone_state()
        node.args = (node.target, *node.args)  # type: ignore[arg-type]
        node.kwargs = {**node.kwargs, "rng_state": generator}
        node.target = torch_compat.rng_prims.graphsafe_run_with_rng_state


def _use_graphsafe(nodes: list[fx.Node]) -> bool:
    """Whether the graph-safe form applies: at most one such device, and eager's numbers not asked for."""
    from remat.torch_compat import functorch_config as config
    from remat.torch_compat import inductor_config as inductor

    devices = {d for d in map(random_device, nodes) if _supports_graphsafe(d)}
    return (
        bool(config.graphsafe_rng_functionalization)
        and len(devices) == 1
        and (
            not inductor.fallback_random
            or inductor.test_configs.graphsafe_rng_func_ignores_fallback_random
        )
    )


def _supports_graphsafe(device: torch.device) -> bool:
    from remat.torch_compat import supports_graphsafe_rng

    return bool(supports_graphsafe_rng(device))


def _sample_state(node: fx.Node) -> torch.Tensor:
    """A fake tensor of the size of the generator's state, in memory of its own."""
    from remat.torch_compat import pytree

    device = random_device(node)
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    fake = next((v.fake_mode for v in pytree.tree_leaves(values) if hasattr(v, "fake_mode")), None)
    size = 5056 if device.type == "cpu" else 16
    if fake is None:
        return torch.empty(size, dtype=torch.uint8)
    with fake:
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _provenance(node: fx.Node) -> dict[str, Any]:
    """Metadata that says where a node came from, without its value."""
    kept = ("stack_trace", "seq_nr", "nn_module_stack", "partitioner_tag", "ac_graph_id")
    return {k: node.meta[k] for k in kept if k in node.meta}


def _is_checked_tensor(value: Any) -> bool:
    return (
        isinstance(value, fx.Node)
        and isinstance(value.meta.get("val"), torch.Tensor)
        and not value.meta.get("saved_tensor_with_no_vc_check", False)
    )


def _is_size(node: fx.Node) -> bool:
    return isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    )
