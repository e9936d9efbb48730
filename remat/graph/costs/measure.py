"""Measure this machine: its devices, free memory, and the run time of a call."""

from __future__ import annotations

import contextlib
import functools
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from remat import torch_compat

#: Bytes overwritten before each run on a GPU, so that no run finds its inputs in the cache.
_FLUSH_BYTES = 256 * 2**20
#: If the warm-up run takes longer than this number of seconds, a single timed run suffices.
_LONG_S = 1.0


def is_present(device: torch.device) -> bool:
    """Return whether a device is the CPU or one of this machine's CUDA devices."""
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return device.type == "cpu"


def this_device() -> torch.device:
    """Return the current CUDA device, or the CPU on a machine without CUDA."""
    return with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def with_index(device: torch.device) -> torch.device:
    """Return a device in full form: ``cuda`` becomes the current CUDA device; other types lose their index."""
    if device.type != "cuda":
        return torch.device(device.type)
    index: int | None = device.index
    if index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def describe_device(device: torch.device) -> str:
    """Return the product name of a device; for a CPU, add the number of PyTorch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_available_bytes(), *_group_bytes()])


def durations_ps(
    run: Callable[[], object], device: torch.device, *, seconds: float, most: int = 20
) -> list[int]:
    """Return the durations of several runs of a function in picoseconds, after a warm-up run.

    Args:
        run: function to time; its result is freed after the clock has stopped.
        device: device that runs the function; runs on a CUDA device are timed with CUDA events.
        seconds: limit on the total time of the runs. At least three runs are made, or one if the
            warm-up run took more than 1 s.
        most: largest number of runs.
    """
    warm_s = once_s(run, device)
    if device.type == "cuda":  # the very first run loads libraries
        warm_s = once_s(run, device)
    least = 1 if warm_s > _LONG_S else 3
    if device.type == "cuda":
        # Events are read after all runs, so their number is fixed before.
        return undisturbed_ps(_cuda_ps(run, device, max(least, min(most, int(seconds / warm_s)))))
    times: list[int] = []
    while len(times) < most:
        begin = time.perf_counter_ns()
        result = run()
        times.append((time.perf_counter_ns() - begin) * 1000)
        # Freeing the result must not be timed.
        del result
        # Other work on the machine may have disturbed the runs. Five times the limit allows for more of them.
        patience = 1 if len(undisturbed_ps(times)) >= least else 5
        if len(times) >= least and sum(times) >= patience * seconds * 1e12:
            break
    return undisturbed_ps(times)


def once_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the wall time of one run of a function on a device, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def undisturbed_ps(times: Sequence[int]) -> list[int]:
    """Return those of the durations, in picoseconds, that are at most twice the shortest duration."""
    # A longer run was disturbed by other work on the machine.
    limit = 2 * min(times)
    return [t for t in times if t <= limit]


def _cuda_ps(run: Callable[[], object], device: torch.device, count: int) -> list[int]:
    """Return the duration of each of ``count`` runs on a CUDA device in picoseconds."""
    flush_bytes = min(_FLUSH_BYTES, free_bytes(device) // 4)
    with torch.cuda.device(device):
        flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)
        marks = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            for _ in range(count)
        ]
        for begin, end in marks:
            flush.zero_()  # also keeps the device busy while the host prepares the run
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(device)
        return [round(begin.elapsed_time(end) * 1e9) for begin, end in marks]


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Let a ``with`` block run operators on real tensors of a device without side effects.

    Inside of the block, dispatch modes (such as a fake mode during ``torch.compile``), autograd and
    autocast are off, and warnings are dropped. Afterwards, the states of random generators are
    restored.
    """
    cuda = [device.index] if device.type == "cuda" else []
    with (
        torch_compat.disable_current_modes(),
        torch_compat.DisableTorchFunction(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices=cuda),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _processor() -> str:
    """Return the product name of this machine's CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "CPU"


def _available_bytes() -> int:
    """Return the bytes of host memory that Linux still has available."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _group_bytes() -> list[int]:
    """Return the bytes that a container's control group (cgroup) still allows, as a list; empty without a limit."""
    groups = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            return [max(0, int((groups / limit).read_text()) - int((groups / used).read_text()))]
    return []
