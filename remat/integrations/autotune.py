"""A step compiled by several plans, of which the fastest stays: timed on the user's inputs, remembered on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import fx

from remat import torch_compat
from remat.arguments import BUDGET, value_of
from remat.errors import ProblemError, RematError
from remat.files import Form, read_record, write_record, write_whole
from remat.graph.costs.auto import preset_of
from remat.graph.costs.measure import describe_device
from remat.graph.storages import hint
from remat.integrations import inductor_kernels
from remat.integrations.partitioner import Partitioner
from remat.passes.decide.min_cut import MinCut
from remat.passes.decide.torch_partition import TorchPartition
from remat.passes.ranks.protocol import other_ranks
from remat.planning.pipelines import PREPARE, SPLIT, PassManager
from remat.torch_compat import pytree
from remat.units import Budget
from remat.version import __version__

_LOG = logging.getLogger(__name__)

#: Plans that are compiled and timed, at most.
MOST = 4
#: Rounds in which each is run once, at least and at most, and seconds after which no further one begins.
_ROUNDS, _ENOUGH_S = (3, 15), 5.0
#: Options of the backend that say what decides: with them there is nothing to choose from.
_DECIDED = ("plan", "pipeline", "hooks")

_OVER = "keeps more than the budget allows"

Compile = Callable[[Partitioner], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What tuning found, as it lies on disk.

    Attributes:
        chosen: the candidate that was the fastest.
        seconds: of each candidate that was timed, the shortest that forward and backward took, and the median.
        left_out: why other candidates were not timed, by name.
        why: why nothing was compared; empty where something was.
    """

    form: ClassVar[Form] = Form("autotuning", "version", 2)

    chosen: str
    seconds: tuple[tuple[str, float, float], ...]
    left_out: tuple[tuple[str, str], ...] = ()
    why: str = ""

    def __str__(self) -> str:
        out = "; ".join(f"'{name}' {why}" for name, why in self.left_out)
        if not self.seconds:
            return f"{self.chosen}; nothing was compared: {self.why or out or 'no other plan was left'}"
        took = ", ".join(
            f"{name} {least * 1e3:.1f} ms (median {median * 1e3:.1f})"
            for name, least, median in self.seconds
        )
        return (
            f"{self.chosen}, the fastest of {len(self.seconds)} different plans as measured: {took}"
            f"{f'; left out: {out}' if out else ''}"
        )


def asked(given: Any, options: Mapping[str, Any], mode: str | None) -> int:
    """How many plans are to be timed; 1 for none.

    Args:
        given: the option ``autotune``, None where it is left out: 4 under ``mode="max-autotune"``, else 1.
        options: those of remat.
        mode: Inductor's.

    Raises:
        ProblemError: it is no number from 1 to 4, or an option says which plan to take.
    """
    decided = [name for name in _DECIDED if options.get(name) is not None]
    if given is None:
        return MOST if str(mode).startswith("max-autotune") and not decided else 1
    if type(given) is not int or not 1 <= given <= MOST:
        raise ProblemError(
            f"option 'autotune' is {given!r}; expected how many plans to compile and time, from 1 to {MOST}"
        )
    if given > 1 and decided:
        raise ProblemError(
            f"option 'autotune' chooses between plans, and '{decided[0]}' says which to take: leave one out"
        )
    return given


def candidates(
    options: Mapping[str, Any], count: int, inputs: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """Options by which the step is planned, by the name of each candidate; what was asked for comes first.

    Args:
        options: those of the user.
        count: how many there may be.
        inputs: what the step is called with.
    """
    types = [v.device.type for v in inputs if isinstance(v, torch.Tensor)]
    device = preset_of(max(types, key=types.count, default=""))
    budget = Budget.parse(value_of(options.get("budget", BUDGET)))
    deciding = ("budget", "solver", "cost", "time_limit")
    found: dict[str, dict[str, Any]] = {"as asked": dict(options)}
    if not budget.on_peak:
        theirs = PassManager((*PREPARE, MinCut(), TorchPartition(budget=budget), *SPLIT))
        others = {name: value for name, value in options.items() if name not in deciding}
        found["PyTorch's decision"] = {**others, "pipeline": theirs}
    for cost in ("profile", f"inductor:{device}", f"roofline-fused:{device}"):
        found[f"cost {cost}"] = {**options, "cost": cost}
    return dict(list(found.items())[:count])


def fastest(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partitions: Mapping[str, Partitioner],
    compile_with: Compile,
    *,
    key: str,
) -> tuple[Partitioner, Callable[..., Any]]:
    """Compiles a step by each candidate and keeps the fastest that holds its budget.

    Where the answer for the same graph, options, device and versions lies on disk, only that one is compiled. With
    several ranks, which must all run alike, the first candidate is taken.

    Args:
        gm: the graph of Dynamo's.
        inputs: what it is called with.
        partitions: the partitioner of each candidate, by name.
        compile_with: compiles the step by one.
        key: what decides besides the graph.

    Raises:
        RematError: the first candidate's, where none could be compiled.
    """
    first = next(iter(partitions.values()))
    if other_ranks() is not None:
        _LOG.info("autotune: there are several ranks, which must run alike; nothing is timed")
        compiled = compile_with(first)
        _tell(first, Tuned(chosen=next(iter(partitions)), seconds=(), why="ranks must run alike"))
        return first, compiled
    path = _path(gm, inputs, key)
    dropped: dict[str, str] = {}
    known = _read(path)
    if known is not None and known.chosen in partitions:
        partition = partitions[known.chosen]
        made, warned, _, dropped = _compiled({known.chosen: partition}, compile_with)
        if made and _holds(partition):
            _warn_again(warned[known.chosen])
            _tell(partition, known, f"; remembered from another run in {path}")
            return made[known.chosen]
        partition.use(None)
        dropped = dropped or {known.chosen: _OVER}
        partitions = {name: one for name, one in partitions.items() if name != known.chosen}
    with inductor_kernels.kernels_at_end(inputs):
        made, warned, failed, others = _compiled(partitions, compile_with)
    if not made:
        raise failed[0]
    why = ""
    seconds: dict[str, tuple[float, float]] = {}
    if len(made) > 1:
        try:
            seconds = _timed({name: compiled for name, (_, compiled) in made.items()}, inputs)
        except ProblemError as error:
            why = str(error)
    chosen = min(seconds, key=lambda name: seconds[name][0]) if seconds else next(iter(made))
    found = Tuned(
        chosen=chosen,
        seconds=tuple((name, *took) for name, took in seconds.items()),
        left_out=tuple({**dropped, **others}.items()),
        why=why,
    )
    partition, compiled = made[chosen]
    for name, (other, _) in made.items():
        if name != chosen:
            other.use(None)
    _warn_again(warned[chosen])
    _tell(partition, found)
    if seconds or len(made) == 1:
        _write(path, found)
    return partition, compiled


def _warn_again(seen: Sequence[warnings.WarningMessage]) -> None:
    for w in seen:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)


def _compiled(
    partitions: Mapping[str, Partitioner], compile_with: Compile
) -> tuple[
    dict[str, tuple[Partitioner, Callable[..., Any]]],
    dict[str, list[warnings.WarningMessage]],
    list[RematError],
    dict[str, str],
]:
    """The candidates that hold their budgets, each with what it warned of; errors of others; and why each is left out."""
    others: dict[str, str] = {}
    made: dict[str, tuple[Partitioner, Callable[..., Any]]] = {}
    warned: dict[str, list[warnings.WarningMessage]] = {}
    failed: list[RematError] = []
    over: dict[str, tuple[Partitioner, Callable[..., Any]]] = {}
    decisions: list[object] = []
    for name, partition in partitions.items():
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                compiled = compile_with(partition)
        except RematError as error:
            _LOG.info("autotune: '%s' is left out: %s", name, error)
            failed.append(error)
            others[name] = f"could not be compiled: {error}"
            continue
        warned[name] = seen
        plan = partition.made
        if plan is None:  # nothing to differentiate, so nothing to choose
            return {name: (partition, compiled)}, warned, failed, others
        if plan.decision in decisions:
            partition.use(None)
            others[name] = "makes the same plan"
            continue
        decisions.append(plan.decision)
        fits = _holds(partition)
        (made if fits else over)[name] = partition, compiled
        if not fits:
            others[name] = _OVER
    if not made:
        made = dict(list(over.items())[:1])
    for name, (partition, _) in over.items():
        if name not in made:
            partition.use(None)
    return made, warned, failed, {name: told for name, told in others.items() if name not in made}


def _holds(partition: Partitioner) -> bool:
    """Whether a compiled step holds its budget; one on the peak is refused where it does not."""
    plan = partition.made
    return plan is None or plan.asked.on_peak or plan.saved_bytes <= plan.capacity


def _timed(
    steps: Mapping[str, Callable[..., Any]], inputs: Sequence[Any]
) -> dict[str, tuple[float, float]]:
    """Seconds that forward and backward of each step took, over rounds in which each runs once: least and median.

    They run on copies of the inputs, without the user's saved-tensor hooks, and random states are put back:
    whatever a step changes, nobody sees.

    Raises:
        ProblemError: they cannot be run.
    """
    fakes = any(isinstance(v, torch_compat.FakeTensor) for v in inputs)
    if fakes:
        raise ProblemError("the inputs have no numbers to run on")
    taken: dict[str, list[float]] = {name: [] for name in steps}
    try:
        given = _copies(inputs)
        tensors = [v for v in given if isinstance(v, torch.Tensor)]
        device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        on_cuda = [device] if device.type == "cuda" else []
        with torch.enable_grad(), torch.random.fork_rng(devices=on_cuda), _unseen():
            for step in steps.values():
                _run(step, given, device)
            start = time.perf_counter()
            for turn in range(_ROUNDS[1]):
                names = list(steps)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    taken[name].append(_run(steps[name], given, device))
                if turn + 1 >= _ROUNDS[0] and time.perf_counter() - start > _ENOUGH_S:
                    break
    except (
        Exception
    ) as error:  # of any kind, from the user's code: it will show where the step really runs
        _LOG.info("autotune: the step could not be run on its inputs", exc_info=True)
        raise ProblemError(
            f"the step could not be run on its inputs ({type(error).__name__})"
        ) from error
    # What disturbs a run makes it longer.
    return {name: (min(found), statistics.median(found)) for name, found in taken.items()}


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Puts the states of Python's and NumPy's generators back, and keeps the user's saved-tensor hooks out."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda value: value):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Inputs of their own to run on; those that share memory share it in the copies too."""
    copied: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return hint(value)
        with torch.no_grad():
            if value.layout is not torch.strided:
                return value.detach().clone().requires_grad_(value.requires_grad)
            storage = value.untyped_storage()
            key = torch_compat.storage_id(storage)
            if key not in copied:
                every = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
                copied[key] = every.clone()
            own = copied[key].untyped_storage()
            made = torch.empty(0, dtype=value.dtype, device=value.device)
            made.set_(own, value.storage_offset(), value.size(), value.stride())
        return made.requires_grad_(value.requires_grad)

    return [copy(v) for v in inputs]


def _run(step: Callable[..., Any], given: Sequence[Any], device: torch.device) -> float:
    """Runs forward and backward once, and returns the seconds that this took."""
    _wait_for(device)
    start = time.perf_counter()
    out = [v for v in pytree.tree_leaves(step(*given)) if isinstance(v, torch.Tensor)]
    made = [v for v in out if v.requires_grad]
    wanted = [v for v in given if isinstance(v, torch.Tensor) and v.requires_grad]
    seeds = [torch.ones_like(v) for v in made]
    if made and wanted:
        torch.autograd.grad(made, wanted, seeds, allow_unused=True)
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tell(partition: Partitioner, found: Tuned, whence: str = "") -> None:
    """Notes on the plan of the chosen candidate what was measured."""
    _LOG.info("autotune: %s", found)
    plan = partition.made
    if plan is not None:
        partition.use(replace(plan, tuned=f"{found}{whence}"))


def _path(gm: fx.GraphModule, inputs: Sequence[Any], key: str) -> Path:
    codes = [m.code for m in gm.modules() if isinstance(m, fx.GraphModule)]
    tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
    devices = sorted({describe_device(t.device) for t in tensors})
    told = [
        codes,
        [_kind_of(v) for v in inputs],
        devices,
        torch.get_num_threads(),
        torch.__version__,
        __version__,
        key,
    ]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    return Path(torch_compat.cache_dir()) / "remat" / "autotune" / f"{digest}.json"


def _kind_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(hint(value))
    shape, stride = [*map(hint, value.shape)], [*map(hint, value.stride())]
    return f"{shape} {stride} {value.dtype} {value.requires_grad}"


def _read(path: Path) -> Tuned | None:
    try:
        return read_record(Tuned, path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or damaged
        return None


def _write(path: Path, found: Tuned) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write_record(found))
    except OSError:  # then it is measured again
        return
