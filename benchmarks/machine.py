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
