"""Export of a step to other tools: PyTorch's memory viewer, Chrome traces, Model Explorer, CSV."""

from __future__ import annotations

import csv
import io
import json
import pickle
import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from remat.errors import PlanError, ProblemError
from remat.files import write_file
from remat.graph.memory.liveness import StorageKind, Timeline
from remat.report.step_view import KEPT, OFFLOADED, RECOMPUTED, StepView, Value

#: Alignment of the generated addresses, as in CUDA's caching allocator.
_ALIGNMENT = 512
#: Dict from the state of a value, such as recomputed, to the background color and the text color.
_COLORS = {
    KEPT: ("#2f5d9e", "#ffffff"),
    RECOMPUTED: ("#e0913f", "#000000"),
    OFFLOADED: ("#7a4f9e", "#ffffff"),
}


def memory_viewer(view: StepView) -> bytes:
    """Return the memory over a step as a pickled snapshot for PyTorch's memory viewer."""
    # The snapshot models no allocator and no times: every storage has an address of its own, and an event at the n-th
    # program point has time n microseconds. The snapshot's segments are the storages alive at the end of the step.
    events: list[dict[str, Any]] = []
    final = len(view.timeline.program_points) - 1
    allocated: dict[int, list[int]] = {}
    freed: dict[int, list[int]] = {}
    for i, value in enumerate(view.values):
        allocated.setdefault(value.first, []).append(i)
        freed.setdefault(value.last, []).append(i)
    sizes = [-(-max(1, v.nbytes) // _ALIGNMENT) * _ALIGNMENT for v in view.values]
    addresses = list(accumulate(sizes, initial=2**32))
    for program_point in range(final + 1):
        events += [
            _event("alloc", view.values[i], addresses[i], program_point)
            for i in allocated.get(program_point, ())
        ]
        events += [
            _event(action, view.values[i], addresses[i], program_point)
            # Storages alive at the last program point are not freed, but become the snapshot's segments.
            for i in (freed.get(program_point, ()) if program_point < final else ())
            for action in ("free_requested", "free_completed")
        ]
    segments = [_segment(view.values[i], addresses[i], sizes[i]) for i in freed.get(final, ())]
    snapshot = {
        "segments": segments,
        "device_traces": [events],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(snapshot, protocol=4)


def _event(action: str, value: Value, address: int, program_point: int) -> dict[str, Any]:
    """Return one event of a memory snapshot: a storage is allocated or freed at a program point."""
    return {
        "action": action,
        "addr": address,
        "size": value.nbytes,
        "stream": 0,
        "time_us": program_point,
        "frames": _frames(value),
    }


def _segment(value: Value, address: int, size: int) -> dict[str, Any]:
    """Return one segment of a memory snapshot, with a storage as its only block; ``size`` is the segment's bytes."""
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": value.nbytes,
        "active_size": value.nbytes,
        "requested_size": value.nbytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": address,
                "size": size,
                "requested_size": value.nbytes,
                "state": "active_allocated",
                "frames": _frames(value),
            }
        ],
    }


def _frames(value: Value) -> list[dict[str, Any]]:
    """Return a stack trace of one frame, which shows a storage's name and the source line that made the storage."""
    match = re.fullmatch(r"(.+?):(\d+)(?: (.*))?", value.source, re.DOTALL)
    file, line, code = match.groups() if match else (value.source, "0", "")
    label = f"{value.name} ({value.kind})" + (f": {code}" if code else "")
    return [{"name": label, "filename": file, "line": int(line)}]


def chrome_trace(view: StepView) -> bytes:
    """Return a step as a JSON trace for ``chrome://tracing`` and Perfetto: alive bytes as a counter, runs as slices."""
    # Each slice is as long as the cost of its run. If costs are no times, one unit of cost is drawn as a
    # microsecond. If costs are unknown, each slice lasts a microsecond.
    scale = 10**6 if view.unit == "ps" else 1  # times in a trace are microseconds
    priced = all(run.cost is not None for run in view.runs)
    lengths = [(run.cost or 0) / scale if priced else 1.0 for run in view.runs]
    starts = list(accumulate(lengths, initial=0.0))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{view.graph}, one step"}}
    ]
    threads = {1: "forward", 2: "backward", 3: "recomputed"}
    events += [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in threads.items()
    ]
    # Not strict, because `starts` also contains the end of the step.
    for run, start, length in zip(view.runs, starts, lengths, strict=False):
        args: dict[str, Any] = {"node": run.name, "source": run.source}
        if run.cost is not None:
            args[f"cost_{view.unit}"] = run.cost
        tid = 3 if run.again else 2 if run.in_backward else 1
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tid,
                "ts": start,
                "dur": length,
                "name": run.op,
                "args": args,
            }
        )
    for at, nbytes in zip(_times(view, starts), view.timeline.nbytes(), strict=True):
        events.append(
            {"ph": "C", "pid": 1, "ts": at, "name": "bytes alive", "args": {"bytes": nbytes}}
        )
    metadata = {"graph": view.graph, "unit": view.unit, "as_compiled": view.as_compiled}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ns", "otherData": metadata}
    ).encode()


def _times(view: StepView, starts: list[float]) -> list[float]:
    """Return the time in microseconds at which each program point of the step's timeline begins."""
    # The times of compiled kernels are unknown. Kernels are spread evenly over the time of forward and of backward.
    step: Timeline = view.timeline
    n = len(step.program_points)
    if not view.as_compiled and n == len(view.runs):
        return starts[:n]
    forward = sum(not run.in_backward for run in view.runs)
    middle, end = starts[forward], starts[-1]
    late = n - step.boundary
    return [
        middle * i / step.boundary
        if i < step.boundary
        else middle + (end - middle) * (i - step.boundary) / late
        for i in range(n)
    ]


def model_explorer(view: StepView) -> bytes:
    """Return node data for Model Explorer as JSON: bytes and color of kept, recomputed and offloaded values."""
    # Model Explorer matches the data to a graph by the joint graph's id and the names of its nodes.
    results: dict[str, dict[str, Any]] = {}
    rows = [(k.name, k.nbytes, KEPT) for k in view.kept]
    rows += [(r.node, r.nbytes, RECOMPUTED) for r in view.recomputed]
    # Only storages of forward are listed, because the copy back to the device in backward belongs to the same value.
    offloaded = (
        v for v in view.values if v.state == OFFLOADED and v.first < view.timeline.boundary
    )
    rows += [(v.name, v.nbytes, OFFLOADED) for v in offloaded]
    for name, nbytes, state in rows:
        background, text = _COLORS[state]
        results[name] = {"value": nbytes, "bgColor": background, "textColor": text}
    data = {
        view.graph: {
            "results": results,
            "name": "remat: kept (blue), recomputed (orange), offloaded (violet)",
        }
    }
    return (json.dumps(data, indent=1) + "\n").encode()


#: Columns of the CSV that lists the storages of a step.
COLUMNS = ("name", "op", "bytes", "from", "to", "kind", "state", "recompute_cost", "source")  # fmt: skip


def csv_of_values(view: StepView) -> bytes:
    """Return a step's storages as CSV; columns ``from`` and ``to`` are a lifetime's first and last program point."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for v in view.values:
        price = "" if v.price is None else v.price
        kind = StorageKind(v.kind).value
        writer.writerow([v.name, v.op, v.nbytes, v.first, v.last, kind, v.state, price, v.source])
    return text.getvalue().encode()


#: Dict from the ending of a file's name to the function that returns a step in the format of this ending. The first
#: ending that fits decides.
FORMATS: Mapping[str, Callable[[StepView], bytes]] = {
    ".pickle": memory_viewer,
    ".nodes.json": model_explorer,
    ".json": chrome_trace,
    ".csv": csv_of_values,
}


def export(view: StepView, path: str | Path) -> None:
    """Write a step to a file atomically, in the format for the ending of the file's name.

    Raises:
        ProblemError: no format belongs to the ending.
        PlanError: the file cannot be written. An existing file stays unchanged.
    """
    name = Path(path).name.lower()
    written = next((write for ending, write in FORMATS.items() if name.endswith(ending)), None)
    if written is None:
        raise ProblemError(
            f"a step cannot be exported to '{path}': its suffix is '{Path(path).suffix}'; expected "
            f"{', '.join(FORMATS)}"
        )
    write_file(path, written(view), "export", PlanError)
