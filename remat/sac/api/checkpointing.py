"""Selective checkpointing in three calls: `estimate` a model, `plan` for a budget, `check` a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat import torch_compat
from remat.errors import BudgetError, CaptureError
from remat.graph.calling import read_call, why_no_instance
from remat.graph.costs import CostModel
from remat.plugins.registry import registry
from remat.running.measure import measure_step, run_backward, run_forward
from remat.sac.api.apply import apply, remove
from remat.sac.estimation.modules import ModuleTree
from remat.sac.estimation.modules import estimate as estimate
from remat.sac.run.fakes import left_as_found
from remat.sac.run.lifetimes import given_tensors, loss_only
from remat.sac.run.operators import tensors_in
from remat.sac.solve.milp import GAP, plan_modules
from remat.sac.solve.plan import SACPlan
from remat.solvers.base import Solver
from remat.units import Budget

#: Timed steps of each kind, of which the fastest counts. Steps without and with the plan alternate, so
#: that noise affects both.
REPEATS = 5


def plan(
    model: nn.Module | ModuleTree,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: int | float | str,
    solver: Solver | str | None = None,
    mode: str = "operator-level-cost-model",
    cost: str | CostModel | None = None,
    fake: bool | None = None,
    units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] = (),
    world_size: int = 1,
    time_limit: float | None = None,
    gap: float = GAP,
) -> SACPlan:
    """Choose which modules to checkpoint, and which results each stores, to fit a step into memory.

    Results are those of a module's operators. Among the choices that fit, the plan has the least
    recompute time, up to the tolerance ``gap``.

    Args:
        model: the model in train mode. Or the result of `estimate`, to plan again for another
            budget.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        memory: budget for the step's peak, including parameters and gradients: ``"12GiB"``, an int
            of bytes, or a number from 0 to 1. Such a number is a ratio of the peak without
            checkpointing.
        solver: knapsack solver, as a name or an instance, that finds the sets of results that a
            module may store. None or ``"auto"``: the sets come from the module's exact Pareto
            frontier of stored bytes and recompute time.
        mode: ``"operator-level-cost-model"`` takes runtimes from a cost model,
            ``"operator-level-benchmark"`` measures them; see `SACEstimator`.
        cost: cost model to use instead of the one that belongs to ``mode``: a name such as
            ``"roofline:h100"`` or an instance.
        fake: whether the step runs on fake tensors, which need neither memory nor a GPU. None: use
            fake tensors unless all parameters, buffers and inputs are on the CPU.
        units: names or patterns of the modules that may be checkpointed; None: all modules.
        fsdp_units: names or patterns of the modules that FSDP gathers as one unit. A module that
            contains such a unit is not checkpointed.
        world_size: number of ranks over which parameters and gradients are sharded.
        time_limit: time limit of the integer program in seconds; None: branch-and-bound nodes are
            limited instead.
        gap: the integer program may stop if its plan is proven to be this close to the optimum, as
            a fraction. 0: stop only at a proven optimum.

    Returns:
        The plan, for `apply`.

    Raises:
        BudgetError: ``memory`` cannot be parsed, or no plan fits; the message states the least
            peak.
        ProblemError: another argument is invalid, or a module cannot be estimated.
        SolverError: the solver is unknown or cannot run on this machine.
        CaptureError: ``args`` is not a tuple, ``kwargs`` is not a dict, or no output requires a
            gradient.
    """
    registry().learn_operators()
    budget = read_memory(memory)  # before the estimate, so that a typing error is found at once
    asked = None if solver is None or solver == "auto" else registry().solver(solver)
    tree = model
    if not isinstance(tree, ModuleTree):
        tree = estimate(tree, args, kwargs, mode=mode, cost=cost, fake=fake)
    return plan_modules(
        tree,
        int(budget * tree.peak_bytes(world_size)) if isinstance(budget, float) else budget,
        world_size=world_size,
        units=units,
        fsdp_units=fsdp_units,
        solver=asked,
        time_limit=time_limit,
        gap=gap,
    )


def read_memory(memory: object) -> int | float:
    """Parse a memory budget.

    Returns:
        Bytes as an int, or a ratio of the peak without checkpointing as a float. The number 1 is
        read as the ratio 1.0, as in every budget.

    Raises:
        BudgetError: ``memory`` is neither bytes nor a number from 0 to 1.
    """
    budget = Budget.parse(memory)
    if budget.peak_bytes is not None:
        return budget.peak_bytes
    if budget.share is None:
        raise BudgetError(f"memory is {memory!r}; expected bytes, or a number from 0 to 1")
    return float(budget.share)


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
