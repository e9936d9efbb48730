"""Measure the peak, time and gradients of a training step without checkpointing and under a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat import torch_compat
from remat.errors import CaptureError
from remat.graph.capture.calling import read_call, why_no_instance
from remat.graph.costs.measure import once_s
from remat.running.measure import as_before, device_of, measure_step, run_backward, run_forward
from remat.sac.api.apply import apply, remove
from remat.sac.estimation.modules import given_tensors, loss_only
from remat.sac.run.operators import tensors_in
from remat.sac.solve.plan import SACPlan

#: Number of timed steps without checkpointing, and of timed steps under the plan. Only the fastest step of
#: each kind is reported. Steps of both kinds alternate, so that noise affects both.
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Measurements by `check` of a model's training step, without checkpointing and under a plan.

    Attributes:
        plain_peak_bytes: peak in bytes of the step without checkpointing.
        peak_bytes: peak in bytes of the step under the plan.
        plain_ms: milliseconds of the fastest of several steps without checkpointing.
        ms: milliseconds of the fastest of several steps under the plan.
        gradient_distance: norm of the difference between the parameters' gradients under the plan
            and without checkpointing, relative to the norm without checkpointing.
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
    """Measure the peak, time and gradients of a training step without checkpointing and under a plan.

    The training step runs several times without checkpointing and several times under the plan. The peaks come from
    the statistics of CUDA's allocator or, on a CPU, from the profiler's record of allocations. Afterwards, `check`
    restores the model, its gradients, and the states of random generators.

    Args:
        model: the model, to which no plan has been applied.
        plan: the plan to measure.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Raises:
        PlanError: the plan does not fit the model, as in `apply`.
        CaptureError: ``model`` is a class, no output requires a gradient, or a parameter, buffer or
            input is a meta or fake tensor.
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
    tensors = given_tensors(model, args, named)
    device = device_of(tensors)
    peak = plain
    for k in range(2 * REPEATS):
        if k % 2:
            apply(model, plan)
        try:
            if k == 1:
                peak = measure_step(step, args, named, resident=resident, by="allocator")
            with as_before(tensors, device):
                times[k % 2].append(
                    1e3 * once_s(lambda: run_backward(run_forward(step, args, named)), device)
                )
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


def _distance(first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> float:
    """Return the norm of the difference between two lists of gradients, divided by the norm of the first list."""
    difference = norm = 0.0
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            # None: the parameter has no gradient.
            difference += 0.0 if a is b else float("inf")
            continue
        difference += float((a - b).abs().double().pow(2).sum())  # abs(): gradients may be complex
        norm += float(a.abs().double().pow(2).sum())
    if not difference:
        return 0.0
    return float((difference / norm) ** 0.5) if norm else float("inf")
