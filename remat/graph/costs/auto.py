"""The default cost model, which depends on the lowering and on the device of the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import fx

from remat.errors import ProblemError
from remat.graph.costs.base import CostModel
from remat.graph.costs.devices import DEVICES, Device
from remat.graph.costs.profile import Profile
from remat.graph.costs.roofline import Roofline, RooflineFused
from remat.graph.joint import JointGraph

#: Name of the preset in `DEVICES` for each device type. Device types without an entry use the H100's preset.
_PRESETS = {"cpu": "epyc"}


@dataclass(frozen=True, slots=True)
class Auto(CostModel):
    """Default cost model: ``roofline-fused`` for steps compiled by Inductor, ``roofline`` for other steps.

    ``roofline-fused`` and ``roofline`` use the preset rates for the device type of the step's tensors.
    """

    name: ClassVar[str] = "auto"
    unit: ClassVar[str] = Roofline.unit
    summary: ClassVar[str] = (
        "the default: roofline-fused if Inductor compiles the step, else roofline; for the tensors' device"
    )

    @classmethod
    def parse(cls, argument: str | None) -> Self:
        """Return the default cost model; raise `ProblemError` if an argument is given."""
        if argument is not None:
            raise ProblemError(
                f"cost model '{cls.name}:{argument}' is not known; '{cls.name}' is for the device of the tensors; "
                f"'roofline-fused:{argument}' may name another"
            )
        return cls()

    def for_graph(self, joint: JointGraph) -> CostModel:
        """Return `RooflineFused` for a graph lowered for Inductor, `Roofline` for other graphs."""
        kind = RooflineFused if joint.lower == "inductor" else Roofline
        return kind(DEVICES[_PRESETS.get(device_type_of(joint), "h100")])

    def cost(self, node: fx.Node) -> int:
        """Return the cost of a node under `Roofline` on an H100, in picoseconds."""
        # A node alone does not tell whether Inductor compiles its graph; `for_graph` knows the graph.
        return Roofline().cost(node)


def is_for_cpu(cost: CostModel) -> bool:
    """Return whether a cost model estimates or measures times on a CPU; True for `Profile` without a device."""
    # Without a named device, `Profile` runs operators on the device of their tensors, possibly a CPU.
    if isinstance(cost, Profile):
        return cost.device is None or cost.device.startswith("cpu")
    device = getattr(cost, "device", None)
    return isinstance(device, Device) and is_cpu(device)


def is_cpu(device: Device) -> bool:
    """Return whether a device is a CPU, whose rates come from a preset or from a measurement on this machine."""
    return device.name.startswith("cpu") or device.name == _PRESETS["cpu"]


def device_type_of(joint: JointGraph) -> str:
    """Return the device type of most input tensors of a graph, such as ``"cuda"``; empty without input tensors."""
    values = [n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder")]
    types = [v.device.type for v in values if isinstance(v, torch.Tensor)]
    return max(types, key=types.count, default="")
