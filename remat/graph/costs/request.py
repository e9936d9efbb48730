"""One distinct call of an operator, as plain data: what to run, on inputs of what kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.costs.measure import this_device, whole
from remat.graph.storages import hint, tensor_bytes, tensors_of
from remat.torch_compat import pytree


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor to be made up. Arguments that are the same tensor have the same ``number``."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def extent(self) -> int:
        """Elements from the first to the last that the tensor reaches."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape, stride = list(self.shape), list(self.stride)
        return f"%{self.number}:{dtype}{shape}/{stride}@{self.device.type}"

    __repr__ = __str__  # lists of tensors print their elements so


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call of an operator on tensors that are described.

    Attributes:
        target: the operator.
        args: its arguments, tensors as `TensorSpec`.
        kwargs: its keyword arguments.
        device: where it runs.
        devices: all devices that its tensors are on.
        nbytes: bytes of its tensors and of its result.
        refusal: why it must not be run, or None.
        key: the call in text; equal for calls that cost the same. Devices stand in it without their
            numbers, as every rank has its own.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    devices: tuple[torch.device, ...]
    nbytes: int
    refusal: str | None
    key: str


def request_of(node: fx.Node, override: torch.device | None = None) -> Request:
    """The call that a node makes, symbolic sizes by their hint, 4096 without one.

    Args:
        node: a ``call_function`` node.
        override: put every tensor on this device, whatever the graph says. Tensors on the meta
            device go to this machine's GPU, or else its CPU.
    """
    refusal = _refusal(node)
    specs: list[TensorSpec] = []
    described: dict[fx.Node, Any] = {}

    def place(device: torch.device) -> torch.device:
        if override is not None:
            return override
        return this_device() if device.type == "meta" else whole(device)

    def describe(x: Any) -> Any:
        nonlocal refusal
        if isinstance(x, fx.Node):
            if "val" not in x.meta:
                refusal = refusal or f"its argument '{x.name}' is no tensor or number"
                return str(x.target)
            if x not in described:
                described[x] = pytree.tree_map(describe, x.meta["val"])
            return described[x]
        if isinstance(x, torch.Tensor):
            strided = x.layout is torch.strided and not x.is_quantized
            if not strided:
                refusal = refusal or f"it takes a tensor of layout {x.layout}"
            spec = TensorSpec(
                number=len(specs) + 1,
                shape=tuple(map(hint, x.shape)),
                stride=tuple(map(hint, x.stride())) if strided else (0,) * x.dim(),
                dtype=x.dtype,
                device=place(x.device),
            )
            specs.append(spec)
            return spec
        if isinstance(x, torch.SymInt):
            return hint(x)
        if isinstance(x, (torch.SymFloat, torch.SymBool)):
            if x.node.hint is None:
                refusal = refusal or "it takes a symbolic number that nothing is known about"
            return x.node.hint
        return place(x) if isinstance(x, torch.device) else x

    args, kwargs = pytree.tree_map(describe, (tuple(node.args), dict(node.kwargs)))
    results = [place(v.device) for v in tensors_of(node.meta.get("val"))]
    devices = list(dict.fromkeys([*(s.device for s in specs), *results]))
    main = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    written = [_text_of(a) for a in args] + [f"{k}={_text_of(v)}" for k, v in kwargs.items()]
    return Request(
        target=node.target,
        args=args,
        kwargs=kwargs,
        device=main,
        devices=tuple(devices),
        nbytes=sum(s.extent * s.dtype.itemsize for s in specs) + tensor_bytes(node.meta.get("val")),
        refusal=refusal,
        key=f"{ops.text_of(node.target)}({', '.join(written)}) on {main.type}",
    )


def with_inputs(request: Request) -> Request:
    """The request with tensors in place of their descriptions: random numbers, zeros for integers.

    Zero is a valid index into anything, and a mask of False is a valid mask.
    """
    made: dict[int, torch.Tensor] = {}

    def make(x: Any) -> Any:
        if not isinstance(x, TensorSpec):
            return x
        if x.number not in made:
            made[x.number] = _tensor(x)
        return made[x.number]

    args, kwargs = pytree.tree_map(make, (request.args, request.kwargs))
    return dataclasses.replace(request, args=args, kwargs=kwargs)


def _tensor(spec: TensorSpec) -> torch.Tensor:
    dtype = spec.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        flat = torch.zeros(spec.extent, dtype=dtype, device=spec.device)
        return flat.as_strided(spec.shape, spec.stride)
    generator = torch.Generator(spec.device).manual_seed(spec.number)
    drawn = dtype if dtype.itemsize > 1 else torch.float32  # nothing draws float8
    flat = torch.rand(spec.extent, dtype=drawn, device=spec.device, generator=generator)
    return flat.to(dtype).as_strided(spec.shape, spec.stride)


def _refusal(node: fx.Node) -> str | None:
    """Why a node must not be run to be timed, whatever its arguments."""
    target: Any = node.target
    if isinstance(target, torch_compat.HigherOrderOperator):
        if str(target).startswith("triton_kernel_wrapper"):
            return None
        return "higher-order operators have no kernel of their own"
    if ops.is_collective(node):
        return "collectives need every rank"
    if (ops.is_effectful(node) and not ops.is_mutating(node)) or (
        isinstance(target, torch_compat.OpOverload) and torch_compat.get_effect(target) is not None
    ):
        return "it has effects beyond its result"
    return None


def _text_of(x: Any) -> str:
    """An argument in text; floats by all their digits, and written from ints."""
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_text_of, x))}]"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{k}: {_text_of(v)}' for k, v in x.items())}}}"
    if isinstance(x, torch.device):
        return x.type
    return str(x) if isinstance(x, TensorSpec) else repr(x)
