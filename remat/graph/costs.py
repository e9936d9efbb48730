"""What it costs to run a node once: cost models with plain integer results.

A model is a frozen value with a name, a unit and one method. Views, tuple elements, sizes and
constants cost nothing under any model: the callers here never ask a model about them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.storages import Storages, hint, tensor_bytes


class CostModel:
    """Base of cost models; plugins subclass it and hand the class over in `remat_cost_models`.

    Attributes:
        name: what the model is called in ``cost="name"``; an argument may follow a colon.
        unit: unit of the results.
        summary: one line for ``remat costs``.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    summary: ClassVar[str] = ""

    @classmethod
    def parse(cls, argument: str | None) -> CostModel:
        """Builds the model from the text behind the colon, None where there is none."""
        if argument is not None:
            raise ProblemError(
                f"cost model '{cls.name}' takes no argument, got '{argument}'; write '{cls.name}'"
            )
        return cls()

    def cost(self, node: fx.Node) -> int:
        """Cost of running ``node`` once, in `unit`: 0 or more.

        Args:
            node: a ``call_function`` node whose inputs and result carry ``meta["val"]``.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Unit(CostModel):
    """Every operator costs 1."""

    name: ClassVar[str] = "unit"
    unit: ClassVar[str] = "op"
    summary: ClassVar[str] = "1 for every operator"

    def cost(self, node: fx.Node) -> int:
        return 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Flops(CostModel):
    """Floating-point operations by PyTorch's own formulas, at least 1 per operator."""

    name: ClassVar[str] = "flops"
    unit: ClassVar[str] = "FLOP"
    summary: ClassVar[str] = (
        "floating-point operations of products, convolutions, attention; else 1"
    )

    def cost(self, node: fx.Node) -> int:
        return max(1, count_flops(node))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peak rates of a device (dense, vendors' data sheets).

    Attributes:
        name: key in `DEVICES`.
        label: name in tables.
        half_tflops: peak of bfloat16 and float16 matrix products, TFLOP/s.
        single_tflops: peak of float32 matrix products (TF32 where there is one), TFLOP/s.
        memory_tbps: memory bandwidth, TB/s.
    """

    name: str
    label: str
    half_tflops: float
    single_tflops: float
    memory_tbps: float

    def flops_per_ps(self, dtype: torch.dtype) -> float:
        """Operations per picosecond, which is the number of TFLOP/s."""
        if dtype in (torch.bfloat16, torch.float16):
            return self.half_tflops
        if dtype.is_floating_point and dtype.itemsize == 1:
            return 2 * self.half_tflops
        if dtype is torch.float64:
            return self.single_tflops / 8
        return self.single_tflops


DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        Device(name="a100", label="A100 SXM 80GB", half_tflops=312, single_tflops=156, memory_tbps=2.039),
        Device(name="h100", label="H100 SXM", half_tflops=989, single_tflops=495, memory_tbps=3.35),
        Device(name="h200", label="H200 SXM", half_tflops=989, single_tflops=495, memory_tbps=4.8),
        Device(name="b200", label="B200 (HGX)", half_tflops=2250, single_tflops=1125, memory_tbps=8.0),
        Device(name="mi300x", label="MI300X", half_tflops=1307, single_tflops=654, memory_tbps=5.3),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Roofline(CostModel):
    """The larger of arithmetic time and memory time on a device, in picoseconds.

    The device defaults to an H100 whatever machine plans, so that every machine plans alike.
    """

    device: Device = field(default_factory=lambda: DEVICES["h100"])

    name: ClassVar[str] = "roofline"
    unit: ClassVar[str] = "ps"
    summary: ClassVar[str] = "max(operations / peak, bytes / bandwidth) of a device: " + ", ".join(
        DEVICES
    )

    @classmethod
    def parse(cls, argument: str | None) -> Roofline:
        if argument is None:
            return cls()
        if argument not in DEVICES:
            raise ProblemError(
                f"cost model 'roofline:{argument}' names an unknown device; known: {', '.join(DEVICES)}"
            )
        return cls(DEVICES[argument])

    def cost(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
        dtype = tensors[0].dtype if tensors else torch.float32
        moved = tensor_bytes(value) + sum(
            tensor_bytes(n.meta.get("val")) for n in node.all_input_nodes
        )
        # 1 TB/s is one byte per picosecond.
        arithmetic = count_flops(node) / self.device.flops_per_ps(dtype)
        return max(1, math.ceil(max(arithmetic, moved / self.device.memory_tbps)))

    def __str__(self) -> str:
        return f"{self.name}:{self.device.name}"


def builtin_cost_models() -> list[type[CostModel]]:
    """Our own cost models, in the order in which they are listed."""
    return [Roofline, Flops, Unit]


def count_flops(node: fx.Node) -> int:
    """Floating-point operations of one run of a node; 0 for what PyTorch has no formula for."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(ops.packet(node.target))
    if formula is None:
        return 0

    def shape(x: Any) -> Any:
        value = x.meta.get("val") if isinstance(x, fx.Node) else x
        if isinstance(value, torch.Tensor):
            return torch.Size([hint(s) for s in value.shape])
        return hint(value) if isinstance(value, torch.SymInt) else value

    args, kwargs = pytree.tree_map(shape, (node.args, node.kwargs))
    out = pytree.tree_map(shape, node.meta.get("val"))
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except (AssertionError, RuntimeError, NotImplementedError, TypeError, IndexError):
        return 0  # shapes that the formula does not cover; memory time still counts


def node_costs(index: GraphIndex, storages: Storages, model: CostModel) -> list[int]:
    """Cost of every node of a graph; identical calls are asked for once.

    Raises:
        ProblemError: the model answers with something that is no finite number of 0 or more.
    """
    known: dict[Any, int] = {}
    costs = [0] * len(index)
    for i, node in enumerate(index.nodes):
        if node.op != "call_function" or _is_free(index, storages, i):
            continue
        key = _signature(node)
        if key not in known:
            known[key] = _checked(model, node)
        costs[i] = known[key]
    return costs


def _is_free(index: GraphIndex, storages: Storages, i: int) -> bool:
    """Views, elements of tuples, and arithmetic on sizes."""
    node = index.nodes[i]
    if storages.owner[i] != i or getattr(node.target, "__name__", "") == "getitem":
        return True
    value = node.meta.get("val")
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _signature(node: fx.Node) -> Any:
    """What a model may look at: the operator, its constants, and the shapes it is given."""
    return (node.target, _describe(node.args), _describe(node.kwargs) if node.kwargs else None)


def _describe(x: Any) -> Any:
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    if isinstance(value, torch.Tensor):
        shape = value.shape
        symbolic = not all(type(s) is int for s in shape)
        return (str(shape) if symbolic else shape, value.dtype, value.device)
    if isinstance(value, (tuple, list)):
        return tuple(map(_describe, value))
    return repr(value)


def _checked(model: CostModel, node: fx.Node) -> int:
    cost = model.cost(node)
    if (
        isinstance(cost, bool)
        or not isinstance(cost, (int, float))
        or not math.isfinite(cost)
        or cost < 0
    ):
        raise ProblemError(
            f"cost model '{model}' says that '{node.name}' ({node.target}) costs {cost!r}; "
            "expected a finite number of 0 or more"
        )
    return math.ceil(cost)
