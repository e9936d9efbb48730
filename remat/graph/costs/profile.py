"""Cost model that runs and times every distinct operator call, and stores the times on disk."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from remat.errors import ProblemError, summary
from remat.graph.costs.base import CostModel, report
from remat.graph.costs.calibration import calibrated
from remat.graph.costs.measure import (
    describe_device,
    durations_ps,
    free_bytes,
    is_present,
    this_device,
    undisturbed,
    with_index,
)
from remat.graph.costs.request import Request, real_call, request_of
from remat.graph.costs.roofline import Roofline
from remat.graph.costs.store import Place, Store, cache_path, store
from remat.units import format_bytes

#: Total seconds for the repeated runs of one call.
_RUNS_S = 0.05


@dataclass(frozen=True, slots=True)
class Profile(CostModel):
    """Cost model that measures the median time of each distinct call, in picoseconds.

    A call is an operator with its constants and the shapes, strides, dtypes and devices of its
    tensors. The model runs each call alone in eager PyTorch on generated tensors. The user's tensors
    and the states of random generators stay unchanged. On a CPU, the time includes PyTorch's own
    overhead of a few microseconds.

    Times are stored on disk, separately for each PyTorch version, device, number of CPU threads and
    precision of float32 products. If several processes measure one call, all use the measurement
    that reached the disk first.

    Some calls are not measured: collectives, higher-order operators, and operators with effects beyond their result.
    Other calls cannot run: they need over half of the free memory, raise an error, or lack their device. A call
    without a measured time gets its cost from `Roofline`. For this cost, `Roofline` uses the measured rates of the
    call's device, or those of an H100 if the device is missing. `fallbacks` lists the calls without a measured time.

    Attributes:
        device: device to run every call on; None means the device of the call's tensors.
    """

    device: str | None = None

    name: ClassVar[str] = "profile"
    unit: ClassVar[str] = "ps"
    summary: ClassVar[str] = "really runs each distinct call; times are kept on disk"

    @classmethod
    def parse(cls, argument: str | None) -> Profile:
        """Build the model from ``cpu``, ``cuda``, ``cuda:1``, or None for the tensors' own devices.

        Raises:
            ProblemError: the machine does not have the device.
        """
        if argument is None:
            return cls()
        try:
            present = is_present(torch.device(argument))
        except RuntimeError:
            present = False
        if not present:
            raise ProblemError(
                f"cost model 'profile:{argument}' names no device that is here; this machine has "
                f"'{this_device()}': write 'profile:{this_device().type}', or 'profile' to run "
                "every operator where its tensors are"
            )
        return cls(argument)

    @classmethod
    def arguments(cls) -> Mapping[str, str]:
        return {
            "cpu": "run everything on the CPU",
            "cuda": "run everything on the current CUDA device",
        }

    def cost(self, node: fx.Node) -> int:
        """Return the measured time of one run of a node in picoseconds, at least 1."""
        return self.costs([node])[0]

    def costs(self, nodes: Sequence[fx.Node]) -> list[int]:
        """Return the time of each call in picoseconds; measure and store unknown times."""
        cache = store(cache_path())
        requests = [self._request(n) for n in nodes]
        places = list(map(_place, requests))
        if any(map(cache.lacks, places)):
            # Another process may have measured these calls since the file was read.
            cache.merge({})
        missing = {p: r for p, r in zip(places, requests, strict=True) if cache.lacks(p)}
        _measure_all(cache, missing)
        return [
            cache.times.get(place) or _fallback(request).cost(node)
            for node, request, place in zip(nodes, requests, places, strict=True)
        ]

    def fallbacks(self, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
        """Describe the calls that were not measured, with the reason and the model used instead."""
        cache = store(cache_path())
        if not cache.unmeasured:
            return ()
        lines: dict[str, None] = {}
        for request in (self._request(n) for n in nodes if n.op == "call_function"):
            place = _place(request)
            if place in cache.unmeasured and place not in cache.times:
                why = f"{cache.unmeasured[place]}; cost by {_fallback(request)}"
                lines[f"{request.key}: {why}"] = None
        return tuple(lines)

    def key(self) -> str:
        return f"{self} {_environment(self._device() or this_device())}"

    def _request(self, node: fx.Node) -> Request:
        return request_of(node, self._device())

    def _device(self) -> torch.device | None:
        return None if self.device is None else with_index(torch.device(self.device))

    def __str__(self) -> str:
        return self.name if self.device is None else f"{self.name}:{self.device}"


def _measure_all(cache: Store, missing: Mapping[Place, Request]) -> None:
    """Measure the calls whose times a store lacks, and store the times."""
    for done, (place, request) in enumerate(missing.items(), start=1):
        report(f"timing {done} of {len(missing)} operators: {request.target}")
        result = _measure(request)
        if isinstance(result, str):
            cache.unmeasured[place] = result
        else:
            # Written one by one, so that an interruption loses no measurement.
            cache.merge({place: result})
    if missing:
        report("planning")


def _measure(request: Request) -> int | str:
    """Return the median time of a call in picoseconds, or the reason why it could not run."""
    if request.refusal is not None:
        return request.refusal
    for device in request.devices:
        if not is_present(device):
            return f"device {device} is not here"
    allowed = free_bytes(request.device) // 2
    if request.nbytes > allowed:
        needed, limit = format_bytes(request.nbytes), format_bytes(allowed)
        return f"it takes {needed}, and half of the free memory is {limit}"
    try:
        with undisturbed(request.device):
            times = durations_ps(real_call(request), request.device, seconds=_RUNS_S)
    except Exception as error:  # a kernel may raise anything on generated inputs
        return f"it raised {summary(error)[:200]}"
    return max(1, round(statistics.median(times)))


def _fallback(request: Request) -> Roofline:
    """Return the roofline model of a call's device, or of an H100 if the device is missing here."""
    return Roofline(calibrated(request.device)) if is_present(request.device) else Roofline()


def _place(request: Request) -> Place:
    """Return the key of a call in the store, as (environment, text of the call)."""
    return _environment(request.device), request.key


def _environment(device: torch.device) -> str:
    """Return the conditions of a measured time as text: PyTorch, device, threads, precision of float32 products."""
    name = describe_device(device) if is_present(device) else str(device)
    precision = torch.get_float32_matmul_precision()
    return f"torch {torch.__version__}; {name}; float32 products {precision}"
