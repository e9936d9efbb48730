"""What every benchmark is: cases of (workload, budget, side), a function that measures them, and a file of rows."""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.figures import Row
from benchmarks.tables import RESULTS

#: Seconds after which a process that yields nothing is killed.
LIMIT_S = 3600
INSTANCES = Path(__file__).parent / "instances"
#: The environment of an allocator that keeps freed memory: else glibc gives large blocks back to the system, which clears
#: pages anew at each step.
KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure.

    Attributes:
        workload: name of a model, a graph, or a set of problems.
        budget: as the experiment means it: a ratio, a share of the peak, or None.
        side: who decides, or by which lowering: the experiment says.
    """

    workload: str
    budget: Any = None
    side: str = "remat"

    def row(self, **figures: Any) -> Row:
        """A row of the results: the case and its figures."""
        return {**asdict(self), **figures}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A benchmark.

    Attributes:
        name: its key in ``EXPERIMENTS``, and its subcommand. Its results are in ``results/NAME.json``, with underscores.
        about: what it measures, in a line.
        cases: all of its cases.
        quick: those of ``--quick``, which take less than a minute or so.
        measure: measures the cases of one workload; the last argument says whether to be quick about it.
        summarise: figures over all rows.
        tables: names in `benchmarks.tables` that show the results; by default the one of the experiment's name.
        missed: from the summary, what falls short of what the experiment demands.
        environment: of a process for each workload; None to measure all in one process.
    """

    name: str = ""
    about: str
    cases: tuple[Case, ...]
    quick: tuple[Case, ...]
    measure: Callable[[str, Sequence[Case], bool], Iterable[Row]]
    summarise: Callable[[list[Row]], Row] = field(default=lambda rows: {})
    tables: tuple[str, ...] = ()
    missed: Callable[[Row], list[str]] = field(default=lambda summary: [])
    environment: Mapping[str, str] | None = None


def grid(
    workloads: Iterable[str],
    budgets: Iterable[float | None] = (None,),
    sides: Iterable[str] = ("remat",),
) -> tuple[Case, ...]:
    """Every workload at every budget by every side."""
    cells = itertools.product(workloads, budgets, sides)
    return tuple(Case(workload=name, budget=budget, side=side) for name, budget, side in cells)


def measured(experiment: Experiment, cases: Sequence[Case], *, quick: bool) -> Iterator[Row]:
    """Measures the cases of one workload, and prints each row as a line of JSON."""
    silence()
    given = (cases[0].workload, cases, quick)
    if experiment.environment is None:
        rows = iter(experiment.measure(*given))
    else:
        rows = in_process(experiment.measure, *given, environment=experiment.environment)
    for row in rows:
        print(json.dumps(row), flush=True)
        yield row


def in_process(
    work: Callable[..., Iterable[Row]],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    within_s: float | None = None,
) -> Iterator[Row]:
    """Runs a generator of rows in a new process.

    Args:
        work: the generator.
        arguments: its arguments.
        environment: variables of the process.
        within_s: seconds for all rows; by default, there is a limit for each row alone.

    Raises:
        RuntimeError: the process ends before the generator does, or yields nothing for too long.
    """
    limit_s = LIMIT_S if within_s is None else within_s
    deadline = None if within_s is None else time.monotonic() + within_s
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_rows, args=(sender, work, arguments))
    with mock.patch.dict(os.environ, environment or {}):
        process.start()
    sender.close()
    try:
        while receiver.poll(limit_s if deadline is None else max(0.0, deadline - time.monotonic())):
            row = receiver.recv()
            if row is None:
                process.join(LIMIT_S)
                return
            yield row
        raise RuntimeError(f"not done after {limit_s:g} s")
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def _send_rows(sender: Any, work: Callable[..., Iterable[Row]], arguments: Sequence[Any]) -> None:
    silence()
    for row in work(*arguments):
        sender.send(row)
    sender.send(None)
    sender.close()


def silence() -> None:
    """Keeps warnings of the libraries out of the output."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def result_path(experiment: Experiment, *, quick: bool) -> Path:
    """Where an experiment writes its results, unless the user names another file."""
    stem = experiment.name.replace("-", "_")
    return RESULTS / f"{stem}{'.quick' if quick else ''}.json"


def write_record(path: Path, experiment: Experiment, rows: list[Row]) -> Row:
    """Writes all rows with their summary, the workloads in the experiment's order; returns the record."""
    names = dict.fromkeys(case.workload for case in experiment.cases)
    order = {name: at for at, name in enumerate(names)}
    rows = sorted(rows, key=lambda row: order.get(row["workload"], len(order)))
    record = {**header(experiment.name), "summary": experiment.summarise(rows), "rows": rows}
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    return record


def header(benchmark: str) -> Row:
    """The first entries of every report: the benchmark, the time, the versions and the machine."""
    import torch

    import remat
    from remat.graph.costs.measure import describe_device

    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "remat": remat.__version__,
        "cpu": describe_device(torch.device("cpu")),
        "load_average": round(os.getloadavg()[0], 1),
    }


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds and processor seconds of a call without garbage collection, and its result."""
    gc.collect()
    gc.disable()
    try:
        start, start_cpu = time.perf_counter(), time.process_time()
        result = run()
        return time.perf_counter() - start, time.process_time() - start_cpu, result
    finally:
        gc.enable()
