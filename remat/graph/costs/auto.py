"""The default cost model: which one it is depends on the lowering, and on where the tensors are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import fx

from remat.errors import ProblemError
from remat.graph.costs.base import CostModel
from remat.graph.costs.devices import DEVICES, Device
from remat.graph.costs.fused import RooflineFused
from remat.graph.costs.profile import Profile
from remat.graph.costs.roofline import Roofline
from remat.graph.joint import JointGraph

#: The presets that stand for types of devices; any other type is planned for as an H100.
_PRESETS = {"cpu": "epyc"}


@dataclass(frozen=True, slots=True)
class Auto(CostModel):
    """``roofline-fused`` if Inductor compiles the step, ``roofline`` if its graphs run as they are.

    Both are for the kind of device that the step's tensors are on.
    """

    name: ClassVar[str] = "auto"
    unit: ClassVar[str] = Roofline.unit
    summary: ClassVar[str] = (
        "the default: the time of fused kernels (roofline-fused) if Inductor compiles the step, of single operators "
        "(roofline) if its graphs run as they are, on the kind of device that the tensors are on"
    )

    @classmethod
    def parse(cls, argument: str | None) -> Self:
        """Reads nothing.

        Raises:
            ProblemError: there is an argument.
        """
        if argument is not None:
            raise ProblemError(
                f"cost model '{cls.name}:{argument}' is not known; '{cls.name}' is for the device of the tensors; "
                f"'roofline-fused:{argument}' may name another"
            )
        return cls()

    def on(self, joint: JointGraph) -> CostModel:
        """The model for one graph."""
        kind = RooflineFused if joint.lower == "inductor" else Roofline
        return kind(DEVICES[preset_of(device_type_of(joint))])

    def cost(self, node: fx.Node) -> int:
        """Of a node of no graph in particular: that of `Roofline`."""
        return Roofline().cost(node)

    def __str__(self) -> str:
        return self.name


def preset_of(device_type: str) -> str:
    """The preset whose rates stand for a type of device."""
    return _PRESETS.get(device_type, "h100")


def is_for_cpu(cost: CostModel) -> bool:
    """Whether a cost model is for a CPU. One that names no device is not."""
    if isinstance(cost, Profile):  # by itself it runs operators where the tensors are
        return cost.device is None or cost.device.startswith("cpu")
    device = getattr(cost, "device", None)
    return isinstance(device, Device) and is_cpu(device)


def is_cpu(device: Device) -> bool:
    """Whether a device is a CPU: a preset, or this machine's, measured."""
    return device.name.startswith("cpu") or device.name == preset_of("cpu")


def device_type_of(joint: JointGraph) -> str:
    """The type of device that most inputs of a graph are on."""
    values = [n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder")]
    types = [v.device.type for v in values if isinstance(v, torch.Tensor)]
    return max(types, key=types.count, default="")
