"""The pass, and the analysis that it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.passes.core.base import Stage
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
class Layers(remat.Analysis[dict[str, tuple[int, ...]]]):
    """The operators of each layer of forward, by the layer's path, first layer first.

    Attributes:
        match: which modules are layers, as in file names: ``layers.*``, ``encoder.block.?``. Of
            modules within one another the outermost that matches counts.
    """

    name: ClassVar[str] = "layers"

    match: str = "*layers.*"

    def compute(self, state: State) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for i, node in enumerate(state.index.nodes):
            if node.op == "call_function" and state.roles.required_forward[i]:
                layer = self._layer(node.meta.get("nn_module_stack") or {})
                if layer is not None:
                    found.setdefault(layer, []).append(i)
        return {layer: tuple(positions) for layer, positions in found.items()}

    def _layer(self, stack: dict[str, tuple[str, type]]) -> str | None:
        for path, _ in stack.values():  # outermost first
            # Dynamo calls the model itself L['self'].
            name = path.partition("].")[2] or path
            if fnmatchcase(name, self.match):
                return name
        return None


@dataclass(frozen=True)
class CheckpointLayers(remat.Pass):
    """Tags what happens inside of layers for recomputation.

    Tags that are there already stay: a user who has said what to keep knows better.

    Attributes:
        match: as in `Layers`.
        keep_last: layers at the end that are left alone. Backward begins with them, so that nothing
            else lives while their values do.
    """

    name: ClassVar[str] = "checkpoint-layers"
    stage: ClassVar[Stage] = Stage.JOINT
    not_after: ClassVar[dict[str, str]] = {
        "cleanup-recompute-tags": "that pass keeps what one layer hands to the next, and would not "
        "see these tags",
    }

    match: str = "*layers.*"
    keep_last: int = 0

    def run(self, state: State) -> PassResult:
        layers = list(state.get(Layers(self.match)).values())
        nodes, tagged = state.index.nodes, 0
        # Asked before the edit begins; inside of it nothing may be asked. Tags move no node, so
        # whatever does not look at them still holds afterwards.
        with state.edit(
            preserves=(Positions, Classification, Distances, Memory, Costs, Layers)
        ) as edit:
            for region, layer in enumerate(layers[: max(0, len(layers) - self.keep_last)]):
                for node in (nodes[i] for i in layer):
                    if "recompute" not in node.meta:
                        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                        node.meta["ac_graph_id"] = region
                        tagged += 1
            return edit.result(f"{tagged} operators of {len(layers)} layers", tagged=tagged)
