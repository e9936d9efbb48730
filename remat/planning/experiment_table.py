"""Rows of `remat.compare` and `remat.sweep`, their tables, and files of them in JSON, CSV and Parquet."""

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

#: Version of the tables and of what is written while a sweep runs.
VERSION = 2
#: Forms of a table, by the end of its file's name.
SUFFIXES = (".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRow:
    """One model under one cost model, by one solver at one budget; its fields are the columns of a table.

    Figures of the plan are None if there is none, and ``reason`` says why.

    Attributes:
        model: name of the model.
        of: what else the figures depend on: the digest of a captured step, or the name of a function with the
            lowering it is captured for, and a time limit.
        cost: the cost model as it was asked for.
        priced: the cost model that ``cost`` stands for on this step; empty if the step is not known.
        without_peak_bytes: peak of the step without remat; None if it is not known.
        without_step_cost: cost of the step without remat, in ``unit``; None if it is not known.
        solver: name of the solver that was asked.
        budget: the budget as it was asked for.
        decided_by: what decided: the solver; of ``auto``, also the cut of the pass ``min-cut``.
        capacity: the bytes that the plan was allowed to save.
        saved_bytes: bytes saved.
        recompute_cost: cost of recomputing, and exposed transfer time, in ``unit``.
        recompute_bound: proven lower bound on it within ``capacity``.
        peak_bytes: simulated peak of the step.
        solve_s: seconds that the solver took to decide this plan.
        plan_s: seconds from prepared graph to finished plan.
        unit: unit of the costs.
        best: whether no other solver has a lower cost at this budget, or the same one with fewer
            bytes saved.
        more: share by which the modelled step costs more than without remat; None without a plan, and
            if the cost of the step is not known.
        reason: why there is no plan.
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
        """Key of the question: model, cost model, budget, solver and other inputs of the figures."""
        return self.model, self.cost, self.budget, self.solver, self.of

    @property
    def label(self) -> str:
        """The budget as text."""
        return Budget.parse(self.budget).label

    @property
    def gap(self) -> float | None:
        """Upper bound on the avoidable part of the cost, 0 to 1.

        None without a plan, and under a budget on the peak: the bound is one on saved bytes.
        """
        cost, bound = self.recompute_cost, self.recompute_bound
        if cost is None or bound is None or self.budget.startswith("peak:"):
            return None
        return (cost - bound) / cost if cost else 0.0

    @property
    def cells(self) -> dict[str, str]:
        """The formatted figures of the plan, by column; dashes if there is no plan."""
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
        """Read a row of a table.

        Raises:
            ProblemError: it is something else.
        """
        if set(given) != set(COLUMNS):
            raise ProblemError(
                f"its columns are {', '.join(map(str, given))}; expected {', '.join(COLUMNS)}: it may be of another "
                f"version of remat than {__version__}. Give another file"
            )
        return cls(**given)


#: Columns of a table, each with its type.
_TYPES = {f.name: str(f.type).removesuffix(" | None") for f in fields(ExperimentRow)}
COLUMNS = tuple(_TYPES)
#: Those that a comparison leaves out, as it is of one step under one cost model.
_OF_STEP = COLUMNS[: COLUMNS.index("solver")]


def mark_best(rows: Iterable[ExperimentRow]) -> Iterator[ExperimentRow]:
    """The rows, with the best solver of each model, cost model and budget marked."""
    rows = tuple(rows)
    least: dict[tuple[str, ...], tuple[int, int]] = {}
    for r in rows:
        if r.recompute_cost is not None and r.saved_bytes is not None:
            at, figures = (r.model, r.cost, r.budget), (r.recompute_cost, r.saved_bytes)
            least[at] = min(figures, least.get(at, figures))
    for r in rows:
        best = least.get((r.model, r.cost, r.budget))
        yield replace(r, best=(r.recompute_cost, r.saved_bytes) == best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Solvers side by side on one joint graph, by one yardstick.

    Attributes:
        graph: name of the joint graph.
        cost: cost model.
        rows: by budget, then by solver, in the order asked for.
        unit: unit of all costs.
        step_cost: cost of running every operator of the step once; 0 where it is not known.
        without_peak_bytes: simulated peak of the step without remat, which is that of the plan of ``auto``
            at budget 1.
        without_recompute_cost: cost of what runs twice in that plan.
        brief: names of solvers that were given a small part of their work, see `remat.solvers.brief`.
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
        """One line on the step without remat; empty if it is unknown."""
        if not self.without_peak_bytes or not self.step_cost:
            return ""
        step = format_cost(self.step_cost + self.without_recompute_cost, self.unit)
        return f"without remat: peak {format_bytes(self.without_peak_bytes)}, step {step} modelled"

    def to_json(self) -> str:
        """The comparison as JSON, each row with its ``gap``."""
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
    """All rows of a sweep, by model, cost model, budget and solver in the order asked for."""

    rows: tuple[ExperimentRow, ...]

    def save(self, path: str | Path) -> Path:
        """Writes the table as JSON, CSV or Parquet, by the end of the name; whole or not at all.

        Raises:
            ProblemError: another end, a library is missing, or the file cannot be written.
        """
        path = checked_path(path)
        rows = [asdict(row) for row in self.rows]
        content: str | bytes
        if path.suffix == ".json":
            content = self.to_json()
        elif path.suffix == ".csv":
            text = io.StringIO()
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
        """Reads a table that `save` wrote.

        Raises:
            ProblemError: it is none, or of another version.
        """
        path = checked_path(path)
        try:
            if path.suffix == ".parquet":
                rows = _from_parquet(path)
            elif path.suffix == ".csv":
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
        """The table as JSON."""
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
    """The path of a table.

    Raises:
        ProblemError: its end is of no form of table, or a library for that is missing.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ProblemError(f"'{path}' must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if path.suffix == ".parquet":
        _pyarrow()
    return path


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ProblemError(
            "Parquet needs pyarrow, which is not installed: pip install 'remat[tables]', or name a .csv or .json file"
        ) from None
    return pyarrow


def _as_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    arrow = _pyarrow()
    kinds = {
        "str": arrow.string(),
        "int": arrow.int64(),
        "float": arrow.float64(),
        "bool": arrow.bool_(),
    }
    schema = arrow.schema(
        [(name, kinds[kind]) for name, kind in _TYPES.items()], {"remat_sweep": str(VERSION)}
    )
    sink = arrow.BufferOutputStream()
    arrow.parquet.write_table(arrow.Table.from_pylist(list(rows), schema=schema), sink)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _from_parquet(path: Path) -> list[dict[str, Any]]:
    arrow = _pyarrow()
    try:
        table = arrow.parquet.read_table(path)
    except arrow.ArrowInvalid as error:
        raise ProblemError(str(error)) from None
    if (table.schema.metadata or {}).get(b"remat_sweep") != str(VERSION).encode():
        raise ProblemError(f"it is no sweep of version {VERSION}")
    return table.to_pylist()  # type: ignore[no-any-return]


#: How the text of a cell of CSV is read.
_READERS: Mapping[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text == "True",
}
_OPTIONAL = frozenset(f.name for f in fields(ExperimentRow) if "None" in str(f.type))


def _typed(row: Mapping[str, str]) -> dict[str, Any]:
    """A row of CSV, whose cells are text; an empty one is None if its column may be."""
    return {
        name: None if name in _OPTIONAL and not text else _READERS[_TYPES.get(name, "str")](text)
        for name, text in row.items()
    }
