"""Measure the bytes that are alive while a training step runs.

`remat.graph.memory.liveness` predicts the bytes that are alive. The measurement method *storages* uses
a dispatch mode to see the results of all operators, and finalisers to see when each storage is freed.
The measurement method *allocator* uses the statistics of CUDA's allocator or, on the CPU, the
profiler's record of allocations. Only the method *allocator* includes memory that an operator allocates
and frees internally, such as the workspace of a convolution.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from remat import torch_compat
from remat.errors import CaptureError, ProblemError
from remat.graph.memory.host_copies import OFFLOAD
from remat.graph.memory.storages import storage_of, tensors_of
from remat.running.differences import as_integers

#: Largest number of runs before the measured run. Several of these runs may compile the step,
#: because a step may change state that its compiled code depends on.
_WARM_UP = 5
_LOG_LEVEL = "KINETO_LOG_LEVEL"
#: Block size in bytes of CUDA's caching allocator: ``kMinBlockSize`` in CUDACachingAllocator.
_CUDA_BLOCK_BYTES = 512
#: Number of elements that `_checksum` sums at a time.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured memory of one step.

    Attributes:
        peak_bytes: most bytes alive at the same time, including parameters, buffers and inputs.
        input_bytes: bytes of parameters, buffers and inputs.
    """

    peak_bytes: int
    input_bytes: int


def measure_step(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    resident: Iterable[torch.Tensor] = (),
    by: str | None = None,
) -> Measured:
    """Run a step until a run compiles nothing, then run the step once more and measure the memory of that run.

    A run is one forward and one backward, with a gradient of ones for every output that requires a
    gradient. After the last run, buffers, inputs, gradients and the states of random generators are
    restored.

    Args:
        fn: a module or function, usually compiled. The measured bytes include a module's parameters and
            buffers.
        args: positional arguments for ``fn``.
        kwargs: keyword arguments for ``fn``.
        resident: further tensors that are alive during the step; the measured bytes include them.
        by: the method of measurement, ``"storages"`` (CPU only) or ``"allocator"``. None: ``"storages"``
            on the CPU, ``"allocator"`` on CUDA, whose allocator rounds each allocation up to 512 bytes.

    Raises:
        CaptureError: no output of ``fn`` requires a gradient.
        ProblemError: ``by`` is invalid for the device, or the step wrote to a frozen parameter.
    """
    named = dict(kwargs or {})
    tensors = [*tensors_of((tuple(args), named)), *resident]
    if isinstance(fn, torch.nn.Module):
        tensors += [*fn.parameters(), *fn.buffers()]
    tensors = list({id(t): t for t in tensors}.values())
    device = device_of(tensors)
    methods = {"allocator": _by_cuda} if device.type == "cuda" else _ON_CPU
    by = next(iter(methods)) if by is None else by
    if by not in methods:
        raise ProblemError(
            f"by is {by!r}; expected {' or '.join(map(repr, methods))} for a step on {device.type}"
        )
    with as_before(tensors, device):
        for _ in range(_WARM_UP):
            before = torch_compat.counters["stats"]["unique_graphs"]
            run_backward(run_forward(fn, args, named))
            _forget_gradients(tensors)
            if torch_compat.counters["stats"]["unique_graphs"] == before:
                break
        return methods[by](lambda: run_forward(fn, args, named), tensors, device)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the first CUDA device among the devices of tensors; the CPU if there is none."""
    return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))


#: Pair: the result of a call, and an empty tensor whose ``backward()`` runs backward of all outputs.
Result = tuple[Any, torch.Tensor]
_Step = Callable[[], Result]
_Method = Callable[[_Step, Sequence[torch.Tensor], torch.device], Measured]


def run_forward(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Result:
    """Call ``fn``; return its result and an empty tensor whose ``backward()`` runs backward of all outputs.

    Raises:
        CaptureError: no output requires a gradient.
    """
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
    """Run backward of all outputs of a `run_forward` result, with gradients of ones."""
    seed = result[1]  # empty, so that its own gradient takes no memory
    seed.backward(seed.detach())  # type: ignore[no-untyped-call]


class _Seed(torch.autograd.Function):
    """Autograd function whose backward returns a gradient of ones for each input."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.like = [(v.shape, v.dtype, v.device) for v in outputs]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Only the engine holds these gradients, so each one is freed as soon as it is used.
        return tuple(torch.ones(s, dtype=t, device=d) for s, t, d in ctx.like)


@contextlib.contextmanager
def as_before(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[None]:
    """After the ``with`` block, restore the buffers, inputs, gradients and random generators' states of a step.

    All gradients are set to None before the ``with`` block runs. A frozen parameter is not restored.

    Args:
        tensors: parameters, buffers and inputs of the step.
        device: the device of the step; the state of the random generator of this device is restored.

    Raises:
        ProblemError: the step wrote to a frozen parameter: one that requires no gradient.
    """
    # Copies of frozen parameters might take most of the memory, and a step should only read them.
    frozen = [(t, _checksum(t)) for t in tensors if _is_frozen(t)]
    values = [(t, t.detach().clone()) for t in tensors if not t.requires_grad and not _is_frozen(t)]
    gradients = [(t, t.grad) for t in tensors if t.requires_grad and t.is_leaf]
    # If gradients existed, backward would add to them, and the peak would differ.
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
    """Whether a tensor is a contiguous parameter that does not require a gradient."""
    return (
        type(tensor) is torch.nn.Parameter
        and not tensor.requires_grad
        and not tensor.is_meta
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def _checksum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's elements, where each element's bits count as an integer."""
    # Chunks, so that no large copy is made. A write through `.data` does not change the version counter.
    bits = as_integers(tensor.detach().reshape(-1))
    return sum(int(bits[at : at + _CHUNK].sum()) for at in range(0, len(bits), _CHUNK))


def _forget_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """Set the gradients of the leaf tensors among ``tensors`` to None."""
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf:
            tensor.grad = None


def _by_storages(step: _Step, inputs: Sequence[torch.Tensor], _: torch.device) -> Measured:
    """Run a step and measure its memory by tracking storages; the storages of ``inputs`` are alive from the start."""
    tracker = StorageTracker()
    for tensor in inputs:
        tracker.add(tensor)
    input_bytes = tracker.current
    with tracker:
        run_backward(step())
    return Measured(peak_bytes=tracker.peak, input_bytes=input_bytes)


def _by_profiler(step: _Step, inputs: Sequence[torch.Tensor], _: torch.device) -> Measured:
    """Run a step and measure its memory by the profiler's record of CPU allocations."""
    input_bytes = _bytes_of(inputs)
    with allocations() as events:
        run_backward(step())
    return Measured(
        peak_bytes=max(accumulate(events, initial=input_bytes)), input_bytes=input_bytes
    )


@contextlib.contextmanager
def allocations() -> Iterator[list[int]]:
    """Yield a list; when the ``with`` block ends, append the bytes of each CPU allocation in the block, in order.

    For each deallocation, the negated number of bytes is appended to the list.
    """
    sizes: list[int] = []
    level = os.environ.get(_LOG_LEVEL)
    # Kineto reads this variable once. Without the variable, Kineto logs to stderr.
    os.environ.setdefault(_LOG_LEVEL, "6")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    try:
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            yield sizes
    finally:
        if level is None:
            del os.environ[_LOG_LEVEL]
    events: Any = profile.profiler.kineto_results.events()
    in_order = sorted(events, key=lambda event: event.start_ns())
    sizes += [event.nbytes() for event in in_order if event.name() == "[memory]"]


def _by_cuda(step: _Step, inputs: Sequence[torch.Tensor], device: torch.device) -> Measured:
    """Run a step and measure its memory by the statistics of CUDA's allocator."""
    input_bytes = _bytes_of(t for t in inputs if t.device == device)
    torch.cuda.synchronize(device)
    # Memory of other tensors on the device is subtracted from the peak.
    others = torch.cuda.memory_allocated(device) - input_bytes
    torch.cuda.reset_peak_memory_stats(device)
    run_backward(step())
    return Measured(
        peak_bytes=torch.cuda.max_memory_allocated(device) - others, input_bytes=input_bytes
    )


_ON_CPU: Mapping[str, _Method] = {"storages": _by_storages, "allocator": _by_profiler}


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that a device allocates for the distinct storages of tensors."""
    storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors)}
    return sum(allocated_bytes(s.nbytes(), s.device) for s in storages.values())


def allocated_bytes(nbytes: int, device: torch.device) -> int:
    """Return the bytes that a device allocates for a storage; CUDA's allocator rounds up to blocks."""
    block = _CUDA_BLOCK_BYTES if device.type == "cuda" else 1
    return -(-nbytes // block) * block


class StorageWatch(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that reports when operators return storages, and when these storages are freed.

    A subclass of `StorageWatch` defines `on_storage` and `on_free`. `StorageWatch.add` reports a storage that existed
    before the dispatch mode was entered. The dispatch mode sees the results of a higher-order operator, but not the
    operators inside the higher-order operator.
    """

    # Otherwise PyTorch refuses to run higher-order operators under the mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, Any] = {}  # by storage id: the result of `on_storage`
        self._on_host: set[int] = set()

    def on_storage(self, state: Any, nbytes: Any, source: str) -> Any:
        """Handle a storage that an operator returned, or that the caller passed to `add`.

        Args:
            state: the value that the last call of `on_storage` for this storage returned; None for a
                new storage.
            nbytes: bytes of the storage, which may have been resized since the last call.
            source: name of the operator that returned the storage, or the text that `add` was given.

        Returns:
            A value to pass to `on_free`, and as ``state`` to the next call of `on_storage` for this
            storage.
        """
        raise NotImplementedError

    def on_free(self, state: Any) -> None:
        """Handle the freeing of a storage; ``state`` is the last value that `on_storage` returned for the storage."""
        raise NotImplementedError

    def add(self, tensor: torch.Tensor, source: str = "") -> None:
        """Report the storage of a tensor to `on_storage` now, and to `on_free` when the storage is freed."""
        storage = storage_of(tensor)
        if storage is None:
            return
        key = torch_compat.storage_id(storage)
        if key in self._on_host:
            return
        if key not in self._alive:
            # atexit=False: no call is needed for storages that live until the interpreter ends.
            weakref.finalize(storage, self._end, key).atexit = False
        self._alive[key] = self.on_storage(self._alive.get(key), storage.nbytes(), source)

    def _end(self, key: int) -> None:
        self.on_free(self._alive.pop(key))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is OFFLOAD:  # host copies are not in device memory
            storage = out.untyped_storage()
            key = torch_compat.storage_id(storage)
            self._on_host.add(key)
            weakref.finalize(storage, self._on_host.discard, key).atexit = False
        for value in tensors_of(out):
            self.add(value, str(func))
        return out


class StorageTracker(StorageWatch):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks the bytes of alive storages, which operators return or the caller passes to `add`.

    Compiled code runs unchanged under this dispatch mode.

    Attributes:
        current: bytes of tracked storages that are alive now.
        peak: most bytes of tracked storages that were alive at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise Dynamo runs the original code instead of the compiled code

    def on_storage(self, state: int | None, nbytes: int, source: str) -> int:
        self.current += nbytes - (state or 0)
        return nbytes

    def on_free(self, state: int) -> None:
        self.current -= state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.current)
        return out
