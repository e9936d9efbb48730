"""A step in the formats of other tools: PyTorch's memory viewer, Chrome traces, Model Explorer, CSV."""

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
from remat.files import write_atomic, writing
from remat.graph.liveness import StorageKind, Timeline
from remat.report.step_view import KEPT, OFFLOADED, RECOMPUTED, StepView, Value

#: Alignment of made-up addresses.
_ALIGNMENT = 512
#: Colors of what is kept and of what runs again: background and text.
_COLORS = {
    KEPT: ("#2f5d9e", "#ffffff"),
    RECOMPUTED: ("#e0913f", "#000000"),
    OFFLOADED: ("#7a4f9e", "#ffffff"),
}


def memory_viewer(view: StepView) -> bytes:
    """A snapshot as ``torch.cuda.memory._snapshot()`` gives it, for PyTorch's memory viewer.

    Every storage has an address of its own, since no allocator is modelled: the viewer's "active memory
    timeline" is the timeline of the step, and its segments are what is alive at the end. The time of an event
    is its moment in microseconds.
    """
    events: list[dict[str, Any]] = []
    ends = len(view.timeline.moments) - 1
    begun: dict[int, list[int]] = {}
    over: dict[int, list[int]] = {}
    for i, value in enumerate(view.values):
        begun.setdefault(value.first, []).append(i)
        over.setdefault(value.last, []).append(i)
    sizes = [-(-max(1, v.nbytes) // _ALIGNMENT) * _ALIGNMENT for v in view.values]
    addresses = list(accumulate(sizes, initial=2**32))
    for moment in range(ends + 1):
        events += [
            _event("alloc", view.values[i], addresses[i], moment) for i in begun.get(moment, ())
        ]
        events += [
            _event(action, view.values[i], addresses[i], moment)
            for i in (over.get(moment, ()) if moment < ends else ())
            for action in ("free_requested", "free_completed")
        ]
    segments = [_segment(view.values[i], addresses[i], sizes[i]) for i in over.get(ends, ())]
    snapshot = {
        "segments": segments,
        "device_traces": [events],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(snapshot, protocol=4)


def _event(action: str, value: Value, address: int, moment: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": value.nbytes,
        "stream": 0,
        "time_us": moment,
        "frames": _frames(value),
    }


def _segment(value: Value, address: int, size: int) -> dict[str, Any]:
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
    """One frame: what the storage is, and the user's line that made it."""
    found = re.fullmatch(r"(.+?):(\d+)(?: (.*))?", value.source, re.DOTALL)
    name, line, code = found.groups() if found else (value.source, "0", "")
    what = f"{value.name} ({value.kind})" + (f": {code}" if code else "")
    return [{"name": what, "filename": name, "line": int(line)}]


def chrome_trace(view: StepView) -> bytes:
    """A trace for ``chrome://tracing`` and Perfetto: bytes alive as a counter, operators as slices.

    Forward, backward, and what runs again are three threads. Where the cost is a time, a slice is as long as the
    cost model says; in another unit, a microsecond is 1 of it; where it is not known, a microsecond is one run.
    """
    scale = 10**6 if view.unit == "ps" else 1
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
    """When each moment of the timeline begins; the kernels of a half lie evenly over its time."""
    step: Timeline = view.timeline
    n = len(step.moments)
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
    """Node data for Model Explorer: what is kept, runs again or is offloaded, with its bytes, in colors of their own.

    Its keys are the names of the joint graph's nodes; the graph's id is the graph's name.
    """
    results: dict[str, dict[str, Any]] = {}
    rows = [(k.name, k.nbytes, KEPT) for k in view.kept]
    rows += [(r.name, r.nbytes, RECOMPUTED) for r in view.recomputed]
    away = [v for v in view.values if v.state == OFFLOADED and v.first < view.timeline.boundary]
    rows += [(v.name, v.nbytes, OFFLOADED) for v in away]
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


#: Columns of the CSV of values.
COLUMNS = ("name", "op", "bytes", "from", "to", "kind", "state", "recompute_cost", "source")  # fmt: skip


def csv_of_values(view: StepView) -> bytes:
    """One row for each storage. ``from`` and ``to`` are moments of the timeline, forward's first is 0."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for v in view.values:
        price = "" if v.price is None else v.price
        kind = StorageKind(v.kind).value
        writer.writerow([v.name, v.op, v.nbytes, v.first, v.last, kind, v.state, price, v.source])
    return text.getvalue().encode()


#: The formats, by name.
FORMATS: Mapping[str, Callable[[StepView], bytes]] = {
    "memory-viewer": memory_viewer,
    "chrome": chrome_trace,
    "model-explorer": model_explorer,
    "csv": csv_of_values,
}
#: The format that the end of a file's name stands for.
SUFFIXES = {
    ".pickle": "memory-viewer",
    ".json": "chrome",
    ".csv": "csv",
}


def format_of(path: str | Path, named: str | None = None) -> str:
    """The format to write to a path: the one that is named, else the one that its suffix stands for.

    Raises:
        ProblemError: there is none of that name, or the suffix says nothing.
    """
    if named is not None:
        if named in FORMATS:
            return named
        raise ProblemError(f"format is {named!r}; expected one of {', '.join(FORMATS)}")
    suffix = Path(path).suffix.lower()
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    known = ", ".join(f"{end} ({name})" for end, name in SUFFIXES.items())
    raise ProblemError(
        f"a step cannot be exported to '{path}': its suffix is '{suffix}'; expected {known}, or a format by "
        f"name: {', '.join(FORMATS)}"
    )


def export(view: StepView, path: str | Path, named: str | None = None) -> None:
    """Writes a step to a file in a format of `FORMATS`, whole or not at all.

    Raises:
        ProblemError: the format is not known.
        PlanError: the file cannot be written; what was there before is as it was.
    """
    content = FORMATS[format_of(path, named)](view)
    with writing(path, what="export", error=PlanError):
        write_atomic(Path(path), content)
