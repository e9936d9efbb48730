"""Make random operators that run in forward and backward draw the same numbers twice.

As ``functionalize_rng_ops`` in PyTorch's ``torch/_functorch/partitioners.py``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PlanError
from remat.graph import ops
from remat.graph.copying import RUN_OF, run_of
from remat.graph.index import are_plain
from remat.graph.joint import HandedKind, Role, output_node, role_of
from remat.graph.replays import random_device, state_bytes
from remat.graph.storages import WORKSPACE, fake_mode_of
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State
from remat.passes.split.convention import own_descriptors, write_output


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
        drawn = drawn_again(state.forward.graph, state.backward.graph)
        graphsafe = _use_graphsafe([fwd for fwd, _ in drawn])
        states: list[tuple[fx.Node, list[fx.Node]]] = []
        with state.edit() as edit:
            for k, (fwd, later) in enumerate(drawn):
                # A generator of backward's own serves one run there.
                once = len(later) == 1 and later[0].graph is not fwd.graph
                if graphsafe and once and torch_compat.supports_graphsafe_rng(random_device(fwd)):
                    _share_generator(fwd, later[0], k)
                else:
                    states.append((_save_state(fwd), later))
            if states:
                _hand_over(state, states)
            return edit.result(f"{len(drawn)} operators replayed", replayed=len(drawn))


def drawn_again(forward: fx.Graph, backward: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Random operators that run more than once: forward's run that draws, and all later runs."""
    runs: dict[str, list[fx.Node]] = {}
    for nodes in (list(forward.nodes), list(backward.nodes)):
        for node, plain in zip(nodes, are_plain(nodes), strict=True):
            if not plain and ops.is_random(node):
                runs.setdefault(run_of(node), []).append(node)
    return [
        (first, later)
        for first, *later in runs.values()
        if later and first.graph is forward and all(n.target == first.target for n in later)
    ]


def _save_state(fwd: fx.Node) -> fx.Node:
    """Makes forward's run keep the generator's state, and returns that."""
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
        if WORKSPACE in fwd.meta:
            run.meta[WORKSPACE] = fwd.meta.pop(WORKSPACE)
        state = graph.call_function(operator.getitem, (run, 0))
        torch_compat.rename(state, f"{fwd.name}_state")
        state.meta = {**_provenance(fwd), "val": sample}
    # The node itself becomes the drawn value, so that it keeps its name, users and metadata.
    fwd.target, fwd.args, fwd.kwargs = operator.getitem, (run, 1), {}
    return state


def _replay(node: fx.Node, state: fx.Node) -> None:
    """Makes a run draw what the state's own run drew.

    Meanwhile the generator's own state lies in the host's memory, which is that of a step on a CPU.
    """
    if WORKSPACE in node.meta:
        node.meta[WORKSPACE] += state_bytes(node)
    node.args = (state, node.target, *node.args)  # type: ignore[arg-type]
    node.target = torch_compat.rng_prims.run_with_rng_state


def _hand_over(state: State, drawn: list[tuple[fx.Node, list[fx.Node]]]) -> None:
    """Later runs replay; states for backward are added to what is handed over, after checked tensors."""
    assert state.forward is not None
    assert state.backward is not None
    states: list[tuple[fx.Node, list[fx.Node]]] = []
    for saved, later in drawn:
        for node in later:
            if node.graph is saved.graph:
                _replay(node, saved)
        if there := [node for node in later if node.graph is not saved.graph]:
            states.append((saved, there))
    own = state.joint.num_fwd_outputs
    out = output_node(state.forward.graph)
    values = list(out.args[0])  # type: ignore[arg-type]
    handed = enumerate(values[own:], start=own)
    at = next(
        (
            k
            for k, value in handed
            if not isinstance(value, fx.Node) or HandedKind.of(value) is not HandedKind.TENSOR
        ),
        len(values),
    )
    values[at:at] = [s for s, _ in states]
    write_output(out, values, own_descriptors(out, own))
    graph = state.backward.graph
    before = next(
        n
        for n in graph.nodes
        if n.op != "placeholder"
        or role_of(n) is not Role.PRIMAL
        or HandedKind.of(n) not in (HandedKind.TENSOR, HandedKind.SIZE)
    )
    for saved, later in states:
        with graph.inserting_before(before):
            taken = graph.placeholder(saved.name)
            taken.meta = {"val": saved.meta["val"]}
        for node in later:
            _replay(node, taken)


def _share_generator(fwd: fx.Node, bwd: fx.Node, count: int) -> None:
    """Gives both runs a generator of their own, which AOTAutograd keeps in step."""
    device = random_device(fwd)
    for node, prefix in ((fwd, "fwd"), (bwd, "bwd")):
        graph = node.graph
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            generator = graph.placeholder(f"{prefix}_rng_state_{count}")
            generator.meta["val"] = torch_compat.get_default_generator(device).clone_state()
        node.args = (node.target, *node.args)  # type: ignore[arg-type]
        node.kwargs = {**node.kwargs, "rng_state": generator}
        node.target = torch_compat.rng_prims.graphsafe_run_with_rng_state


def _use_graphsafe(nodes: list[fx.Node]) -> bool:
    """Whether the graph-safe form applies: at most one such device, and eager's numbers not asked for."""
    config, inductor = torch_compat.functorch_config, torch_compat.inductor_config
    devices = {d for d in map(random_device, nodes) if torch_compat.supports_graphsafe_rng(d)}
    return (
        bool(config.graphsafe_rng_functionalization)
        and len(devices) == 1
        and (
            not inductor.fallback_random
            or inductor.test_configs.graphsafe_rng_func_ignores_fallback_random
        )
    )


def _sample_state(node: fx.Node) -> torch.Tensor:
    """A fake tensor of the size of the generator's state, in memory of its own."""
    size = state_bytes(node)
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    fake = fake_mode_of(values)
    if fake is None:
        return torch.empty(size, dtype=torch.uint8)
    with fake:
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _provenance(node: fx.Node) -> dict[str, Any]:
    """Metadata that says where a node came from, without its value."""
    kept = (RUN_OF, "stack_trace", "seq_nr", "nn_module_stack", "partitioner_tag", "ac_graph_id")
    return {k: node.meta[k] for k in kept if k in node.meta}
