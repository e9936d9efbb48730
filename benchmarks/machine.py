"""The machine that benchmarks run on: what it is, and how it is kept quiet."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import remat


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Some builds of the profiler announce themselves on the terminal."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


#: glibc's allocator keeps what is freed.
_KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}


def keep_freed_memory() -> None:
    """Runs the program again with an allocator that keeps freed memory, unless it runs with one.

    glibc gives large blocks back to the system and takes them anew at each step, a page fault for every 4 KiB. In a
    step of a BERT within 0.4 of its bytes they took as long as its recomputing, and they come as the system
    likes. PyTorch's guide to tuning on a CPU names other allocators that keep memory.
    """
    if not _KEPT.keys() <= os.environ.keys():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **_KEPT})


def describe_cpu() -> str:
    """The model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def header(benchmark: str) -> dict[str, Any]:
    """What every report says first: which benchmark, when, of what, and where."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "remat": remat.__version__,
        "cpu": describe_cpu(),
        "threads": torch.get_num_threads(),
    }
