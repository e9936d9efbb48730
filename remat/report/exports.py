"""Export of a step to other tools: PyTorch's memory viewer, CSV."""

from __future__ import annotations

import csv
import io
import pickle
import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from remat.errors import PlanError, ProblemError
from remat.files import write_file
from remat.graph.memory.liveness import StorageKind
from remat.report.step_view import StepView, Value

#: Alignment of the generated addresses, as in CUDA's caching allocator.
_ALIGNMENT = 512


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


#: Dict from the suffix of a file to the function that returns a step in the format of this suffix.
FORMATS: Mapping[str, Callable[[StepView], bytes]] = {
    ".pickle": memory_viewer,
    ".csv": csv_of_values,
}


def export(view: StepView, path: str | Path) -> None:
    """Write a step to a file atomically, in the format for the path's suffix.

    Raises:
        ProblemError: no format belongs to the path's suffix.
        PlanError: the file cannot be written. An existing file stays unchanged.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ProblemError(
            f"a step cannot be exported to '{path}': its suffix is '{suffix}'; expected {' or '.join(FORMATS)}"
        )
    write_file(path, FORMATS[suffix](view), "export", PlanError)
