"""Whole training steps within a memory: which batches fit, under which budget, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from remat.arguments import COST, SOLVER, value_of
from remat.errors import ProblemError, RematError
from remat.graph.capture import capture
from remat.graph.costs import CostModel
from remat.graph.costs.auto import Auto, is_cpu
from remat.graph.joint import JointGraph
from remat.planning.batches import read_args, read_batches, read_memory
from remat.planning.fit import Fit
from remat.planning.fit_batches import Asked, Rows, Step, rows_of
from remat.planning.fit_fixed import Fixed, other_bytes, parameters_of, without_gradient
from remat.planning.fit_row import device_of
from remat.planning.request import (
    CostOption,
    OffloadOption,
    PlanRequest,
    SolverOption,
)
from remat.plugins.registry import registry
from remat.running.jobs import AnyExecutor, check_executor, name_to_send
from remat.running.optimizer import Make, read_optimizer

#: A model's call at a batch: the model, positional and keyword arguments.
Call = tuple[Any, Sequence[Any], Mapping[str, Any]]
#: GB/s that one rank sends: NVLink of an H100 in one direction, by the data sheet.
LINK_GBPS = 450.0


def fit(
    model: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int,
    optimizer: str | Make = "adamw",
    batches: str | int | Iterable[int] = "max",
    ranks: int = 1,
    fsdp: bool = False,
    link_gbps: float = LINK_GBPS,
    cost: CostOption = COST,
    solver: SolverOption = SOLVER,
    time_limit: float | None = None,
    lower: str = "inductor",
    device: str | torch.device | None = None,
    offload: OffloadOption = None,
    executor: AnyExecutor = None,
    on_step: Callable[[str], None] | None = None,
) -> Fit:
    """Finds which batches of a whole training step fit a memory, under which budget, and how fast.

    Counted are parameters, buffers and inputs, what the best plan found keeps and makes, gradients, the
    optimizer's state and what its step allocates, and with several ranks the buffers of collectives by
    rule (`remat.planning.sharding.Sharding`). A step is forward, backward, ``optimizer.step()``, and
    ``zero_grad()``, which frees the gradients; what forward returns lives until then. Nothing is allocated:
    the model may be on the meta device. What a process holds besides PyTorch's tensors (a CUDA context, some
    hundred MiB, and what its allocator cannot use) is not counted: name a memory without it.

    Args:
        model: a module, or a function, whose parameters are the arguments that require a gradient.
        args: a callable that makes the arguments of a call for a batch: a tuple of positional ones, a dict
            of keyword ones, or a pair of both. Or the positional arguments themselves, whose tensors have
            the batch as their first dimension.
        kwargs: keyword arguments likewise; with a callable, none.
        memory: of one rank: ``"80GiB"``, or bytes.
        optimizer: a class of `torch.optim` by its name in any case, with arguments behind a colon
            (``"sgd:momentum=0.9"``); or a callable that makes an optimizer of a list of parameters.
        batches: batches of one rank to look at; ``"max"``: powers of two until one does not fit, then
            between the last two, exactly below 100 and to within 2 % above.
        ranks: how many train together, by DDP.
        fsdp: they share parameters, gradients and state, by FSDP2.
        link_gbps: GB/s that a rank sends; sending goes on while the rank computes, and the longer counts.
        cost: cost model in units of time. Where its device is no CPU, optimizers work on all parameters
            at once, as PyTorch's do on a GPU, unless they are told ``foreach=False``.
        solver: as in `remat.plan`.
        time_limit: as in `remat.plan`.
        lower: as in `remat.capture`; for ``"inductor"`` peaks are those that fused code is expected to have.
        device: as in `remat.capture`.
        offload: as in `remat.plan`, on one rank: saved values may go to the host where a step does not fit without.
        executor: what plans: any `concurrent.futures.Executor`, a number of processes, or None for this process.
            Batches that are listed are planned at the same time, and so are doubled ones; steps are captured
            here, and solver and cost model are given by name.
        on_step: called with a line of text before each step.

    Raises:
        BudgetError: the memory cannot be read, or the parameters alone are larger.
        ProblemError: an argument that cannot be meant, or an optimizer that cannot be traced.
        CaptureError: the step cannot be captured.
    """
    check_executor(executor)
    if executor is not None:
        name_to_send(value_of(cost), "cost model")
        name_to_send(value_of(solver), "solver")
    made = read_args(args, kwargs)
    return fit_calls(
        lambda batch: (model, *made(batch)),
        memory=memory,
        optimizer=optimizer,
        batches=batches,
        ranks=ranks,
        fsdp=fsdp,
        link_gbps=link_gbps,
        request=PlanRequest.without_budget(
            cost=cost, solver=solver, time_limit=time_limit, offload=offload
        ),
        lower=lower,
        device=device,
        executor=executor,
        on_step=on_step,
    )


def fit_calls(
    calls: Callable[[int], Call],
    *,
    memory: str | int,
    optimizer: str | Make,
    batches: str | int | Iterable[int],
    ranks: int,
    fsdp: bool,
    link_gbps: float,
    request: PlanRequest,
    lower: str,
    device: str | torch.device | None = None,
    title: str = "",
    executor: AnyExecutor = None,
    on_step: Callable[[str], None] | None = None,
) -> Fit:
    """`fit`, for a model that is built for each batch.

    Args:
        calls: makes the model and its arguments for a batch.
        memory: as in `fit`, and so the others.
        optimizer: likewise.
        batches: likewise.
        ranks: likewise.
        fsdp: likewise.
        link_gbps: likewise.
        request: solver, cost model and time limit.
        lower: likewise.
        device: likewise.
        title: what the model is called.
        executor: likewise.
        on_step: likewise.
    """
    wanted = read_batches(batches)
    memory_bytes = read_memory(memory)
    name, _ = read_optimizer(optimizer)
    if type(ranks) is not int or ranks < 1:
        raise ProblemError(f"ranks is {ranks!r}; expected a whole number of 1 or more")
    if fsdp and ranks == 1:
        raise ProblemError("fsdp shares the step among several ranks, and ranks is 1; say ranks=8")
    if ranks > 1:
        request.refuse_offload("a step of several ranks")
    if not link_gbps > 0:
        raise ProblemError(f"link_gbps is {link_gbps!r}; expected GB/s above 0")
    if request.cost.unit != "ps":
        raise ProblemError(
            f"cost model '{request.cost}' counts {request.cost.unit}, no time; name one of unit ps, such "
            "as 'roofline:h100' (`remat costs` lists them)"
        )
    on_cpu = is_cpu(device_of(request.cost))

    def fixed_for(model: Any, arguments: Any, joint: JointGraph | None) -> Fixed:
        parameters = parameters_of(model, arguments)
        return Fixed.of(
            model,
            parameters,
            without_gradient(model, parameters, joint),
            optimizer,
            ranks=ranks,
            fsdp=fsdp,
            foreach=not on_cpu,
        )

    step = on_step or (lambda _: None)
    first = next(iter(wanted))
    called_first = model, *arguments = calls(first)
    called = title or getattr(model, "__name__", type(model).__name__)
    if not parameters_of(model, arguments):
        raise ProblemError(f"'{called}' has no parameters, so there is nothing to train and to fit")
    step("tracing the optimizer")
    fixed = fixed_for(model, arguments, None)
    fixed.check(memory_bytes, called, model, parameters_of(model, arguments))

    def captured(batch: int, call: Call | None = None) -> Step:
        step(f"batch {batch}: building")
        model, args, kwargs = calls(batch) if call is None else call
        step(f"batch {batch}: capturing")
        joint = capture(model, args, kwargs, lower=lower, device=device)
        parameters = parameters_of(model, (args, kwargs))
        return joint, other_bytes(model, (args, kwargs), parameters)

    step_of_first = captured(first, called_first)
    fixed = fixed_for(model, arguments, step_of_first[0])
    asked = Asked(fixed=fixed, memory_bytes=memory_bytes, link_gbps=link_gbps)
    priced = str(request.on(step_of_first[0]).cost)
    kept = {first: step_of_first}

    def captured_once(batch: int) -> Step:
        return kept.pop(batch, None) or captured(batch)

    rows = Rows(asked=asked, request=request, captured=captured_once, on_step=step)
    found = rows_of(wanted, rows, executor)
    sharding, use = fixed.sharding, fixed.use
    return Fit(
        model=called,
        memory_bytes=memory_bytes,
        optimizer=name,
        cost=priced,
        lower=lower,
        ranks=ranks,
        sharding=sharding.label,
        parameter_bytes=sharding.parameter_bytes,
        gradient_bytes=sharding.gradient_bytes,
        state_bytes=use.state_bytes,
        optimizer_bytes=use.step_bytes,
        rows=tuple(found[b] for b in sorted(found)),
        offload="" if request.offload is None else str(request.offload),
        asked_cost=_name_of(request.cost),
    )


def _name_of(cost: CostModel) -> str:
    """The name that stands for a cost model; empty for the default, and where it has none."""
    if isinstance(cost, Auto):
        return ""
    try:
        return str(cost) if registry().cost_model(str(cost)) == cost else ""
    except RematError:
        return ""
