"""Tags of checkpointed regions made ready for partitioning.

As ``cleanup_recompute_tags`` in PyTorch's ``torch/_functorch/partitioners.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.graph.lowering import must_recompute
from remat.passes.core.analyses import Distances
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import Classification, Costs, Memory, PassResult, Positions, State


@dataclass(frozen=True)
class CleanupRecomputeTags(Pass):
    """Keeps the boundaries between checkpointed regions, and what backward's mutations need.

    MUST_SAVE is set on:

    - a node to be recomputed that feeds a later region; without it, two regions in a row would be
      recomputed as one;
    - the result of a region that carries a backward hook: its recomputation would wait for itself;
    - what forward writes to an input that backward writes to as well.
    """

    name: ClassVar[str] = "cleanup-recompute-tags"
    stage: ClassVar[Stage] = Stage.JOINT
    optional: ClassVar[bool] = False
    summary: ClassVar[str] = "keep the boundaries between checkpointed regions"

    def run(self, state: State) -> PassResult:
        found = _boundaries(state.joint.graph)
        with state.edit(preserves=(Positions, Classification, Distances, Memory, Costs)) as edit:
            for node in found:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            return edit.result(f"{len(found)} nodes retagged", retagged=len(found))


def _boundaries(graph: fx.Graph) -> list[fx.Node]:
    found: list[fx.Node] = []
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
        if _feeds_later_region(node) or (
            node.meta.get("has_backward_hook", False) and not any(map(must_recompute, node.users))
        ):
            found.append(node)
    found += [
        source
        for target, source in sources
        if target in mutated_in_backward and source.op == "call_function"
    ]
    return found


def _feeds_later_region(node: fx.Node) -> bool:
    region = node.meta.get("ac_graph_id")
    return region is not None and any(
        must_recompute(user) and user.meta.get("ac_graph_id", region) > region
        for user in node.users
    )
