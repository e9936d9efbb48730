"""Tables that `remat.compare` and `remat.sweep` return, and their files in JSON Lines, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from remat.errors import ProblemError
from remat.files import write_atomic, writing
from remat.units import (
    Budget,
    columns,
    format_bytes,
    format_change,
    format_cost,
    format_share,
    some_of,
)
from remat.version import __version__

#: Version of the table format.
VERSION = 3
#: Suffixes of the file formats of a table. A sweep continues from a file with the first suffix only.
SUFFIXES = (".jsonl", ".json", ".csv")
#: Largest number of rows to name below a table that have no plan for the same reason.
_NAMED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRow:
    """One row of a table: one model under one cost model, planned by one solver at one budget.

    The fields are the columns of the table. If planning failed, the figures of the plan are None and ``reason`` says
    why planning failed.

    Attributes:
        model: name of the model.
        of: text that identifies the planned step: the digest of a captured step, or the name of a function and the
            lowering that it is captured for. A time limit, if there is one, is appended to the text. Empty in a
            comparison.
        cost: the requested cost model.
        priced: the cost model that ``cost`` stands for on this step, because ``auto`` depends on the step. Empty if the
            step could not be captured or prepared.
        without_peak_bytes: peak of the step without remat; None if unknown.
        without_step_cost: cost of the step without remat, in ``unit``; None if unknown.
        solver: name of the requested solver.
        budget: the requested budget.
        decided_by: the solver that made the decision; or the pass ``min-cut``, if its minimum cut costs less than the
            decision of the solver.
        capacity: the most bytes that the budget allows the plan to save; see `remat.Plan` for a budget on the peak.
        saved_bytes: the bytes that the plan saves.
        recompute_cost: recompute cost plus exposed transfer time, in ``unit``.
        recompute_bound: proven lower bound on ``recompute_cost`` within the budget.
        peak_bytes: simulated peak of the step.
        solve_s: seconds that the solver took to decide this plan; under a budget on the peak, seconds of the search.
        plan_s: seconds of planning, from the prepared graph to the finished plan; the solver's seconds are included.
        unit: unit of the costs.
        best: whether the solver is the best at this budget: no other solver has a lower cost, or an equal cost with
            fewer saved bytes.
        more: cost that the plan adds to the step without remat, as a fraction of the cost of that step. None if there
            is no plan, or if cost or peak of the step without remat is unknown.
        reason: why there is no plan; None if there is one.
    """

    model: str = ""
    of: str = ""
    cost: str = ""
    priced: str = ""
    without_peak_bytes: int | None = None
    without_step_cost: int | None = None
    solver: str
    budget: str
    decided_by: str | None = None
    capacity: int | None = None
    saved_bytes: int | None = None
    recompute_cost: int | None = None
    recompute_bound: int | None = None
    peak_bytes: int | None = None
    solve_s: float | None = None
    plan_s: float | None = None
    unit: str | None = None
    best: bool = False
    more: float | None = None
    reason: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the row: model, cost model, budget, solver, and planned step (``of``)."""
        return self.model, self.cost, self.budget, self.solver, self.of

    @property
    def label(self) -> str:
        """The row's budget as text for display, with numbers that may be rounded."""
        return Budget.parse(self.budget).label

    @property
    def gap(self) -> float | None:
        """Recompute cost minus its proven bound, divided by this cost; None without a plan or under a peak budget."""
        # The text of every budget on the peak begins with "peak:".
        cost, bound = self.recompute_cost, self.recompute_bound
        if cost is None or bound is None or self.budget.startswith("peak:"):
            return None
        return (cost - bound) / cost if cost else 0.0

    @property
    def note(self) -> str:
        """Why the row has no plan, or that the plan is not the solver's; else empty."""
        if self.reason is not None:
            return f"no plan: {' '.join(self.reason.split())}"
        if self.decided_by == "min-cut":
            return "the plan is that of the pass 'min-cut', which costs less than the solver's plan"
        return ""

    @property
    def cells(self) -> dict[str, str]:
        """The row's formatted cells, as a dict from heading to text; figures of a missing plan are dashes."""
        unit, peak, step = self.unit or "", self.without_peak_bytes, self.without_step_cost
        cells = {
            "model": self.model,
            "cost": self.priced or self.cost,
            "budget": self.label,
            "solver": self.solver,
            "without": "–" if peak is None else format_bytes(peak),
            "step without": "–" if step is None else format_cost(step, unit),
            "": "*" if self.best else "",
        }
        if self.saved_bytes is None:
            return cells | dict.fromkeys(("saved", "recompute", "gap", "peak", "step", "time"), "–")
        solve_s = self.solve_s or 0.0
        return cells | {
            "saved": format_bytes(self.saved_bytes),
            "recompute": format_cost(self.recompute_cost or 0, unit),
            "gap": format_share(self.gap),
            "peak": format_bytes(self.peak_bytes or 0),
            "step": format_change(self.more),
            "time": f"{solve_s:.2f} s" if solve_s < 100 else f"{solve_s:.0f} s",
        }


COLUMNS = tuple(f.name for f in fields(ExperimentRow))
#: Columns that the JSON of a comparison leaves out, because they are equal in all of its rows.
_OF_STEP = COLUMNS[: COLUMNS.index("solver")]


def mark_best(rows: Iterable[ExperimentRow]) -> Iterator[ExperimentRow]:
    """Yield the rows, with ``best`` set for the best solvers of each model, cost model and budget.

    The best solvers have the least recompute cost and, at equal cost, the fewest saved bytes.
    """
    # Each lower bound on the cost holds for every plan within a limit on saved bytes. So all rows of one step, budget
    # and limit get the highest of their bounds.
    rows = tuple(rows)
    least: dict[tuple[str, ...], tuple[int, int]] = {}
    bounds: dict[tuple[object, ...], int] = {}
    for r in rows:
        if r.recompute_bound is not None:
            limit = (r.model, r.cost, r.budget, r.of, r.capacity)
            bounds[limit] = max(bounds.get(limit, 0), r.recompute_bound)
        if r.recompute_cost is not None and r.saved_bytes is not None:
            group, figures = (r.model, r.cost, r.budget), (r.recompute_cost, r.saved_bytes)
            least[group] = min(figures, least.get(group, figures))
    for r in rows:
        best = least.get((r.model, r.cost, r.budget))
        bound = bounds.get((r.model, r.cost, r.budget, r.of, r.capacity))
        yield replace(r, best=(r.recompute_cost, r.saved_bytes) == best, recompute_bound=bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Table of several solvers at several budgets on one joint graph, as `remat.compare` returns it.

    Attributes:
        graph: name of the joint graph.
        cost: the cost model.
        rows: one row for each budget and solver: by budget, then by solver, in the requested order.
        unit: unit of all costs.
        step_cost: cost of running every operator of the step once; 0 if unknown.
        without_peak_bytes: simulated peak of the step without remat, which is the step at budget 1.
        without_cost: cost of the step without remat; meaningless if ``step_cost`` is 0.
        brief: names of the solvers that did only a fraction of their usual work, see `remat.solvers.brief`.
    """

    graph: str
    cost: str
    rows: tuple[ExperimentRow, ...]
    unit: str = ""
    step_cost: int = 0
    without_peak_bytes: int = 0
    without_cost: int = 0
    brief: tuple[str, ...] = ()

    @property
    def without(self) -> str:
        """One line with the peak and the cost of the step without remat; empty if either is unknown."""
        if not self.without_peak_bytes or not self.step_cost:
            return ""
        step = format_cost(self.without_cost, self.unit)
        return f"without remat: peak {format_bytes(self.without_peak_bytes)}, step {step} modelled"

    def to_json(self) -> str:
        """Return the comparison as JSON text, each row with its ``gap``."""
        figures = {f.name: getattr(self, f.name) for f in fields(self)}
        rows = [asdict(r) | {"gap": r.gap} for r in self.rows]
        for row in rows:
            for name in _OF_STEP:
                del row[name]
        return json.dumps(figures | {"rows": rows}, indent=2) + "\n"

    def __str__(self) -> str:
        head = ("budget", "solver")
        figures = ("saved", "recompute", "", "gap", "peak", "step", "time")
        text = _as_text(self.rows, head, figures)
        return f"{self.without}\n{text}" if self.without else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Table of a sweep: one row for each combination that `remat.sweep` planned.

    Rows are in the requested order of models, then of cost models, budgets and solvers. If the table was read from a
    file, rows that earlier sweeps wrote to this file come last.

    Attributes:
        rows: the rows.
    """

    rows: tuple[ExperimentRow, ...]

    def save(self, path: str | Path) -> Path:
        """Write the table to a file atomically, and return the path.

        Args:
            path: the file. Its suffix selects JSON Lines, JSON or CSV.

        Raises:
            ProblemError: the suffix is unknown, or the file cannot be written.
        """
        path = checked_path(path)
        content = io.StringIO()
        if path.suffix == ".csv":
            # The default line ending of csv is \r\n.
            writer = csv.DictWriter(content, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(asdict, self.rows))
        elif path.suffix == ".json":
            content.write(self.to_json())
        else:
            for line in (versions(), *map(asdict, self.rows)):
                content.write(json.dumps(line) + "\n")
        with writing(path):
            write_atomic(path, content.getvalue())
        return path

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """Read a sweep's table from a file in JSON Lines, even if the sweep is unfinished.

        Raises:
            ProblemError: the file holds no table of this version.
        """
        return cls(rows=read_rows(Path(path))[1])

    def to_json(self) -> str:
        """Return the sweep's table as JSON text."""
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"remat_sweep": VERSION, "rows": rows}, indent=2) + "\n"

    def __str__(self) -> str:
        head = ("model", "cost", "budget", "solver")
        figures = ("saved", "peak", "without", "recompute", "step without")
        return _as_text(self.rows, head, figures)


def _as_text(rows: Iterable[ExperimentRow], head: Sequence[str], figures: Sequence[str]) -> str:
    """Return rows as aligned text, and below them notes, each once for all rows that it is about."""
    lines, notes = [[*head, *figures]], dict[str, list[str]]()
    for row in rows:
        cells = row.cells
        lines.append([cells[name] for name in (*head, *figures)])
        if note := row.note:
            notes.setdefault(note, []).append(" ".join(cells[name] for name in head))
    table = columns(lines, left=[k for k, name in enumerate(head) if name != "budget"])
    below = (f"{some_of(names, _NAMED)}: {note}" for note, names in notes.items())
    return "\n".join((*table, *below))


def checked_path(path: str | Path) -> Path:
    """Return the path of a table; raise a ProblemError unless the path's suffix names a format."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ProblemError(f"'{path}' must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    return path


def versions() -> dict[str, Any]:
    """Return the first line of a table in JSON Lines: the versions of the format, of remat and of PyTorch."""
    return {"remat_sweep": VERSION, "remat": __version__, "torch": torch.__version__}


def read_rows(path: Path) -> tuple[dict[str, Any], tuple[ExperimentRow, ...]]:
    """Return the versions and the rows of a table in JSON Lines; leave out a damaged last line.

    Raises:
        ProblemError: a line before the last is damaged, or the file holds no table of this version.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ProblemError(f"'{path}' cannot be read: {error.strerror or error}") from error
    objects = [_object(line) for line in text.splitlines(keepends=True)]
    head = objects[0] if objects else None
    if head is None or head.get("remat_sweep") != VERSION:
        raise ProblemError(
            f"'{path}' cannot be read: it is no sweep of version {VERSION}; give another file"
        )
    rows = [
        data if data is not None and set(data) == set(COLUMNS) else None for data in objects[1:]
    ]
    if None in rows[:-1]:
        raise ProblemError(
            f"'{path}' cannot be read: line {rows.index(None) + 2} is damaged. Remove this line, and a "
            "sweep plans its row again"
        )
    return head, tuple(ExperimentRow(**data) for data in rows if data is not None)


def _object(line: str) -> dict[str, Any] | None:
    """Return the JSON object that a line of a table's file contains; None if the line is damaged or cut off."""
    try:
        data = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
