"""Whole training steps within a memory: which batches fit, under which budget, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.arguments import COST, SOLVER, value_of
from remat.errors import BudgetError, ProblemError, RematError, suppress_warnings
from remat.graph.calling import read_call
from remat.graph.capture import capture
from remat.graph.costs import CostModel
from remat.graph.costs.auto import Auto
from remat.graph.joint import JointGraph
from remat.graph.lowering import Decision
from remat.graph.text import parse_joint, print_joint
from remat.planning.fit_table import Fit, FitRow
from remat.planning.planner import Planner
from remat.planning.request import CostOption, OffloadOption, PlanRequest, SolverOption
from remat.planning.whole_step import Fitting, Rank, other_bytes, parameters_of
from remat.plugins.registry import registry
from remat.running.jobs import AnyExecutor, check_executor, name_to_send, run_jobs
from remat.running.optimizer import Make, read_optimizer
from remat.torch_compat import pytree
from remat.units import parse_bytes

#: A model's call at a batch: the model, positional and keyword arguments.
Call = tuple[Any, Sequence[Any], Mapping[str, Any]]
#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: A captured step, and the bytes of its inputs and buffers.
Step = tuple[JointGraph, int]
#: The row of a batch, and the decisions that were looked at for it.
Answer = tuple[FitRow, tuple[Decision, ...]]
#: Answers batches, given decisions of other batches.
Ask = Callable[[Sequence[int], Sequence[Decision]], Mapping[int, Answer]]
#: GB/s that one rank sends: NVLink of an H100 in one direction, by the data sheet.
LINK_GBPS = 450.0
#: Bytes below which a memory can only be a number without its unit.
_LEAST_MEMORY = 1 << 16
#: The largest batch that ``"max"`` looks at.
_MOST = 1 << 20
#: How close ``"max"`` comes to the largest batch that fits, as a part of it.
_PART = 50
#: Doubled batches that an executor is given at a time, unless it is a number of processes.
_WIDTH = 4


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
    listed = read_batches(batches)
    name, _ = read_optimizer(optimizer)
    of_rank: dict[str, Any] = {
        "memory_bytes": read_memory(memory),
        "link_gbps": link_gbps,
        "optimizer": optimizer,
        "ranks": ranks,
        "fsdp": fsdp,
        "cost": request.cost,
    }
    _check(request, ranks, fsdp, link_gbps)
    step = on_step or (lambda _: None)
    first = min(listed, default=1)
    first_call = model, *arguments = calls(first)
    called = title or getattr(model, "__name__", type(model).__name__)
    parameters = parameters_of(model, arguments)
    if not parameters:
        raise ProblemError(f"'{called}' has no parameters, so there is nothing to train and to fit")
    step("tracing the optimizer")
    Rank.of(model, parameters, **of_rank).check(called, model, parameters)

    def captured(batch: int, call: Call | None = None) -> Step:
        step(f"batch {batch}: building")
        model, args, kwargs = calls(batch) if call is None else call
        step(f"batch {batch}: capturing")
        joint = capture(model, args, kwargs, lower=lower, device=device)
        return joint, other_bytes(model, (args, kwargs), parameters_of(model, (args, kwargs)))

    kept = {first: captured(first, first_call)}
    rank = Rank.of(model, parameters, kept[first][0], **of_rank)
    priced = str(request.on(kept[first][0]).cost)

    def ask(batches: Sequence[int], others: Sequence[Decision]) -> dict[int, Answer]:
        steps = ((b, kept.pop(b) if b in kept else captured(b)) for b in batches)
        if executor is None:
            return {b: _answer(rank, request, b, at, others, step) for b, at in steps}
        jobs = [
            _Job(
                rank=rank,
                options=request.to_text(),
                batch=batch,
                joint=print_joint(joint),
                other_bytes=nbytes,
                others=tuple(others),
            )
            for batch, (joint, nbytes) in steps
        ]
        step(f"planning batches {', '.join(map(str, batches))}")
        return _asked_of(executor, jobs)

    width = executor if isinstance(executor, int) else 1 if executor is None else _WIDTH
    rows = rows_of(listed, ask) if listed else rows_up_to_most(ask, width)
    return Fit(
        model=called,
        memory_bytes=rank.memory_bytes,
        optimizer=name,
        cost=priced,
        lower=lower,
        ranks=ranks,
        sharding=rank.sharding.label,
        parameter_bytes=rank.sharding.parameter_bytes,
        gradient_bytes=rank.sharding.gradient_bytes,
        state_bytes=rank.use.state_bytes,
        optimizer_bytes=rank.use.step_bytes,
        rows=tuple(rows[b] for b in sorted(rows)),
        offload="" if request.offload is None else str(request.offload),
        asked_cost=_name_of(request.cost),
    )


def _check(request: PlanRequest, ranks: int, fsdp: bool, link_gbps: float) -> None:
    """Refuse invalid arguments before any model is built."""
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


def _name_of(cost: CostModel) -> str:
    """The name of a cost model; empty for the default or an unnamed one."""
    if isinstance(cost, Auto):
        return ""
    try:
        return str(cost) if registry().cost_model(str(cost)) == cost else ""
    except RematError:
        return ""


# Which batches are asked, and of whom --------------------------------------------------------------


def rows_of(batches: Sequence[int], ask: Ask) -> dict[int, FitRow]:
    """The rows of listed batches: each by itself, and what fits a larger one is tried at a smaller one too."""
    answers = dict(ask(batches, ()))
    largest = max((b for b in batches if answers[b][0].fits), default=0)
    again = [b for b, (row, _) in answers.items() if b < largest and not (row.fits or row.proven)]
    if again:
        answers |= ask(again, answers[largest][1])
    return {batch: row for batch, (row, _) in answers.items()}


def rows_up_to_most(ask: Ask, width: int) -> dict[int, FitRow]:
    """The rows of doubled batches up to the first that does not fit, and of some between the last two.

    Doubled ones are asked by themselves, ``width`` at a time. Decisions looked at so far are candidates between them.
    """
    answers: dict[int, Answer] = {}
    rows: dict[int, FitRow] = {}
    low, high = 0, 1
    decisions: dict[Decision, None] = {}

    def fits(batch: int) -> bool:
        rows[batch], tried = answers[batch]
        decisions.update(dict.fromkeys(tried))
        return rows[batch].fits

    while high <= _MOST:
        if high not in answers:
            answers |= ask([high << k for k in range(width) if high << k <= _MOST], ())
        if not fits(high):
            break
        low, high = high, 2 * high
    while high <= _MOST and high - low > max(1, low // _PART):
        middle = (low + high) // 2
        answers |= ask([middle], [*decisions])
        low, high = (middle, high) if fits(middle) else (low, middle)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One batch, to be planned by a worker."""

    rank: Rank
    options: Mapping[str, str]
    batch: int
    joint: str
    other_bytes: int
    others: tuple[Decision, ...]


def _asked_of(executor: AnyExecutor, jobs: Sequence[_Job]) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}

    def on_answer(k: int, answer: Answer) -> None:
        answers[jobs[k].batch] = answer

    def on_death(k: int, why: str) -> None:
        raise ProblemError(f"batch {jobs[k].batch} was not planned: {why}; give fewer processes")

    run_jobs(_worked, jobs, executor, on_answer, on_death)
    return answers


def _worked(job: _Job) -> Answer:
    request = PlanRequest.from_text(job.options)
    step = parse_joint(job.joint), job.other_bytes
    return _answer(job.rank, request, job.batch, step, job.others, lambda _: None)


def _answer(
    rank: Rank,
    request: PlanRequest,
    batch: int,
    step: Step,
    others: Sequence[Decision],
    on_step: Callable[[str], None],
) -> Answer:
    """The row of a batch, and the decisions that were tried."""
    joint, nbytes = step
    with suppress_warnings():  # these plans are only tried, so their warnings concern no user
        planner = Planner.of(
            joint, request, in_place=True, on_step=lambda text: on_step(f"batch {batch}: {text}")
        )
        fitting = Fitting(planner=planner, rank=rank, other_bytes=nbytes)
        return fitting.row(batch, others), fitting.tried


# What is given, read once -------------------------------------------------------------------------


def read_memory(memory: object) -> int:
    """A memory in bytes.

    Raises:
        BudgetError: it has no unit, or is nothing of the kind.
    """
    text = f"memory is {memory!r}; expected bytes with their unit, such as '80GiB'"
    if isinstance(memory, str):
        if memory.strip().replace(".", "", 1).isdigit():
            raise BudgetError(f"{text}: did you mean '{memory.strip()}GiB'?")
        nbytes = parse_bytes(memory)
        if nbytes:
            return nbytes
    elif type(memory) is int:
        if memory >= _LEAST_MEMORY:
            return memory
        if memory > 0:
            raise BudgetError(
                f"{text}: did you mean '{memory}GiB'? As a number it is {memory} bytes"
            )
    raise BudgetError(text)


def read_batches(batches: object) -> tuple[int, ...]:
    """The batch sizes to try, in order; none for ``"max"``.

    Args:
        batches: whole numbers, one number, or ``"max"``.

    Raises:
        ProblemError: they are something else, or one is below 1.
    """
    if batches == "max":
        return ()
    given = [batches] if isinstance(batches, (int, str)) else batches
    listed: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for batch in listed:
        if type(batch) is not int or batch < 1:
            raise ProblemError(
                f"batch is {batch!r}; expected whole numbers of 1 or more, such as 1, 2, 4, or 'max' for "
                "the largest that fits"
            )
    if not listed:
        raise ProblemError("batches is empty; expected whole numbers such as 1, 2, 4, or 'max'")
    return tuple(sorted(set(listed)))


def read_args(args: Any, kwargs: Mapping[str, Any] | None) -> Callable[[int], Arguments]:
    """A function that makes call arguments for a batch size.

    Args:
        args: a callable of a batch, which returns a tuple, a dict, or a pair of both; or arguments.
        kwargs: keyword arguments, beside arguments that are no callable.

    Raises:
        ProblemError: keyword arguments beside a callable, or tensors without a batch.
        CaptureError: they are no arguments of a call.
    """
    if not callable(args):
        return varied(*read_call(args, kwargs))
    if kwargs is not None:
        raise ProblemError(
            "kwargs are given beside a callable that makes the arguments for a batch; let it return "
            "(args, kwargs)"
        )

    def made(batch: int) -> Arguments:
        found = args(batch)
        if isinstance(found, Mapping):
            return read_call((), found)
        if isinstance(found, torch.Tensor):
            return (found,), {}
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
            positional = found[0]
            if isinstance(positional, (tuple, list)):
                return read_call(positional, found[1])
        return read_call(found, None)

    return made


def varied(args: Any, kwargs: Mapping[str, Any]) -> Callable[[int], Arguments]:
    """Copy arguments with another first dimension, as tensors without data.

    Raises:
        ProblemError: their first dimensions differ, or there is none.
    """
    tensors = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    sizes = sorted({int(t.shape[0]) for t in tensors if t.dim()})
    if len(sizes) != 1:
        raise ProblemError(
            f"the tensors of a call have first dimensions {', '.join(map(str, sizes)) or 'none'}; "
            "expected one, the batch: give a callable that makes the arguments for a batch, such as "
            "lambda batch: (torch.empty(batch, 1024, device='meta'),)"
        )

    def made(batch: int) -> Arguments:
        def at(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            like = value.new_empty((batch, *value.shape[1:]))
            return like.requires_grad_(value.requires_grad)

        return pytree.tree_map(at, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]

    return made
