"""Pass that makes a recomputed random operator draw the same numbers again.

The pass follows ``functionalize_rng_ops`` in PyTorch's ``torch/_functorch/partitioners.py``.
"""

from __future__ import annotations

import contextlib
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
from remat.graph.memory.storages import WORKSPACE, fake_mode_of, workspace_of
from remat.graph.problems.replays import random_device, state_bytes
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State
from remat.passes.split.convention import hand_over


@dataclass(frozen=True)
class FunctionalizeRng(Pass):
    """Make every repeated run of a random operator replay the draw of its first run in forward.

    In forward, ``run_and_save_rng_state`` runs the random operator, and also returns the generator's
    state from before the draw. Forward saves the generator's state for backward. Later runs of the
    operator use ``run_with_rng_state``, which draws from the saved state and leaves the generator
    unchanged. On devices with graph-safe generators, two generators that advance in lockstep may
    replace the saved state; see `_use_graphsafe`. A graph that is not partitioned repeats no operator
    and stays unchanged.
    """

    name: ClassVar[str] = "functionalize-rng"
    stage: ClassVar[Stage] = Stage.SPLIT
    optional: ClassVar[bool] = False

    def run(self, state: State) -> PassResult:
        if state.forward is None or state.backward is None:
            return PassResult(state=state, modified=False, detail="not partitioned")
        drawn = drawn_again(state.forward.graph, state.backward.graph)
        graphsafe = _use_graphsafe([fwd for fwd, _ in drawn])
        states: list[tuple[fx.Node, list[fx.Node]]] = []
        with state.edit() as edit:
            for k, (fwd, later) in enumerate(drawn):
                # Backward's generator advances with every draw, so it can replay forward's draw only once.
                once = len(later) == 1 and later[0].graph is not fwd.graph
                if graphsafe and once and torch_compat.supports_graphsafe_rng(random_device(fwd)):
                    _share_generator(fwd, later[0], k)
                else:
                    states.append((_save_state(fwd), later))
            if states:
                own = state.joint.num_fwd_outputs
                _hand_over(state.forward.graph, state.backward.graph, own, states)
            return edit.result(f"{len(drawn)} operators replayed", replayed=len(drawn))


def drawn_again(forward: fx.Graph, backward: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return the random operators that run more than once and draw anew in each run.

    Random operators whose first run is in backward, or whose later runs already replay the first draw,
    are left out.

    Returns:
        Pairs of the first run in forward, which draws, and the list of all later runs.
    """
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
    """Make a random operator in forward also return the generator's state; return the state's node."""
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
        # The workspace belongs to the operator, and ``fwd`` becomes an element of its result.
        if workspace_of(fwd) is not None:
            run.meta[WORKSPACE] = fwd.meta.pop(WORKSPACE)
        state = graph.call_function(operator.getitem, (run, 0))
        torch_compat.rename(state, f"{fwd.name}_state")
        state.meta = {**_provenance(fwd), "val": sample}
    # The node itself becomes the drawn value, so that it keeps its name, users and metadata.
    fwd.target, fwd.args, fwd.kwargs = operator.getitem, (run, 1), {}
    return state


def _replay(node: fx.Node, state: fx.Node) -> None:
    """Rewrite a random operator so that it draws from a saved generator state."""
    # `run_with_rng_state` keeps the generator's current state in host memory while the operator draws.
    # If the step runs on a CPU, this memory counts as memory of the step.
    if workspace_of(node) is not None:
        node.meta[WORKSPACE] += state_bytes(node)
    node.args = (state, node.target, *node.args)  # type: ignore[arg-type]
    node.target = torch_compat.rng_prims.run_with_rng_state


def _hand_over(
    forward: fx.Graph, backward: fx.Graph, own: int, drawn: list[tuple[fx.Node, list[fx.Node]]]
) -> None:
    """Make later runs of random operators replay forward's draws, and hand generator states over to backward."""
    states: list[tuple[fx.Node, list[fx.Node]]] = []
    for saved, later in drawn:
        for node in later:
            if node.graph is saved.graph:
                _replay(node, saved)
        if in_backward := [node for node in later if node.graph is not saved.graph]:
            states.append((saved, in_backward))
    for taken, (_, later) in zip(
        hand_over(forward, backward, own, [state for state, _ in states]), states, strict=True
    ):
        for node in later:
            _replay(node, taken)


def _share_generator(fwd: fx.Node, bwd: fx.Node, count: int) -> None:
    """Make a random operator's two runs draw from two generators, which are new inputs of forward and of backward."""
    device = random_device(fwd)
    for node, prefix in ((fwd, "fwd"), (bwd, "bwd")):
        graph = node.graph
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            # AOTAutograd keeps both generators in lockstep, so both runs draw the same numbers.
            generator = graph.placeholder(f"{prefix}_rng_state_{count}")
            generator.meta["val"] = torch_compat.get_default_generator(device).clone_state()
        node.args = (node.target, *node.args)  # type: ignore[arg-type]
        node.kwargs = {**node.kwargs, "rng_state": generator}
        node.target = torch_compat.rng_prims.graphsafe_run_with_rng_state


def _use_graphsafe(nodes: list[fx.Node]) -> bool:
    """Return whether graph-safe generators, instead of saved generator states, replay the draws of ``nodes``."""
    config, inductor = torch_compat.functorch_config, torch_compat.inductor_config
    devices = {d for d in map(random_device, nodes) if torch_compat.supports_graphsafe_rng(d)}
    return (
        bool(config.graphsafe_rng_functionalization)
        and len(devices) == 1
        and (
            # This option asks for eager mode's numbers. Only a test configuration of Inductor combines both.
            not inductor.fallback_random
            or inductor.test_configs.graphsafe_rng_func_ignores_fallback_random
        )
    )


def _sample_state(node: fx.Node) -> torch.Tensor:
    """Return a CPU tensor with the size of a generator's state for the device of ``node``."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    with fake_mode_of(values) or contextlib.nullcontext():
        return torch.empty(state_bytes(node), dtype=torch.uint8, device="cpu")


def _provenance(node: fx.Node) -> dict[str, Any]:
    """Return the metadata that says where a node came from, without the node's fake value."""
    keys = (RUN_OF, "stack_trace", "seq_nr", "nn_module_stack", "partitioner_tag", "ac_graph_id")
    return {k: node.meta[k] for k in keys if k in node.meta}
