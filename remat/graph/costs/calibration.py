"""Measure the peak rates of this machine's devices, such as FLOP/s and memory bandwidth."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import gelu, max_pool2d

from remat.errors import ProblemError, first_line
from remat.graph.costs.devices import Device
from remat.graph.costs.measure import (
    describe_device,
    durations_ps,
    free_bytes,
    is_present,
    this_device,
    undisturbed,
    with_index,
)

#: Side lengths of the timed square matrix products, and the estimated time in seconds beyond which a product is
#: not timed.
_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_ENOUGH_S = 0.25
#: Bytes of the timed copy, more than any cache holds.
_COPY_BYTES = 128 * 2**20
#: Total seconds for the repeated runs of each timed call.
_RUNS_S = 0.04


def calibrate(device: str | torch.device = "here") -> Device:
    """Measure the peak rates (`Device`) of a device of this machine, in about 1 s.

    The function times matrix products in bfloat16 and float32, a copy, random numbers, GELU with
    tanh, and max pooling. Each measured rate is that of the fastest run. Products of float32 use the
    precision set with `torch.set_float32_matmul_precision`.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"here"``. ``"here"`` means the current CUDA
            device, or the CPU on a machine without CUDA.

    Raises:
        ProblemError: the machine has no such device.
    """
    target = _resolve(device)
    with undisturbed(target):
        half_precision, single = (
            _tflops(target, dtype) for dtype in (torch.bfloat16, torch.float32)
        )
        return Device(
            name=str(target),
            label=f"{describe_device(target)}, measured",
            half_tflops=half_precision,
            single_tflops=single,
            memory_tbps=_tbps(target),
            draws_tops=_per_ps(torch.rand_like, target),
            tanh_tops=_per_ps(functools.partial(gelu, approximate="tanh"), target),
            pooled_tops=_pooled_per_ps(target),
        )


def calibrated(device: str | torch.device = "here") -> Device:
    """Return the measured rates (`calibrate`) of a device of this machine; a process measures a device once."""
    return _calibrated(str(_resolve(device)))


_calibrated = functools.cache(calibrate)


def _resolve(device: str | torch.device) -> torch.device:
    """Return the device that the argument of `calibrate` names."""
    if device == "here":
        return this_device()
    try:
        resolved = with_index(torch.device(device))
    except RuntimeError as error:
        raise ProblemError(
            f"'{device}' is no device: {first_line(error)}; expected cpu, cuda or here"
        ) from error
    if not is_present(resolved):
        raise ProblemError(
            f"device '{device}' is not here to be measured; this machine has '{this_device()}'. "
            "Measure where it is and share the file: remat.graph.costs.calibrate('here')"
            ".to_toml('mine.toml'), then 'roofline:mine.toml'"
        )
    return resolved


def _tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the best rate of square matrix products of several sizes, in TFLOP/s."""
    best = 0.0
    generator = torch.Generator(device).manual_seed(0)
    for side in _SIDES:
        # The first product is always timed. The three matrices of a later product must fit into a
        # quarter of the free memory.
        if 3 * side**2 * dtype.itemsize > free_bytes(device) // 4 and best:
            break
        a, b = (
            torch.rand(side, side, dtype=dtype, device=device, generator=generator)
            for _ in range(2)
        )
        out = torch.empty(side, side, dtype=dtype, device=device)
        fastest_ps = _fastest_ps(functools.partial(torch.mm, a, b, out=out), device)
        best = max(best, 2 * side**3 / fastest_ps)
        # The next side is twice as long, so its product takes 8 times as long.
        if 8 * fastest_ps > _ENOUGH_S * 1e12:
            break
    return best


def _tbps(device: torch.device) -> float:
    """Measure the memory bandwidth of a copy in TB/s, as the sum of bytes read and bytes written."""
    count = max(2**20, min(_COPY_BYTES, free_bytes(device) // 8))
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / _fastest_ps(functools.partial(target.copy_, source), device)


def _pooled_per_ps(device: torch.device) -> float:
    """Measure how many elements max-pooling windows read per picosecond."""
    x, window = torch.ones(16, 32, 48, 48, device=device), 3
    # With stride 2 in two dimensions, there is one window for four elements.
    count = x.numel() // 4 * window**2
    run = functools.partial(max_pool2d, x, window, stride=2, padding=1)
    return count / _fastest_ps(run, device)


def _per_ps(elementwise: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> float:
    """Measure how many elements an elementwise operator computes per picosecond."""
    x = torch.ones(2**20, device=device)
    return x.numel() / _fastest_ps(functools.partial(elementwise, x), device)


def _fastest_ps(run: functools.partial[torch.Tensor], device: torch.device) -> int:
    """Return the duration of the fastest of several runs, in picoseconds."""
    return max(1, min(durations_ps(run, device, seconds=_RUNS_S, most=10)))
