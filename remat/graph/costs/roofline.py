"""Model the time of an operator as the larger of its arithmetic time and its memory time.

In compiled code, values that a fusing compiler keeps in registers move no bytes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import fx

from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.costs.base import CostModel
from remat.graph.costs.calibration import calibrated
from remat.graph.costs.counting import SLOW, count_flops
from remat.graph.costs.devices import DEVICES, Device
from remat.graph.fusion import may_fuse, producer_of, readers_of
from remat.graph.memory.storages import tensor_bytes, tensors_of


@dataclass(frozen=True, slots=True)
class Roofline(CostModel):
    """Cost model that takes the larger of arithmetic time and memory time on a device, in picoseconds.

    For a collective, the cost is the largest of arithmetic time, memory time, and the time to send
    data to other ranks. The default device is an H100 even if the machine has another device, so
    that every machine makes the same plan.

    Attributes:
        device: rates of the device.
        source: TOML file that the device was read from; None for other devices.
    """

    device: Device = field(default_factory=lambda: DEVICES["h100"])
    source: str | None = None

    name: ClassVar[str] = "roofline"
    unit: ClassVar[str] = "ps"
    summary: ClassVar[str] = "max(operations / peak, bytes / bandwidth) of a device"

    @classmethod
    def parse(cls, argument: str | None) -> Self:
        """Build the model from ``h100``, ``cpu``, ``cuda:1``, ``here``, ``FILE.toml``, or None.

        None means ``h100``. ``cpu``, ``cuda:1`` and ``here`` are devices of this machine, which
        each process measures once, in about 1 s.

        Raises:
            ProblemError: the device is unknown, or the file is unusable.
        """
        if argument is None:
            return cls()
        if argument.endswith(".toml"):
            return cls(Device.from_toml(argument), argument)
        if argument in DEVICES:
            return cls(DEVICES[argument])
        if argument.partition(":")[0] in ("cpu", "cuda", "here"):
            return cls(calibrated(argument))
        raise ProblemError(
            f"cost model '{cls.name}:{argument}' names an unknown device; known: "
            f"{', '.join(DEVICES)}; or cpu, cuda, here to measure this machine, or a FILE.toml"
        )

    @classmethod
    def arguments(cls) -> Mapping[str, str]:
        return {
            **{d.name: d.label for d in DEVICES.values()},
            "cpu": "this machine's CPU, measured",
            "here": "this machine's GPU, or else its CPU, measured",
            "FILE.toml": "a device of your own",
        }

    def cost(self, node: fx.Node) -> int:
        """Return the modelled time of one run of a node in picoseconds, at least 1."""
        device = self.device
        arithmetic = count_flops(node) / device.flops_per_ps(_factor_dtype(node))
        for name, count in SLOW.items():
            if rate := getattr(device, name):
                arithmetic += count(node) / rate
        # 1 TB/s is one byte per picosecond, and 1 TFLOP/s one operation per picosecond.
        memory = self.moved_bytes(node) / device.memory_tbps
        sending = sent_bytes(node) / (device.ranks_tbps or device.memory_tbps)
        return max(1, math.ceil(max(arithmetic, memory, sending)))

    def moved_bytes(self, node: fx.Node) -> int:
        """Return the bytes of a node's result and of all its inputs, which one run writes and reads."""
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        return sum(map(tensor_bytes, values))

    def key(self) -> str:
        return f"{self} {self.device}"

    def __str__(self) -> str:
        return f"{self.name}:{self.source or self.device.name}"


@dataclass(frozen=True, slots=True)
class RooflineFused(Roofline):
    """Cost model in picoseconds, like `Roofline`, but values that pass between fused nodes move no bytes.

    A node costs ``max(operations / peak, external bytes / bandwidth)``, at least 1 ps. The external bytes of a node
    that may fuse (`may_fuse`) are the bytes that the node must read from memory or write to memory. A node must read
    the graph's inputs, and the results of nodes that do not fuse with it, such as products, convolutions, attention
    and custom operators. A node must write a result that the graph returns, that no node reads, or that is read by a
    node which does not fuse.

    A node that never fuses (a matrix product, for example) moves all its bytes, as under
    `Roofline`. For the same device, no node costs more than under `Roofline`.

    A node's cost must not depend on the plan, because the cost of a plan is the sum of node costs. Therefore the
    model assumes that every value between fused nodes stays in a register, although a plan may save the value and
    read it from memory. If several nodes read one value from memory, each node's cost includes its own read. Nodes of
    forward and nodes of backward are priced alike.
    """

    name: ClassVar[str] = "roofline-fused"
    summary: ClassVar[str] = "roofline; what a fusing compiler does not write to memory moves free"
    contextual: ClassVar[bool] = True

    def moved_bytes(self, node: fx.Node) -> int:
        """Return the bytes that one run of a node moves, without values that pass between fused neighbours."""
        if not may_fuse(node):
            return Roofline.moved_bytes(self, node)
        read = sum(
            tensor_bytes(n.meta.get("val"))
            for n in node.all_input_nodes
            if not fuse(node, producer_of(n))
        )
        value = node.meta.get("val")
        results = [node]
        if isinstance(value, (tuple, list)):
            results = [u for u in node.users if u.target is operator.getitem]
        return read + sum(tensor_bytes(r.meta.get("val")) for r in results if _is_written(node, r))


def _factor_dtype(node: fx.Node) -> torch.dtype:
    """Return the narrowest floating type that a node reads, which is the type of a product's factors."""
    read = [t.dtype for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))]
    floats = [dtype for dtype in read if dtype.is_floating_point]
    # The result may be wider: products of 8-bit floats return 16-bit ones. So may scales and states.
    return min(floats, key=operator.attrgetter("itemsize"), default=torch.float32)


def sent_bytes(node: fx.Node) -> int:
    """Return the bytes that a rank sends in a collective; 0 for other nodes."""
    if not ops.is_collective(node) or node.target is torch.ops._c10d_functional.wait_tensor.default:
        return 0
    read = sum(tensor_bytes(n.meta.get("val")) for n in node.all_input_nodes)
    # The number of ranks is unknown. In a ring of many ranks, a rank sends all gathered or scattered data once, and
    # all-reduced data twice.
    times = 2 if "all_reduce" in str(node.target) else 1
    # An all-gather returns more bytes than it reads, a reduce-scatter fewer.
    return times * max(read, tensor_bytes(node.meta.get("val")))


def _is_written(node: fx.Node, value: fx.Node) -> bool:
    """Return whether ``value``, which is ``node`` or an element of its tuple, must be written to memory."""
    readers = list(readers_of(value))
    return not readers or not all(fuse(node, reader) for reader in readers)


def fuse(a: fx.Node, b: fx.Node) -> bool:
    """Return whether a compiler may fuse two nodes, one of which reads the other, given their operators and devices."""
    return may_fuse(a) and may_fuse(b) and _device(a) == _device(b)


def _device(node: fx.Node) -> torch.device | None:
    return next((v.device for v in tensors_of(node.meta.get("val"))), None)
