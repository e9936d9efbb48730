"""Find the batch sizes at which a training step fits a device's memory, with the budget and the speed of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch

from remat.arguments import COST, SOLVER, passes_on
from remat.errors import (
    BudgetError,
    PlanError,
    ProblemError,
    RematError,
    about,
    suppress_warnings,
)
from remat.fitting.table import Fit, FitRow
from remat.fitting.training_memory import Rank, StepFit, other_bytes, parameters_of
from remat.graph.capture.calling import read_call
from remat.graph.capture.step import capture
from remat.graph.costs import CostModel
from remat.graph.costs.auto import Auto
from remat.graph.joint import JointGraph
from remat.graph.problems.lowering import Decision
from remat.graph.text import parse_joint, print_joint
from remat.options import (
    CostOption,
    FitOptions,
    PlanOptions,
    SolverOption,
    Training,
    TrainingOptions,
    ValueOptions,
)
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search.effort import DEFAULT
from remat.plugins.registry import registry
from remat.running.jobs import AnyExecutor, check_executor, name_to_send, run_jobs
from remat.running.optimizer import optimizer_code, read_optimizer
from remat.torch_compat import pytree
from remat.units import parse_bytes

#: A call of a model at one batch size: the model, its positional and its keyword arguments.
Call = tuple[Any, Sequence[Any], Mapping[str, Any]]
#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: A captured step, and the bytes of its inputs and buffers.
Step = tuple[JointGraph, int]
#: The result of planning one batch size: the row of the table, and the decisions whose memory was computed.
Answer = tuple[FitRow, tuple[Decision, ...]]
#: Function (batch sizes, decisions of other batch sizes to try, too) -> dict from batch size to result.
PlanBatches = Callable[[Sequence[int], Sequence[Decision]], Mapping[int, Answer]]
#: A memory size of fewer bytes is refused, because its unit was probably forgotten.
_LEAST_MEMORY = 1 << 16
#: The largest batch that ``"max"`` tries.
_LARGEST_BATCH = 1 << 20


@passes_on(TrainingOptions.__annotations__, Training)
@passes_on(ValueOptions.__annotations__, PlanOptions, others=True)
def fit(
    model: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    cost: CostOption = COST,
    solver: SolverOption = SOLVER,
    time_limit: float | None = None,
    executor: AnyExecutor = None,
    on_progress: Callable[[str], None] | None = None,
    **options: Unpack[FitOptions],
) -> Fit:
    """Find the batch sizes at which a training step fits a device's memory, with the budget and the speed of each.

    A step is forward, backward, ``optimizer.step()`` and ``zero_grad()``, which frees the gradients. Outputs
    of forward live until the end of the step. The bytes of a step are:

    - parameters, buffers and inputs;
    - saved and temporary values under the best plan found, and gradients;
    - the optimizer's state, and the memory that the optimizer's step allocates;
    - with several ranks, the buffers of collectives, by the rules of `remat.fitting.sharding.Sharding`.

    The model may be on the meta device, because nothing is trained or measured. Memory outside of PyTorch's
    tensors is not counted: a CUDA context (some hundred MiB), and memory that the allocator cannot use.
    Subtract the CUDA context from ``memory``, and give a ``margin`` for the allocator.

    Args:
        model: a module; or a function, whose arguments that require a gradient count as the parameters.
        args: a callable that takes a batch size and returns the arguments of a call: a tuple of positional
            arguments, a dict of keyword arguments, a pair of both, or one tensor. Or the positional arguments
            themselves, if the first dimension of every tensor is the batch.
        kwargs: keyword arguments, if ``args`` is not a callable; their tensors have the batch first, too.
        cost: cost model whose unit is a time. Unless its device is a CPU, optimizers use their ``foreach``
            implementation by default, as in PyTorch on a GPU.
        solver: as in `remat.plan`.
        time_limit: as in `remat.plan`.
        executor: where to plan: any `concurrent.futures.Executor`, a number of processes, or None for this process.
            Listed batches, and the powers of two of ``"max"``, are planned in parallel. Steps are captured in this
            process. With an executor, solver and cost model must be given by name.
        on_progress: called with a line of text before each stage.
        options: options of `remat.options.Training`; and those of `remat.options.PlanOptions` for the values of the
            step. ``offload``, for one rank only, lets saved values be offloaded if the step does not fit otherwise.
            ``chunk="auto"`` takes the fastest number of chunks for each batch.

    Returns:
        A table with one row for each planned batch: whether the step fits, the budget to set, peak and speed.
        The table also holds the bytes of parameters, gradients and optimizer.

    Raises:
        BudgetError: ``memory`` cannot be parsed, or is smaller than the parameters alone.
        ProblemError: an argument is invalid, or the optimizer cannot be traced.
        CaptureError: the step cannot be captured.
    """
    check_executor(executor)
    if executor is not None:
        name_to_send(cost, "cost model")
        name_to_send(solver, "solver")
    arguments = read_args(args, kwargs)
    planning: dict[str, Any] = {**options}
    names = TrainingOptions.__annotations__
    training = {name: planning.pop(name) for name in names if name in planning}
    return fit_calls(
        lambda batch: (model, *arguments(batch)),
        Training(**training),
        PlanRequest.without_budget(cost=cost, solver=solver, time_limit=time_limit, **planning),
        executor=executor,
        on_progress=on_progress,
    )


def fit_calls(
    calls: Callable[[int], Call],
    training: Training,
    request: PlanRequest,
    *,
    title: str = "",
    executor: AnyExecutor = None,
    on_progress: Callable[[str], None] | None = None,
) -> Fit:
    """Find the batch sizes that fit a device's memory, as `fit` does, for a model that is built anew for each batch.

    Args:
        calls: function that takes a batch size and returns the call of the model.
        training: how the model is trained.
        request: the options of planning.
        title: name of the model in the result; empty: the name of its class or function.
        executor: as in `fit`.
        on_progress: as in `fit`.
    """
    with about("batches"):
        batches = read_batches(training.batches)
    with about("optimizer"):
        optimizer, _ = read_optimizer(training.optimizer)
    with about("memory"):
        memory_bytes = read_memory(training.memory)
    with about("margin"):
        margin = read_margin(training.margin)
    limit_bytes = int(memory_bytes * (1 - margin))
    _check(request, training)
    report = on_progress or (lambda _: None)
    first = min(batches, default=1)
    first_call = model, *arguments = calls(first)
    name = title or getattr(model, "__name__", type(model).__name__)
    parameters = parameters_of(model, arguments)
    if not parameters:
        raise ProblemError(f"'{name}' has no parameters, so there is nothing to train and to fit")
    report("tracing the optimizer")
    Rank.of(model, parameters, training, limit_bytes, request.cost).check(name, model, parameters)

    def capture_step(batch: int, call: Call | None = None) -> Step:
        report(f"batch {batch}: building")
        model, args, kwargs = calls(batch) if call is None else call
        report(f"batch {batch}: capturing")
        joint = capture(model, args, kwargs, lower=training.lower, device=training.device)
        return joint, other_bytes(model, (args, kwargs), parameters_of(model, (args, kwargs)))

    # Only a captured step tells which parameters get no gradient, so the rank is computed again with the first step.
    captured = {first: capture_step(first, first_call)}
    joint, _ = captured[first]
    rank = Rank.of(model, parameters, training, limit_bytes, request.cost, joint)
    cost = str(request.with_graph_cost(joint).cost)
    in_process = executor is None

    def job(batch: int, others: Sequence[Decision]) -> _Job:
        # Steps are captured one by one, and not kept, because graphs are large.
        joint, nbytes = captured.pop(batch) if batch in captured else capture_step(batch)
        return _Job(
            rank=rank,
            request=request if in_process else request.to_options(),
            batch=batch,
            joint=joint if in_process else print_joint(joint, modules=True),
            other_bytes=nbytes,
            others=tuple(others),
        )

    def plan_batches(batches: Sequence[int], others: Sequence[Decision]) -> dict[int, Answer]:
        if in_process:
            return {batch: _answer(job(batch, others), report) for batch in batches}
        jobs, answers = [job(batch, others) for batch in batches], dict[int, Answer]()

        def on_answer(k: int, answer: Answer) -> None:
            answers[batches[k]] = answer

        def on_death(k: int, why: str) -> None:
            raise ProblemError(f"batch {batches[k]} was not planned: {why}; give fewer processes")

        report(f"planning batches {', '.join(map(str, batches))}")
        run_jobs(_answer, jobs, executor, on_answer, on_death)
        return answers

    # In this process, doubled batches are planned one by one, because results beyond the first batch that does not fit
    # are not used.
    width = executor if isinstance(executor, int) else 1 if in_process else DEFAULT.fitting.width
    rows = rows_of(batches, plan_batches) if batches else rows_up_to_largest(plan_batches, width)
    return Fit(
        model=name,
        memory_bytes=memory_bytes,
        margin=margin,
        optimizer=optimizer,
        optimizer_code=optimizer_code(training.optimizer),
        accumulate=training.accumulate,
        cost=cost,
        lower=training.lower,
        ranks=training.ranks,
        sharding=rank.sharding.label,
        parameter_bytes=rank.sharding.parameter_bytes,
        gradient_bytes=rank.sharding.gradient_bytes,
        state_bytes=rank.use.state_bytes,
        optimizer_bytes=rank.use.step_bytes,
        rows=tuple(rows[b] for b in sorted(rows)),
        offload="" if request.offload is None else str(request.offload),
        host_memory=request.host_memory,
        policies=str(request.policies),
        asked_cost=_name_of(request.cost),
    )


def _check(request: PlanRequest, training: Training) -> None:
    """Raise a ProblemError if options of training are invalid or conflict, before the model is built."""
    ranks, accumulate = training.ranks, training.accumulate
    if type(ranks) is not int or ranks < 1:
        raise ProblemError(
            f"ranks is {ranks!r}; expected a whole number of 1 or more", option="ranks"
        )
    if training.fsdp and ranks == 1:
        raise ProblemError("fsdp shares the step among several ranks, and ranks is 1; say ranks=8")
    if ranks > 1:
        request.check("no offloading", "a step of several ranks")
    if type(accumulate) is not int or accumulate < 1:
        raise ProblemError(
            f"accumulate is {accumulate!r}; expected the number of micro-batches in a step, 1 or more",
            option="accumulate",
        )
    if not training.link_gbps > 0:
        raise ProblemError(
            f"link_gbps is {training.link_gbps!r}; expected GB/s above 0", option="link_gbps"
        )
    if request.cost.unit != "ps":
        raise ProblemError(
            f"cost model '{request.cost}' counts {request.cost.unit}, no time; name one of unit ps, such "
            "as 'roofline:h100' (`remat costs` lists them)"
        )


def _name_of(cost: CostModel) -> str:
    """Return the name under which a cost model is registered; empty for the default model or an unregistered one."""
    if isinstance(cost, Auto):
        return ""
    try:
        return str(cost) if registry().cost_model(str(cost)) == cost else ""
    except RematError:
        return ""


# Batches to plan, and their workers -----------------------------------------------------------------


def rows_of(batches: Sequence[int], plan_batches: PlanBatches) -> dict[int, FitRow]:
    """Plan the step at the listed batch sizes; return a dict from each batch size to its `FitRow`."""
    answers = dict(plan_batches(batches, ()))
    largest = max((b for b in batches if answers[b][0].fits), default=0)
    # A batch smaller than one that fits should fit, too. Unless it is proven not to fit, such a batch is planned
    # again with the decisions of the larger batch.
    again = [b for b, (row, _) in answers.items() if b < largest and not (row.fits or row.proven)]
    if again:
        answers |= plan_batches(again, answers[largest][1])
    return {batch: row for batch, (row, _) in answers.items()}


def rows_up_to_largest(plan_batches: PlanBatches, width: int) -> dict[int, FitRow]:
    """Find the largest batch that fits the memory, by doubling, then bisection; return the rows of all planned batches.

    Doubled batches (1, 2, 4, …) are planned independently, ``width`` of them at a time. In the bisection, the search
    for a batch size also starts from the decisions for other batch sizes.
    """
    answers: dict[int, Answer] = {}
    rows: dict[int, FitRow] = {}
    low, high = 0, 1
    # A dict, unlike a set, keeps the order of the decisions, so that plans are deterministic.
    decisions: dict[Decision, None] = {}

    def fits(batch: int) -> bool:
        rows[batch], others = answers[batch]
        decisions.update(dict.fromkeys(others))
        return rows[batch].fits

    while high <= _LARGEST_BATCH:
        # Rows of batches beyond the first that does not fit are left out, so that the table does not depend on `width`.
        if high not in answers:
            doubled = [high << k for k in range(width) if high << k <= _LARGEST_BATCH]
            answers |= plan_batches(doubled, ())
        if not fits(high):
            break
        low, high = high, 2 * high
    while high <= _LARGEST_BATCH and high - low > max(1, low // DEFAULT.fitting.part):
        middle = (low + high) // 2
        answers |= plan_batches([middle], [*decisions])
        low, high = (middle, high) if fits(middle) else (low, middle)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One batch size to plan, in this process or by a worker.

    Attributes:
        rank: the rank, with the bytes on the rank that depend on neither batch nor plan.
        request: the options of planning; for a worker, as JSON values from `PlanRequest.to_options`.
        batch: the batch size.
        joint: the captured step; for a worker, as text.
        other_bytes: bytes of the step's inputs and buffers.
        others: decisions of other batch sizes, to try for this batch, too.
    """

    rank: Rank
    request: PlanRequest | Mapping[str, Any]
    batch: int
    joint: JointGraph | str
    other_bytes: int
    others: tuple[Decision, ...]


def _answer(job: _Job, report: Callable[[str], None] = lambda _: None) -> Answer:
    """Plan one batch size with each allowed number of loss chunks; return the best row, and all computed decisions."""
    rank, request, batch, joint = job.rank, job.request, job.batch, job.joint
    if not isinstance(request, PlanRequest):
        request = PlanRequest.of(**request)
    if isinstance(joint, str):
        joint = parse_joint(joint)
    with suppress_warnings():  # these plans are trials, so their warnings concern no user
        answers: list[Answer] = []
        for each in request.each_chunk():
            try:
                planner = Planner.of(
                    joint, each, on_progress=lambda text: report(f"batch {batch}: {text}")
                )
            except PlanError:
                if not answers:
                    raise
                break  # the loss cannot be split
            fitting = StepFit(planner=planner, rank=rank, other_bytes=job.other_bytes)
            try:
                row = fitting.row(batch, job.others)
            except BudgetError as error:
                # A request of the user, such as MUST_CPU_OFFLOAD, exceeds a limit.
                least = rank.stepping_bytes + job.other_bytes
                row = FitRow(batch=batch, peak_bytes=least, reason=str(error))
            answers.append((replace(row, chunks=each.chunks), fitting.decisions))
            if row.fits and not row.recompute_s:
                break  # more chunks only make the step dearer
        return min(answers, key=_by_speed)


def _by_speed(answer: Answer) -> tuple[float, bool, int]:
    """Return a sort key for the rows planned for one batch size; the best row has the least key."""
    # Plans that fit come first, fastest first. All other answers follow, lowest peak first: those without a proof
    # that no plan fits before those with a proof.
    row, _ = answer
    return -(row.samples_per_s or 0.0), row.proven, row.peak_bytes


# Arguments of `fit`, parsed -----------------------------------------------------------------------


def read_memory(memory: object) -> int:
    """Convert a memory size, which is text with a unit or a number of bytes, to bytes.

    Raises:
        BudgetError: the text has no unit or cannot be parsed, or the number is too small.
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


def read_margin(margin: object) -> float:
    """Return the part of the memory that a step must leave free, such as 0.05 for ``"5%"`` or 0.05.

    Raises:
        ProblemError: the margin is neither a percentage nor a number, is negative, or is 100 % or more.
    """
    text = margin.strip() if isinstance(margin, str) else ""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(margin)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share < 1:
        raise ProblemError(
            f"margin is {margin!r}; expected the part of the memory to leave free: '5%', or a number from 0 to "
            "below 1 such as 0.05"
        )
    return share


def read_batches(batches: object) -> tuple[int, ...]:
    """Check batch sizes, and return them sorted, without duplicates; empty for ``"max"``.

    Raises:
        ProblemError: a batch is not a whole number of 1 or more, or there are no batches.
    """
    if batches == "max":
        return ()
    if isinstance(batches, str):
        # A number of thousands of digits is refused as text, because `int` fails at it.
        parts = map(str.strip, batches.split(","))
        batches = [int(p) if p.isdecimal() and len(p) < 10 else p for p in parts if p]
    given = [batches] if isinstance(batches, int) else batches
    listed: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for batch in listed:
        # Not `isinstance`, because True and False are ints.
        if type(batch) is not int or batch < 1:
            raise ProblemError(
                f"batch is {batch!r}; expected whole numbers of 1 or more, such as 1, 2, 4, or 'max' for "
                "the largest that fits"
            )
    if not listed:
        raise ProblemError("batches is empty; expected whole numbers such as 1, 2, 4, or 'max'")
    return tuple(sorted(set(listed)))


def read_args(args: Any, kwargs: Mapping[str, Any] | None) -> Callable[[int], Arguments]:
    """Return a function that takes a batch size and returns positional and keyword arguments for the model."""
    if not callable(args):
        return varied(*read_call(args, kwargs))
    if kwargs is not None:
        raise ProblemError(
            "kwargs are given beside a callable that makes the arguments for a batch; let it return "
            "(args, kwargs)"
        )

    def arguments(batch: int) -> Arguments:
        returned = args(batch)
        if isinstance(returned, Mapping):
            return read_call((), returned)
        if isinstance(returned, torch.Tensor):
            return (returned,), {}
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            positional = returned[0]
            if isinstance(positional, (tuple, list)):
                return read_call(positional, returned[1])
        return read_call(returned, None)

    return arguments


def varied(args: Any, kwargs: Mapping[str, Any]) -> Callable[[int], Arguments]:
    """Return a function that copies a call's arguments, with a given batch size as first dimension of every tensor.

    The tensors in the copied arguments are uninitialised.

    Raises:
        ProblemError: the tensors have different first dimensions, or no tensor has a dimension.
    """
    tensors = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    sizes = sorted({int(t.shape[0]) for t in tensors if t.dim()})
    if len(sizes) != 1:
        raise ProblemError(
            f"the tensors of a call have first dimensions {', '.join(map(str, sizes)) or 'none'}; "
            "expected one, the batch: give a callable that makes the arguments for a batch, such as "
            "lambda batch: (torch.empty(batch, 1024, device='meta'),)"
        )

    def arguments(batch: int) -> Arguments:
        def resized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            # A copy keeps `requires_grad`, which marks the parameters of a function.
            like = value.new_empty((batch, *value.shape[1:]))
            return like.requires_grad_(value.requires_grad)

        return pytree.tree_map(resized, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]

    return arguments
