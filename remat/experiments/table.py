"""Tables that `remat.compare` and `remat.sweep` return, and their files in JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from remat.errors import ProblemError, RematError
from remat.files import write_atomic, writing
from remat.units import (
    Budget,
    columns,
    format_bytes,
    format_change,
    format_cost,
    format_share,
)
from remat.version import __version__

#: Version of the table format, and of the journal that a running sweep writes.
VERSION = 2
#: Suffixes of the file formats of a table.
SUFFIXES = (".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRow:
    """One row of a table: one model under one cost model, planned by one solver at one budget.

    The fields are the columns of the table. If planning failed, the figures of the plan are None and
    ``reason`` says why.

    Attributes:
        model: name of the model.
        of: text that identifies the planned step: the digest of a captured step, or the name of a function and the
            lowering that it is captured for. The time limit follows, if there is one. Empty in a comparison.
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
        """Identity of the row: model, cost model, budget, solver, and identity of the planned step (``of``)."""
        return self.model, self.cost, self.budget, self.solver, self.of

    @property
    def label(self) -> str:
        """The budget as text for display, with numbers that may be rounded."""
        return Budget.parse(self.budget).label

    @property
    def gap(self) -> float | None:
        """Fraction of ``recompute_cost``, from 0 to 1, that an optimal plan could avoid at most, by the proven bound.

        None if there is no plan, and under a budget on the peak.
        """
        # The text of every budget on the peak begins with "peak:".
        cost, bound = self.recompute_cost, self.recompute_bound
        if cost is None or bound is None or self.budget.startswith("peak:"):
            return None
        return (cost - bound) / cost if cost else 0.0

    @property
    def cells(self) -> dict[str, str]:
        """The formatted figures of the plan, by column name; dashes if there is no plan."""
        if self.saved_bytes is None:
            return dict.fromkeys(("saved", "recompute", "gap", "peak", "step", "time"), "–")
        solve_s = self.solve_s or 0.0
        return {
            "saved": format_bytes(self.saved_bytes),
            "recompute": format_cost(self.recompute_cost or 0, self.unit or ""),
            "gap": format_share(self.gap),
            "peak": format_bytes(self.peak_bytes or 0),
            "step": format_change(self.more),
            "time": f"{solve_s:.2f} s" if solve_s < 100 else f"{solve_s:.0f} s",
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ExperimentRow:
        """Build a row from the cells of a saved table.

        Args:
            given: the cells by column name.

        Raises:
            ProblemError: the names of the cells are not the columns of this version of remat.
        """
        if set(given) != set(COLUMNS):
            raise ProblemError(
                f"its columns are {', '.join(map(str, given))}; expected {', '.join(COLUMNS)}: it may be of another "
                f"version of remat than {__version__}. Give another file"
            )
        return cls(**given)


#: Type of each column as text, such as ``"int"`` for ``int | None``. Annotations are text in this file, because of
#: ``from __future__ import annotations``.
_TYPES = {f.name: str(f.type).removesuffix(" | None") for f in fields(ExperimentRow)}
COLUMNS = tuple(_TYPES)
#: Columns that the JSON of a comparison leaves out, because they are equal in all of its rows.
_OF_STEP = COLUMNS[: COLUMNS.index("solver")]


def mark_best(rows: Iterable[ExperimentRow]) -> Iterator[ExperimentRow]:
    """Yield the rows, with ``best`` set for the best solver of each model, cost model and budget.

    The best solver has the least recompute cost and, at equal cost, the fewest saved bytes. If several rows are equal,
    each of them is best. Rows of one step, budget and limit on saved bytes all get the highest of their lower bounds on
    the cost. Each of these bounds holds for every plan within the limit.
    """
    rows = tuple(rows)
    least: dict[tuple[str, ...], tuple[int, int]] = {}
    bounds: dict[tuple[object, ...], int] = {}
    for r in rows:
        if r.recompute_bound is not None:
            limit = (r.model, r.cost, r.budget, r.of, r.capacity)
            bounds[limit] = max(bounds.get(limit, 0), r.recompute_bound)
        if r.recompute_cost is not None and r.saved_bytes is not None:
            at, figures = (r.model, r.cost, r.budget), (r.recompute_cost, r.saved_bytes)
            least[at] = min(figures, least.get(at, figures))
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
        without_recompute_cost: recompute cost of the step without remat.
        brief: names of the solvers that did only a fraction of their usual work, see `remat.solvers.brief`.
    """

    graph: str
    cost: str
    rows: tuple[ExperimentRow, ...]
    unit: str = ""
    step_cost: int = 0
    without_peak_bytes: int = 0
    without_recompute_cost: int = 0
    brief: tuple[str, ...] = ()

    @property
    def without(self) -> str:
        """One line of text with the peak and the cost of the step without remat; empty if one of them is unknown."""
        if not self.without_peak_bytes or not self.step_cost:
            return ""
        step = format_cost(self.step_cost + self.without_recompute_cost, self.unit)
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
        head = ["budget", "solver", "saved", "recompute", "", "gap", "peak", "step", "time"]
        rows = []
        for r in self.rows:
            saved, recompute, *others = r.cells.values()
            figures = [saved, recompute, "*" if r.best else "", *others]
            rows.append([r.label, r.solver, *([str(r.reason)] if r.reason else figures)])
        lines = columns([head, *rows], left=[1])
        return "\n".join([*([self.without] if self.without else []), *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Table of a sweep: one row for each combination that `remat.sweep` planned.

    Rows are in the requested order of models, then of cost models, budgets and solvers. Rows of earlier sweeps with
    the same output file, if the table was read from this file, come last.

    Attributes:
        rows: the rows.
    """

    rows: tuple[ExperimentRow, ...]

    def save(self, path: str | Path) -> Path:
        """Write the table to a JSON, CSV or Parquet file, atomically.

        Args:
            path: the file; its suffix selects the format.

        Returns:
            The path.

        Raises:
            ProblemError: the suffix is unknown, a library is missing, or the file cannot be written.
        """
        path = checked_path(path)
        rows = [asdict(row) for row in self.rows]
        content: str | bytes
        if path.suffix == ".json":
            content = self.to_json()
        elif path.suffix == ".csv":
            text = io.StringIO()
            # The default line ending of csv is \r\n.
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            content = text.getvalue()
        else:
            content = _as_parquet(rows)
        with writing(path):
            write_atomic(path, content)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """Read a table from a file that `save` wrote; the suffix of the path selects the format.

        Raises:
            ProblemError: the file holds no such table, or a table of another version.
        """
        path = checked_path(path)
        try:
            if path.suffix == ".parquet":
                rows = _from_parquet(path)
            elif path.suffix == ".csv":
                # Without newline="", line endings inside of cells would be changed.
                with path.open(encoding="utf-8", newline="") as file:
                    rows = [_typed(row) for row in csv.DictReader(file)]
            else:
                data = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(data, dict) or data.get("remat_sweep") != VERSION:
                    raise ProblemError(f"it is no sweep of version {VERSION}")
                rows = data["rows"]
            return cls(rows=tuple(map(ExperimentRow.from_dict, rows)))
        except RematError as error:
            raise ProblemError(f"'{path}' cannot be read: {error}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProblemError(f"'{path}' cannot be read: {error}") from error

    def to_json(self) -> str:
        """Return the table as JSON text."""
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"remat_sweep": VERSION, "rows": rows}, indent=2) + "\n"

    def __str__(self) -> str:
        head = ["model", "cost", "budget", "solver", "saved", "peak", "without", "recomputed"]
        rows = []
        for r in self.rows:
            asked = [r.model, r.priced or r.cost, r.label, r.solver]
            if r.saved_bytes is None:
                rows.append([*asked, str(r.reason)])
                continue
            peak, step, of = r.without_peak_bytes, r.without_step_cost, r.cells
            without = "–" if peak is None else format_bytes(peak)
            step_without = "–" if step is None else format_cost(step, r.unit or "")
            rows.append([*asked, of["saved"], of["peak"], without, of["recompute"], step_without])
        return "\n".join(columns([[*head, "step without"], *rows], left=[0, 1, 3]))


def checked_path(path: str | Path) -> Path:
    """Check that a table can be written in the format that the suffix of its path names; return the path.

    Raises:
        ProblemError: the suffix is unknown, or the library for the format is missing.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ProblemError(f"'{path}' must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if path.suffix == ".parquet":
        _pyarrow()
    return path


def _pyarrow() -> Any:
    """Return the module pyarrow, with its Parquet module imported; raise a ProblemError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ProblemError(
            "Parquet needs pyarrow, which is not installed: pip install 'remat[tables]', or name a .csv or .json file"
        ) from None
    return pyarrow


def _as_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as the content of a Parquet file, whose metadata hold the table's version."""
    arrow = _pyarrow()
    kinds = {
        "str": arrow.string(),
        "int": arrow.int64(),
        "float": arrow.float64(),
        "bool": arrow.bool_(),
    }
    # The schema is given, because a column in which every cell is None would get the type null.
    schema = arrow.schema(
        [(name, kinds[kind]) for name, kind in _TYPES.items()], {"remat_sweep": str(VERSION)}
    )
    sink = arrow.BufferOutputStream()
    arrow.parquet.write_table(arrow.Table.from_pylist(list(rows), schema=schema), sink)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _from_parquet(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a Parquet file; raise a ProblemError if it holds no table of this version."""
    arrow = _pyarrow()
    try:
        table = arrow.parquet.read_table(path)
    except arrow.ArrowInvalid as error:
        raise ProblemError(str(error)) from None
    if (table.schema.metadata or {}).get(b"remat_sweep") != str(VERSION).encode():
        raise ProblemError(f"it is no sweep of version {VERSION}")
    return table.to_pylist()  # type: ignore[no-any-return]


#: Functions that parse the text of a CSV cell, by type of the column.
_READERS: Mapping[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text == "True",  # bool("False") is True
}
_OPTIONAL = frozenset(f.name for f in fields(ExperimentRow) if "None" in str(f.type))


def _typed(row: Mapping[str, str]) -> dict[str, Any]:
    """Convert the cells of a CSV row to the types of their columns; an empty cell becomes None where allowed."""
    return {
        name: None if name in _OPTIONAL and not text else _READERS[_TYPES.get(name, "str")](text)
        for name, text in row.items()
    }
