"""Really running things: which devices there are, how much memory is free, how long a call takes."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from remat import torch_compat

#: Bytes overwritten before each run on a GPU, so that none finds its inputs in the cache.
_FLUSH_BYTES = 256 * 2**20
#: A run that takes longer than this is not repeated more than once.
_LONG_S = 1.0


def is_present(device: torch.device) -> bool:
    """Whether things can be run on a device here, now: the CPU, or a CUDA device that exists."""
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return device.type == "cpu"


def this_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return whole(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def whole(device: torch.device) -> torch.device:
    """A device with its number, where it is one that is numbered and exists."""
    if device.type != "cuda":
        return torch.device(device.type)
    index: int | None = device.index
    if index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def describe_device(device: torch.device) -> str:
    """The maker's name of a device; of the CPU also how many threads PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that can still be had on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_available_bytes(), *_group_bytes()])


def durations_ps(
    run: Callable[[], object], device: torch.device, *, seconds: float, most: int = 20
) -> list[int]:
    """Picoseconds that each of several runs takes, after one to warm up.

    A run that takes more than twice as long as the fastest was interrupted by something else on the
    machine: it is left out, and made up for while there is time.

    Args:
        run: what to run; what it returns is dropped after the clock has stopped.
        device: where it runs; CUDA devices are timed by events.
        seconds: stop after about so long, yet not before three runs (one, of something slow);
            after five times as long where most of them are interrupted.
        most: the most runs.
    """
    warm_s = _once_s(run, device)
    if device.type == "cuda":  # the very first run loads libraries
        warm_s = _once_s(run, device)
    least = 1 if warm_s > _LONG_S else 3
    if device.type == "cuda":
        return undisturbed_ps(_cuda_ps(run, device, max(least, min(most, int(seconds / warm_s)))))
    found: list[int] = []
    while len(found) < most:
        begin = time.perf_counter_ns()
        result = run()
        found.append((time.perf_counter_ns() - begin) * 1000)
        del result
        patience = 1 if len(undisturbed_ps(found)) >= least else 5
        if len(found) >= least and sum(found) >= patience * seconds * 1e12:
            break
    return undisturbed_ps(found)


def _once_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds on the wall that one run takes, roughly."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def undisturbed_ps(times: Sequence[int]) -> list[int]:
    """Those of several times of the same thing that are at most twice the shortest."""
    limit = 2 * min(times)
    return [t for t in times if t <= limit]


def _cuda_ps(run: Callable[[], object], device: torch.device, count: int) -> list[int]:
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
    """Runs what is inside on real tensors whatever surrounds it, and leaves no trace.

    Dispatch modes (a fake one, when planning inside of ``torch.compile``), autograd and autocast
    are off, warnings are dropped, and every generator is as it was afterwards.
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
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "CPU"


def _available_bytes() -> int:
    """What the machine can still give, by its kernel."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 2 * 2**30


def _group_bytes() -> list[int]:
    """What the control group of a container can still give, where there is a limit."""
    groups = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            return [max(0, int((groups / limit).read_text()) - int((groups / used).read_text()))]
    return []
