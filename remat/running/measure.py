"""Bytes really alive while a training step runs: the other side of `remat.graph.liveness`.

Counted in one of two ways. By *storages*: a dispatch mode sees what every operator returns, and
finalisers see when that memory goes. By the *allocator*: CUDA's statistics, or on the CPU the
profiler's record of every allocation. What an operator allocates and frees by itself, such as the
workspace of a convolution, is seen by the allocator only.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat import torch_compat
from remat.errors import CaptureError, ProblemError
from remat.graph.host_copies import OFFLOAD
from remat.graph.storages import tensors_of

#: Runs before the one that is measured, at most; a step may compile more than once as it changes
#: its own state.
_WARM_UP = 5
_BACKWARD = "remat::backward"
_LOG_LEVEL = "KINETO_LOG_LEVEL"
#: Elements of a parameter that are summed up at once.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Memory of one step that ran.

    Attributes:
        peak_bytes: most bytes alive at once, parameters, buffers and inputs included.
        forward_peak_bytes: most bytes alive at once before backward began.
        input_bytes: bytes of parameters, buffers and inputs.
    """

    peak_bytes: int
    forward_peak_bytes: int
    input_bytes: int


def measure_step(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    resident: Iterable[torch.Tensor] = (),
    by: str | None = None,
) -> Measured:
    """Runs forward and backward of one step until nothing more is compiled, and measures one run.

    Every output that requires a gradient is given one (of ones), as a loss outside of ``fn`` would.
    Buffers, inputs, gradients and the state of the random number generators are as before when it returns.
    Frozen parameters are checked instead, so that no copy of them is made.

    Args:
        fn: a module or function, usually a compiled one; its parameters and buffers count.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        resident: more tensors that are alive during the step and count.
        by: ``"storages"`` (on the CPU only) or ``"allocator"``; None: by storages on the CPU, by the
            allocator on CUDA, which counts blocks of 512 bytes.

    Raises:
        CaptureError: no output of ``fn`` requires a gradient.
        ProblemError: ``by`` is something else, or not possible on the device; or the step has written to
            a frozen parameter.
    """
    named = dict(kwargs or {})
    given = [*tensors_of((tuple(args), named)), *resident]
    if isinstance(fn, torch.nn.Module):
        given += [*fn.parameters(), *fn.buffers()]
    given = list({id(t): t for t in given}.values())
    device = next((t.device for t in given if t.device.type == "cuda"), torch.device("cpu"))
    measure = _way(by, device)
    with as_before(given, device):
        for _ in range(_WARM_UP):
            before = torch_compat.counters["stats"]["unique_graphs"]
            run_backward(run_forward(fn, args, named))
            _forget_gradients(given)
            if torch_compat.counters["stats"]["unique_graphs"] == before:
                break
        return measure(lambda: run_forward(fn, args, named), given, device)


def measure_held(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> int:
    """Bytes that autograd is given to hold until backward: storages beyond parameters, inputs and outputs."""
    named = dict(kwargs or {})
    kept: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        out = fn(*args, **named)
    given = tensors_of((tuple(args), named, out))
    if isinstance(fn, torch.nn.Module):
        given += [*fn.parameters(), *fn.buffers()]
    there = {s.data_ptr() for s in _storages(given)}
    sizes = {s.data_ptr(): s.nbytes() for s in _storages(kept)}
    return sum(nbytes for key, nbytes in sizes.items() if key not in there)


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    return (t.untyped_storage() for t in tensors)


#: What a call returns, and a seed from which backward through all of it starts.
Result = tuple[Any, torch.Tensor]
_Step = Callable[[], Result]
_Way = Callable[[_Step, Sequence[torch.Tensor], torch.device], Measured]


def _way(by: str | None, device: torch.device) -> _Way:
    known = {"allocator": _by_cuda} if device.type == "cuda" else _ON_CPU
    if by is None:
        return next(iter(known.values()))
    if by not in known:
        raise ProblemError(
            f"by is {by!r}; expected {' or '.join(map(repr, known))} for a step on {device.type}"
        )
    return known[by]


def run_forward(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Result:
    """What a call returns, and a seed from which backward through all of it starts."""
    out = fn(*args, **kwargs)
    leaves = [v for v in tensors_of(out) if v.requires_grad]
    if not leaves:
        raise CaptureError(
            "no output of the step requires a gradient, so it has no backward to measure; return a "
            "tensor that depends on a parameter"
        )
    seed: torch.Tensor = _Seed.apply(*leaves)  # type: ignore[no-untyped-call]
    return out, seed


def run_backward(result: Result) -> None:
    seed = result[1]
    seed.backward(seed.detach())  # type: ignore[no-untyped-call]


class _Seed(torch.autograd.Function):
    """Gives each of its inputs a gradient of ones, which the autograd engine alone holds."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.like = [(v.shape, v.dtype, v.device) for v in outputs]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones(s, dtype=t, device=d) for s, t, d in ctx.like)


@contextlib.contextmanager
def as_before(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Puts values of buffers and inputs, gradients and random states back.

    Frozen parameters are not copied, as they may be most of the memory, and a step should only read them.

    Raises:
        ProblemError: the step has written to a frozen parameter.
    """
    frozen = [(t, _checksum(t)) for t in tensors if _is_frozen(t)]
    values = [(t, t.detach().clone()) for t in tensors if not t.requires_grad and not _is_frozen(t)]
    gradients = [(t, t.grad) for t in tensors if t.requires_grad and t.is_leaf]
    _forget_gradients(tensors)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for leaf, gradient in gradients:
            leaf.grad = gradient
    changed = [t for t, before in frozen if _checksum(t) != before]
    if changed:
        shapes = ", ".join(str(tuple(t.shape)) for t in changed[:3])
        raise ProblemError(
            f"the step has written to {len(changed)} of {len(frozen)} frozen parameters (of shape {shapes}"
            f"{', …' if len(changed) > 3 else ''}), which are not put back: load them again, and measure the "
            "step without what updates them, or with buffers in their place"
        )


def _is_frozen(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a frozen parameter whose memory can be read element by element."""
    return (
        type(tensor) is torch.nn.Parameter
        and not tensor.requires_grad
        and not tensor.is_meta
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def _checksum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's elements as integers, a chunk at a time, so that no copy is large.

    A version counter would not do: writing through ``.data`` leaves it as it is.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    read = tensor.detach().reshape(-1).view(integers.get(tensor.itemsize, torch.int64))
    return sum(int(read[at : at + _CHUNK].sum()) for at in range(0, len(read), _CHUNK))


def _forget_gradients(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf:
            tensor.grad = None


def _by_storages(step: _Step, inputs: Sequence[torch.Tensor], _: torch.device) -> Measured:
    tracker = StorageTracker()
    for tensor in inputs:
        tracker.add(tensor)
    input_bytes = tracker.current
    with tracker:
        result = step()
        forward_peak = tracker.peak
        run_backward(result)
    return Measured(
        peak_bytes=tracker.peak,
        forward_peak_bytes=forward_peak,
        input_bytes=input_bytes,
    )


def _by_profiler(step: _Step, inputs: Sequence[torch.Tensor], _: torch.device) -> Measured:
    input_bytes = _bytes_of(inputs, 1)
    with allocations() as events:
        result = step()
        with torch.profiler.record_function(_BACKWARD):
            run_backward(result)
    current = peak = forward_peak = input_bytes
    for nbytes in events:
        if nbytes is None:
            forward_peak = peak
        else:
            current += nbytes
            peak = max(peak, current)
    return Measured(
        peak_bytes=peak,
        forward_peak_bytes=forward_peak,
        input_bytes=input_bytes,
    )


@contextlib.contextmanager
def allocations() -> Iterator[list[int | None]]:
    """Fills a list with the bytes of each allocation on the CPU, those freed below 0; None where backward begins.

    It is filled when the context ends.
    """
    found: list[int | None] = []
    level = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "6")  # read once: Kineto tells on stderr of every session
    cpu = [torch.profiler.ProfilerActivity.CPU]
    try:
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            yield found
    finally:
        if level is None:
            del os.environ[_LOG_LEVEL]
    events: Any = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            found.append(event.nbytes())
        elif event.name() == _BACKWARD:
            found.append(None)


def _by_cuda(step: _Step, inputs: Sequence[torch.Tensor], device: torch.device) -> Measured:
    input_bytes = _bytes_of([t for t in inputs if t.device == device], 512)
    torch.cuda.synchronize(device)
    others = torch.cuda.memory_allocated(device) - input_bytes
    torch.cuda.reset_peak_memory_stats(device)
    result = step()
    forward_peak = torch.cuda.max_memory_allocated(device)
    run_backward(result)
    return Measured(
        peak_bytes=torch.cuda.max_memory_allocated(device) - others,
        forward_peak_bytes=forward_peak - others,
        input_bytes=input_bytes,
    )


_ON_CPU: Mapping[str, _Way] = {"storages": _by_storages, "allocator": _by_profiler}


def _bytes_of(tensors: Iterable[torch.Tensor], block: int) -> int:
    """Bytes of distinct storages, each in whole blocks."""
    sizes = {s.data_ptr(): s.nbytes() for s in _storages(tensors)}
    return sum(-(-n // block) * block for n in sizes.values())


class StorageTracker(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operators return, until they are freed.

    Storages from before count once they are added. Compiled code runs under it as it is: every
    operator that it calls is seen, higher-order ones from outside. What `remat.graph.host_copies` puts in the
    host's memory is not the device's, and left out.

    Attributes:
        current: bytes alive now.
        peak: most bytes alive at once.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._alive: dict[int, int] = {}
        self._on_host: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else Dynamo runs the original code instead of what it compiled

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the storage of a tensor from now on."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse and other layouts without one storage
            return
        key, nbytes = torch_compat.storage_id(storage), storage.nbytes()
        if key in self._on_host:
            return
        if key not in self._alive:
            weakref.finalize(storage, self._freed, key).atexit = False
        self.current += nbytes - self._alive.get(key, 0)
        self._alive[key] = nbytes

    def _freed(self, key: int) -> None:
        self.current -= self._alive.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is OFFLOAD:
            storage = out.untyped_storage()
            key = torch_compat.storage_id(storage)
            self._on_host.add(key)
            weakref.finalize(storage, self._on_host.discard, key).atexit = False
        for value in tensors_of(out):
            self.add(value)
        self.peak = max(self.peak, self.current)
        return out
