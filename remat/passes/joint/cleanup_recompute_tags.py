"""Pass that corrects the tags at the ends of checkpointed regions before partitioning.

Values get the tag MUST_SAVE by the rules of ``cleanup_recompute_tags`` in PyTorch's
``torch/_functorch/partitioners.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.graph.policies import TAGGED_BY
from remat.graph.problems.lowering import must_recompute
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import (
    Classification,
    Costs,
    Distances,
    Memory,
    PassResult,
    Positions,
    State,
)


@dataclass(frozen=True)
class CleanupRecomputeTags(Pass):
    """Correct the tags of values at the boundaries of checkpointed regions, and of values copied into inputs.

    Results of regions that later regions read, results with a backward hook, and values that forward copies into inputs
    get the tag MUST_SAVE. A value that plain checkpointing tagged loses its tag if backward reads it, and forward reads
    it outside of all regions.
    """

    name: ClassVar[str] = "cleanup-recompute-tags"
    stage: ClassVar[Stage] = Stage.JOINT
    optional: ClassVar[bool] = False

    def run(self, state: State) -> PassResult:
        marked: dict[fx.Node, CheckpointPolicy | None] = dict.fromkeys(_read_outside(state))
        marked |= dict.fromkeys(_boundaries(state.joint.graph), CheckpointPolicy.MUST_SAVE)
        # A tag changes what may be recomputed, but no node, role, storage or cost.
        with state.edit(preserves=(Positions, Classification, Distances, Memory, Costs)) as edit:
            for node, tag in marked.items():
                node.meta["recompute"] = tag
                node.meta.pop(TAGGED_BY, None)
            return edit.result(f"{len(marked)} nodes retagged", retagged=len(marked))


def _boundaries(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that `CleanupRecomputeTags` tags as MUST_SAVE."""
    boundaries: list[fx.Node] = []
    mutated_in_backward: set[fx.Node] = set()
    sources: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        where = node.meta.get("partitioner_tag")
        if where == "must_be_in_backward":
            mutated_in_backward.add(node.args[0])
        elif isinstance(node.args[1], fx.Node):
            sources.append((node.args[0], node.args[1]))
    for node in graph.nodes:
        if node.meta.get("recompute") is None or not must_recompute(node):
            continue
        # Without MUST_SAVE, consecutive regions would be recomputed as one region. FSDP2 sets backward hooks:
        # recomputing the result would wait for the hook, which waits for a gradient that needs the result.
        if _feeds_later_region(node) or (
            node.meta.get("has_backward_hook", False) and not any(map(must_recompute, node.users))
        ):
            boundaries.append(node)
    # As `force_save_bw_mutation_src` in PyTorch: a recomputed source would apply the mutation twice.
    boundaries += [
        source
        for target, source in sources
        if target in mutated_in_backward and source.op == "call_function"
    ]
    return boundaries


def _feeds_later_region(node: fx.Node) -> bool:
    """Return whether a later checkpointed region has a node that is tagged for recomputation and reads ``node``."""
    region = node.meta.get("ac_graph_id")
    return region is not None and any(
        must_recompute(user) and user.meta.get("ac_graph_id", region) > region
        for user in node.users
    )


def _read_outside(state: State) -> set[fx.Node]:
    """Return the nodes tagged PREFER_RECOMPUTE that backward reads, and that forward reads outside of all regions."""
    index, owner, in_forward = state.index, state.storages.owner, state.roles.required_forward
    tagged = {
        i
        for i, node in enumerate(index.nodes)
        if node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE
    }
    outside: set[int] = set()
    backward: set[int] = set()
    for u, node in enumerate(index.nodes) if tagged else ():
        if node.op == "call_function":
            # Reading a view reads the node that owns the storage.
            read = tagged.intersection(owner[j] for j in index.inputs[u])
            if not in_forward[u]:
                backward |= read
            elif "ac_graph_id" not in node.meta:
                outside |= read
    # Without a tag, such a result may be saved, as in eager PyTorch. Otherwise the region might have to run again long
    # before its own backward, and the recomputed values of the region would stay alive until that backward.
    return {index.nodes[i] for i in outside & backward}
