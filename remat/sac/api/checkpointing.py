"""Measure a plan: run a real training step without checkpointing and under the plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat import torch_compat
from remat.errors import CaptureError
from remat.graph.calling import read_call, why_no_instance
from remat.running.measure import measure_step, run_backward, run_forward
from remat.sac.api.apply import apply, remove
from remat.sac.run.fakes import left_as_found
from remat.sac.run.lifetimes import given_tensors, loss_only
from remat.sac.run.operators import tensors_in
from remat.sac.solve.plan import SACPlan

#: Timed steps of each kind, of which the fastest counts. Steps without and with the plan alternate, so
#: that noise affects both.
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Measurements of one real training step without checkpointing and under a plan.

    Attributes:
        plain_peak_bytes: measured peak without checkpointing.
        peak_bytes: measured peak under the plan.
        plain_ms: milliseconds of the fastest step without checkpointing.
        ms: milliseconds of the fastest step under the plan.
        gradient_distance: norm of the difference between the gradients of both steps, divided by
            the norm of the gradients without checkpointing.
    """

    plain_peak_bytes: int
    peak_bytes: int
    plain_ms: float
    ms: float
    gradient_distance: float


def check(
    model: nn.Module,
    plan: SACPlan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Checked:
    """Run a training step without and with a plan, and compare peak, time and gradients.

    Peaks are measured by the memory allocator. The model, its gradients, and the states of random
    generators are restored afterwards.

    Args:
        model: the model, to which no plan has been applied.
        plan: the plan to check.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.

    Returns:
        The measurements of the step without the plan and with it.

    Raises:
        PlanError: the plan does not fit the model, as in `apply`.
        CaptureError: ``model`` is a class instead of an instance, or no output requires a gradient.
            Or a parameter, buffer or input is a meta or fake tensor, so no step can run.
    """
    if no_instance := why_no_instance(model):
        raise CaptureError(no_instance)
    args, named = read_call(args, kwargs)
    _check_real(model, args, named)
    step = loss_only(model)
    resident = [*model.parameters(), *model.buffers()]
    plain = measure_step(step, args, named, resident=resident, by="allocator")
    times: tuple[list[float], list[float]] = ([], [])
    gradients: list[list[torch.Tensor | None]] = []
    given = given_tensors(model, args, named)
    device = next((t.device for t in given if t.device.type == "cuda"), torch.device("cpu"))
    peak = plain
    for k in range(2 * REPEATS):
        if k % 2:
            apply(model, plan)
        try:
            if k == 1:
                peak = measure_step(step, args, named, resident=resident, by="allocator")
            with left_as_found(given):
                times[k % 2].append(_timed(step, args, named, device))
                if k < 2:
                    gradients.append([p.grad for p in model.parameters()])
        finally:
            if k % 2:
                remove(model)
    return Checked(
        plain_peak_bytes=plain.peak_bytes,
        peak_bytes=peak.peak_bytes,
        plain_ms=min(times[0]),
        ms=min(times[1]),
        gradient_distance=_distance(*gradients),
    )


def _check_real(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a CaptureError if a parameter, buffer or input is a meta or fake tensor."""
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [("an input", t) for t in tensors_in((tuple(args), kwargs))]
    for name, tensor in named:
        fake = isinstance(tensor, torch_compat.FakeTensor)
        if tensor.is_meta or fake:
            where = "is a fake tensor" if fake else "lies on the meta device"
            raise CaptureError(
                f"'{name}' of {type(model).__name__} {where}, so no step can run: build model and inputs "
                "with real values, or only plan"
            )


def _timed(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> float:
    """Run forward and backward of one step, and return the milliseconds that they take.

    Args:
        step: function that runs the model's forward; see `loss_only`.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        device: device of the model; a GPU is synchronised before each reading of the clock.
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run_backward(run_forward(step, args, kwargs))
    if cuda:
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - started)


def _distance(first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> float:
    """Return the norm of the difference between two lists of gradients, relative to the first list.

    The distance is infinite if a parameter has a gradient in only one list. It is also infinite if
    the lists differ and the norm of the first list is 0.

    Args:
        first: gradients of all parameters in order; None for a parameter without a gradient.
        second: gradients of the same parameters.
    """
    difference = norm = 0.0
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            difference += 0.0 if a is b else float("inf")
            continue
        difference += float((a - b).abs().double().pow(2).sum())  # abs(): gradients may be complex
        norm += float(a.abs().double().pow(2).sum())
    if not difference:
        return 0.0
    return float((difference / norm) ** 0.5) if norm else float("inf")
