"""Selective checkpointing in one call: estimate a model, choose under a memory budget, check by running."""

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
from remat.sac.estimation.modules import ModuleTree, collect_modules
from remat.sac.run.fakes import left_as_found
from remat.sac.run.lifetimes import given_tensors, loss_only
from remat.sac.run.operators import tensors_in
from remat.sac.solve.milp import GAP, plan_modules
from remat.sac.solve.plan import SACPlan
from remat.solvers.base import Solver
from remat.units import Budget

#: Timed steps, of which the fastest counts; they alternate, so that noise meets both alike.
REPEATS = 5


def estimate(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "operator-level-cost-model",
    cost: str | CostModel | None = None,
    fake: bool | None = None,
) -> ModuleTree:
    """Estimate the memory that checkpointing each module frees, and the time that it takes.

    Args:
        model: the model in train mode.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        mode: how runtimes are found; see `collect_modules`.
        cost: another cost model for the mode, by name (``"roofline:h100"``) or as an instance.
        fake: whether to run on fake tensors; see `collect_modules`.

    Raises:
        ProblemError: no such mode or cost model, or no operator of a module can be estimated.
        CaptureError: the arguments are no tuple and dict, or no output requires a gradient.
    """
    model_of_costs = None if cost is None else registry().cost_model(cost)
    return collect_modules(model, args, kwargs, mode=mode, cost=model_of_costs, fake=fake)


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
    """Choose the modules to checkpoint, and the values that each stores, so that a step fits into memory.

    Args:
        model: the model in train mode; or what `estimate` returned, for another budget.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        memory: what the step may take at its peak, parameters and gradients included: ``"12GiB"``,
            an int of bytes, or a number from 0 to 1: that ratio of the peak without checkpointing.
        solver: a registered knapsack solver, by name, to decide within modules; None or
            ``"auto"``: every best choice is computed.
        mode: how runtimes are found.
        cost: another cost model for the mode, by name (``"roofline:h100"``) or as an instance.
        fake: whether to run on fake tensors; see `collect_modules`.
        units: names or patterns of the modules that may be checkpointed.
        fsdp_units: names or patterns of the modules that FSDP gathers as one.
        world_size: ranks that parameters and gradients are spread over.
        time_limit: seconds for the program.
        gap: relative gap at which it may stop; 0: never before the best.

    Raises:
        BudgetError: the memory cannot be read, or no plan fits; the message says what would.
        ProblemError: an argument is not what it must be.
        SolverError: a solver is unknown or cannot run here.
        CaptureError: no output of the model requires a gradient.
    """
    registry().learn_operators()
    budget = read_memory(memory)
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
    """Bytes, or a ratio of the peak as a float; 1 is the ratio, as in every budget.

    Raises:
        BudgetError: it is neither.
    """
    budget = Budget.parse(memory)
    if budget.peak_bytes is not None:
        return budget.peak_bytes
    if budget.share is None:
        raise BudgetError(f"memory is {memory!r}; expected bytes, or a number from 0 to 1")
    return float(budget.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A step that really ran without a plan and with it.

    Attributes:
        plain_peak_bytes: measured peak without checkpointing.
        peak_bytes: measured peak under the plan.
        plain_ms: milliseconds of a step without checkpointing.
        ms: milliseconds of a step under the plan.
        gradient_distance: norm of the difference of all gradients together, relative to their norm.
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
    """Run a step without a plan and with it, and measure both, memory by the allocator.

    The model, its gradients, and the state of random generators are afterwards as before.

    Raises:
        CaptureError: the model is a class, or a parameter, buffer or input lies on the meta device, or
            is fake: nothing can run.
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
    """Refuse to run tensors without data."""
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
    """Milliseconds of forward and backward."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run_backward(run_forward(step, args, kwargs))
    if cuda:
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - started)


def _distance(first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> float:
    difference = norm = 0.0
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            difference += 0.0 if a is b else float("inf")
            continue
        difference += float((a - b).abs().double().pow(2).sum())  # of complex numbers, too
        norm += float(a.abs().double().pow(2).sum())
    if not difference:
        return 0.0
    return float((difference / norm) ** 0.5) if norm else float("inf")
