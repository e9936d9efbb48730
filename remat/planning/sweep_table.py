"""The table of a sweep: its rows, and files of them in JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from remat.errors import ProblemError, RematError
from remat.files import write_whole
from remat.planning.comparison import ComparisonRow
from remat.units import format_bytes, format_cost
from remat.version import __version__

#: Version of the tables and of what is written while a sweep runs.
VERSION = 2
#: Forms of a table, by the end of its file's name.
SUFFIXES = (".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One model under one cost model, by one solver at one budget.

    Attributes:
        model: name of the model.
        cost: the cost model as it was asked for.
        of: what else the figures depend on: the digest of a captured step, or the name of a function with the
            lowering it is captured for, and a time limit.
        row: the figures, as `remat.compare` has them; ``reason`` says why there are none.
        priced: the cost model that ``cost`` stands for on this step; empty where there are no figures.
        without_peak_bytes: peak of the step without remat; None where it is not known.
        without_step_cost: cost of the step without remat, in the row's unit; None where it is not known.
    """

    model: str
    cost: str
    row: ComparisonRow
    of: str = ""
    priced: str = ""
    without_peak_bytes: int | None = None
    without_step_cost: int | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What was asked: model, cost model, budget, solver, and what else the figures depend on."""
        return self.model, self.cost, self.row.budget, self.row.solver, self.of

    def as_dict(self) -> dict[str, Any]:
        """The row as it stands in tables."""
        own = {name: getattr(self, name) for name in _OWN}
        return {**own, **asdict(self.row)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> SweepRow:
        """Reads what `as_dict` returned.

        Raises:
            ProblemError: it is something else.
        """
        if set(told) != set(COLUMNS):
            raise ProblemError(
                f"its columns are {', '.join(map(str, told))}; expected {', '.join(COLUMNS)}: it may be of another "
                f"version of remat than {__version__}. Give another file"
            )
        figures = {f.name: told[f.name] for f in fields(ComparisonRow)}
        texts: dict[str, Any] = {
            name: str(told[name]) for name in ("model", "of", "cost", "priced")
        }
        without: dict[str, Any] = {name: told[name] for name in _OWN[-2:]}
        return cls(**texts, **without, row=ComparisonRow(**figures))


#: Columns of a table.
_OWN = ("model", "of", "cost", "priced", "without_peak_bytes", "without_step_cost")
COLUMNS = (*_OWN, *(f.name for f in fields(ComparisonRow)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All rows of a sweep, by model, cost model, budget and solver in the order asked for."""

    rows: tuple[SweepRow, ...]

    def save(self, path: str | Path) -> Path:
        """Writes the table as JSON, CSV or Parquet, by the end of the name; whole or not at all.

        Raises:
            ProblemError: another end, a library is missing, or the file cannot be written.
        """
        path = checked_path(path)
        rows = [row.as_dict() for row in self.rows]
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
        try:
            write_whole(path, content)
        except OSError as error:
            raise ProblemError(f"'{path}' cannot be written: {error.strerror or error}") from error
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
                told = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(told, dict) or told.get("remat_sweep") != VERSION:
                    raise ProblemError(f"it is no sweep of version {VERSION}")
                rows = told["rows"]
            return cls(rows=tuple(map(SweepRow.from_dict, rows)))
        except RematError as error:
            raise ProblemError(f"'{path}' cannot be read: {error}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProblemError(f"'{path}' cannot be read: {error}") from error

    def to_json(self) -> str:
        """The table as JSON."""
        rows = [row.as_dict() for row in self.rows]
        return json.dumps({"remat_sweep": VERSION, "rows": rows}, indent=2) + "\n"

    def __str__(self) -> str:
        wide = {
            "model": max((len(r.model) for r in self.rows), default=0),
            "cost": max((len(r.priced or r.cost) for r in self.rows), default=0),
        }
        solver = max((len(r.row.solver) for r in self.rows), default=0)
        lines = [
            f"{'model':{wide['model']}}  {'cost':{wide['cost']}}  {'budget':>13}  {'solver':{solver}}  "
            f"{'saved':>9} {'peak':>9} {'without':>9} {'recomputed':>11} {'step without':>12}"
        ]
        for r in self.rows:
            priced = r.priced or r.cost
            head = f"{r.model:{wide['model']}}  {priced:{wide['cost']}}  {r.row.label:>13}  {r.row.solver:{solver}}"
            if r.row.saved_bytes is None:
                lines.append(f"{head}  {r.row.reason}")
                continue
            cost = format_cost(r.row.recompute_cost or 0, r.row.unit or "")
            peak, without = r.without_peak_bytes, r.without_step_cost
            before = "–" if peak is None else format_bytes(peak)
            step = "–" if without is None else format_cost(without, r.row.unit or "")
            lines.append(
                f"{head}  {format_bytes(r.row.saved_bytes):>9} {format_bytes(r.row.peak_bytes or 0):>9} "
                f"{before:>9} {cost:>11} {step:>12}"
            )
        return "\n".join(lines)


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
        "best": arrow.bool_(),
        **dict.fromkeys(_WHOLE, arrow.int64()),
        **dict.fromkeys(_REAL, arrow.float64()),
    }
    schema = arrow.schema(
        [(name, kinds.get(name, arrow.string())) for name in COLUMNS], {"remat_sweep": str(VERSION)}
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


def _columns_of(kind: str) -> tuple[str, ...]:
    return tuple(f.name for f in fields(ComparisonRow) if str(f.type).startswith(kind))


_WHOLE = (*_columns_of("int"), *_OWN[-2:])
_REAL = _columns_of("float")


def _typed(row: Mapping[str, str]) -> dict[str, Any]:
    """A row of CSV, whose cells are text; an empty one is None."""
    told: dict[str, Any] = dict(row)
    for name, text in row.items():
        if name in _WHOLE:
            told[name] = int(text) if text else None
        elif name in _REAL:
            told[name] = float(text) if text else None
        elif name == "best":
            told[name] = text == "True"
        elif name not in ("model", "of", "cost", "priced", "solver", "budget"):
            told[name] = text or None
    return told
