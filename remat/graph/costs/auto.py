"""The default cost model: which one it is depends on the lowering, and on where a step really runs."""

from __future__ import annotations

from collections.abc import Mapping
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

#: What the argument names, with the presets of the devices that a graph may run on; more are an H100's.
_HERE = "tensors"
_PRESETS = {"cpu": "epyc"}


@dataclass(frozen=True, slots=True)
class Auto(CostModel):
    """``roofline-fused`` where Inductor compiles the step, ``roofline`` where its graphs run as they are.

    Attributes:
        by_tensors: whether the device is that of the step's tensors, as a step that is being compiled has them;
            if not, an H100: a step that is only planned may run anywhere.
    """

    by_tensors: bool = False

    name: ClassVar[str] = "auto"
    unit: ClassVar[str] = Roofline.unit
    summary: ClassVar[str] = (
        "the default: the time of fused kernels (roofline-fused) where Inductor compiles the step, of single "
        "operators (roofline) where its graphs run as they are; on an H100 if only planned, else where it runs"
    )

    @classmethod
    def parse(cls, argument: str | None) -> Self:
        """Reads nothing, or ``tensors``.

        Raises:
            ProblemError: anything else.
        """
        if argument not in (None, _HERE):
            raise ProblemError(
                f"cost model '{cls.name}:{argument}' is not known; '{cls.name}' plans for an H100, "
                f"'{cls.name}:{_HERE}' for the device of the tensors; 'roofline-fused:{argument}' may name another"
            )
        return cls(argument is not None)

    @classmethod
    def arguments(cls) -> Mapping[str, str]:
        return {_HERE: "for the kind of device that the tensors are on; else for an H100"}

    def on(self, joint: JointGraph) -> CostModel:
        """The model for one graph."""
        kind = RooflineFused if joint.lower == "inductor" else Roofline
        return kind(DEVICES[preset_of(device_type_of(joint) if self.by_tensors else "")])

    def cost(self, node: fx.Node) -> int:
        """Of a node of no graph in particular: that of `Roofline`."""
        return Roofline().cost(node)

    def __str__(self) -> str:
        return f"{self.name}:{_HERE}" if self.by_tensors else self.name


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
