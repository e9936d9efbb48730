"""Describe an operator call in a graph, and repeat the call on generated inputs for timing."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.costs.measure import this_device, with_index
from remat.graph.memory.storages import SYMBOLIC, extent_of, hint, tensor_bytes, tensors_of
from remat.torch_compat import pytree


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call of an operator on fake tensors, which is to be timed on real tensors.

    Attributes:
        target: the operator.
        args: positional arguments of the call, with fake tensors.
        kwargs: keyword arguments of the call, with fake tensors.
        override: device to move every tensor to; None keeps each tensor on its device.
        devices: the different devices of the call's real tensors.
        nbytes: bytes of the call's input tensors and of its result.
        refusal: why the call must not be run for timing; None if it may be run.
        key: the call as text. Calls with equal texts have equal costs on the same kind of device.
            The text has device types without indices, because each rank may use another index.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    override: torch.device | None
    devices: tuple[torch.device, ...]
    nbytes: int
    refusal: str | None
    key: str

    @property
    def device(self) -> torch.device:
        """Device that runs the call: the first of ``devices`` that is not a CPU, or else the CPU."""
        return _main(self.devices)


def request_of(node: fx.Node, override: torch.device | None = None) -> Request:
    """Return the operator call of a node as a `Request`; symbolic sizes become numbers (`hint`).

    Args:
        node: a ``call_function`` node.
        override: device that replaces the devices in the graph. None: keep each tensor's device,
            but replace the meta device by this machine's GPU, or by the CPU if there is no GPU.
    """
    refusal = _refusal(node)

    def value_of(x: Any) -> Any:
        nonlocal refusal
        if isinstance(x, fx.Node):
            if "val" not in x.meta:
                refusal = refusal or f"its argument '{x.name}' is no tensor or number"
                return str(x.target)
            return pytree.tree_map(value_of, x.meta["val"])
        if isinstance(x, torch.Tensor):
            if not _is_strided(x):
                refusal = refusal or f"it takes a tensor of layout {x.layout}"
            return x
        if isinstance(x, torch.SymInt):
            return hint(x)
        if isinstance(x, SYMBOLIC):
            if x.node.hint is None:
                refusal = refusal or "it takes a symbolic number that nothing is known about"
            return x.node.hint
        return _device_for(x, override) if isinstance(x, torch.device) else x

    args, kwargs = pytree.tree_map(value_of, (tuple(node.args), dict(node.kwargs)))
    read = list({id(v): v for v in tensors_of((args, kwargs))}.values())
    result = node.meta.get("val")
    devices = [_device_for(v.device, override) for v in (*read, *tensors_of(result))]
    number = {id(v): k for k, v in enumerate(read, start=1)}

    def text_of(x: Any) -> str:
        """Return an argument as text, in which the float 1.0 and the int 1 differ and floats have all their digits."""
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(map(text_of, x))}]"
        if isinstance(x, dict):
            return f"{{{', '.join(f'{k}: {text_of(v)}' for k, v in x.items())}}}"
        if isinstance(x, torch.Tensor):
            dtype, device = str(x.dtype).removeprefix("torch."), _device_for(x.device, override)
            return f"%{number[id(x)]}:{dtype}{[*_shape(x)]}/{[*_stride(x)]}@{device.type}"
        return x.type if isinstance(x, torch.device) else repr(x)

    written = [text_of(a) for a in args] + [f"{k}={text_of(v)}" for k, v in kwargs.items()]
    return Request(
        target=node.target,
        args=args,
        kwargs=kwargs,
        override=override,
        devices=tuple(dict.fromkeys(devices)),
        # `real_call` allocates the whole extent of an input, including gaps between its elements.
        nbytes=sum(extent_of(v) * v.dtype.itemsize for v in read) + tensor_bytes(result),
        refusal=refusal,
        key=f"{ops.text_of(node.target)}({', '.join(written)}) on {_main(devices).type}",
    )


def real_call(request: Request) -> functools.partial[Any]:
    """Return a function without arguments that runs a requested call on new real tensors."""
    tensors: dict[int, torch.Tensor] = {}

    def make(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in tensors:
            tensors[id(x)] = _real(x, _device_for(x.device, request.override), len(tensors) + 1)
        return tensors[id(x)]

    args, kwargs = pytree.tree_map(make, (request.args, request.kwargs))
    return functools.partial(request.target, *args, **kwargs)


def _real(like: torch.Tensor, device: torch.device, seed: int) -> torch.Tensor:
    """Return a real tensor with the sizes, strides and dtype of a fake tensor."""
    dtype, extent = like.dtype, extent_of(like)
    if dtype.is_floating_point or dtype.is_complex:
        generator = torch.Generator(device).manual_seed(seed)
        drawn_dtype = dtype if dtype.itemsize > 1 else torch.float32  # PyTorch cannot draw float8
        flat = torch.rand(extent, dtype=drawn_dtype, device=device, generator=generator).to(dtype)
    else:
        # An integer 0 is a valid index into any nonempty dimension, and False a valid mask.
        flat = torch.zeros(extent, dtype=dtype, device=device)
    return flat.as_strided(_shape(like), _stride(like))


def _device_for(device: torch.device, override: torch.device | None) -> torch.device:
    """Return the device on which to create the real tensor for a fake tensor on ``device``."""
    if override is not None:
        return override
    return this_device() if device.type == "meta" else with_index(device)


def _main(devices: Iterable[torch.device]) -> torch.device:
    """Return the device that runs a call: the first of its devices that is not a CPU, or else the CPU."""
    # An operator may read CPU scalars and still run on the accelerator.
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _is_strided(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(hint, value.shape))


def _stride(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(hint, value.stride())) if _is_strided(value) else (0,) * value.dim()


def _refusal(node: fx.Node) -> str | None:
    """Return why a node's operator must not be run for timing; None if it may be run."""
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
    if ops.reads_private_memory(target):
        return "it reads memory in a form that only its library knows"
    return None
