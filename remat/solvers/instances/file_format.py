"""Write problem instances as compact JSON, and read them again with a check of every entry.

A file is one JSON object. The first keys of the object describe the problem: the version of the format, the kind, and
the keys of `HEAD`. After these first keys comes the problem, with one line for each of the problem's fields. Most
fields of a problem are columns: lists with one entry for each node or item. A column of bools is a string of ``0`` and
``1``::

    {"remat_instance":1,
    "kind":"graph",
    "name":"llama-7b",
    "source":"LlamaForCausalLM, batch 1 × 4096 tokens",
    "cost":"roofline:h100",
    "unit":"ps",
    "full_bytes":81234567,
    "least_bytes":4096,
    "problem":{"names":["primals_1","embedding"],
    "inputs":[[],[0]],
    "savable":"01",
    …}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from remat.errors import ProblemError
from remat.solvers.base import KINDS, AnyProblem
from remat.solvers.columns import short
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.instances.node_link import is_node_link, read_node_link
from remat.solvers.problem import KnapsackProblem

#: Version of the format; files of other versions are refused.
VERSION = 1
#: Largest size of a file, in bytes.
MAX_BYTES = 128 * 2**20
#: Largest number of characters of a name or another string in a file.
MAX_TEXT = 1_000

#: Keys of a file that come after version and kind, and before the problem.
HEAD = ("name", "source", "cost", "unit", "full_bytes", "least_bytes")
#: Columns of bools.
_FLAGS = ("savable", "recomputable", "in_forward")
#: Fields whose value in a file is a number or null, not a list.
_NUMBERS = ("capacity", "resident")
#: For each kind of problem, the fields that a file has. The field ``unit`` is left out because `HEAD` has the unit,
#: and ``hints`` because a solver does not need them.
_COLUMNS = {
    kind.kind: tuple(f.name for f in fields(kind) if f.name not in ("unit", "hints"))  # type: ignore[arg-type]
    for kind in KINDS
}


def dump(head: Mapping[str, Any], problem: AnyProblem) -> str:
    """Convert an instance to JSON text; ``head`` has a value for each key of `HEAD`."""
    columns = {key: getattr(problem, key) for key in _COLUMNS[problem.kind]}
    for key in _FLAGS if isinstance(problem, GraphProblem) else ():
        columns[key] = "".join("1" if flag else "0" for flag in columns[key])
    lines = _lines({"remat_instance": VERSION, "kind": problem.kind})
    lines += _lines({key: head[key] for key in HEAD})
    lines.append('"problem":{' + ",\n".join(_lines(columns)) + "}")
    return "{" + ",\n".join(lines) + "}\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [
        f'"{key}":{json.dumps(value, separators=(",", ":"), ensure_ascii=False)}'
        for key, value in values.items()
    ]


def parse(text: str) -> tuple[dict[str, Any], AnyProblem]:
    """Parse a text that `dump` wrote, or a published graph in node-link JSON; return description and problem.

    The description is a dict with the keys of `HEAD`, in which only the unit is checked. The problem is
    checked, except for the length and printability of its names.

    Raises:
        ProblemError: the text is not a complete instance of this version, has unknown keys, or has
            an invalid entry. The message names the fault in one line.
    """
    data = _object(text)
    # Published graphs have no head, so their costs have no unit.
    if is_node_link(data):
        named = data["graph"].get("name") if isinstance(data.get("graph"), dict) else None
        head = dict.fromkeys(HEAD) | {"source": "", "cost": "", "unit": ""}
        return {**head, "name": str(named or "graph")}, read_node_link(data)
    version = data.pop("remat_instance", None)
    if type(version) is not int:
        raise ProblemError(
            "this is no instance: expected a JSON object with the key 'remat_instance'; "
            "`remat capture` writes one"
        )
    if version != VERSION:
        do = "update remat" if version > VERSION else "capture it again"
        raise ProblemError(
            f"this instance is of version {version}; this remat reads version {VERSION}: {do}"
        )
    _keys("the file", data, ("kind", *HEAD, "problem"))
    name, columns = data.pop("kind"), data.pop("problem")
    kind = next((kind for kind in KINDS if kind.kind == name), None)
    if kind is None:
        raise ProblemError(f"kind is {short(name)}; expected 'graph', 'knapsack' or 'schedule'")
    return data, _problem(kind, columns, text_of("unit", data["unit"]))


def _problem(kind: Any, columns: Any, unit: str) -> Any:
    """Build a problem of class ``kind`` from the JSON object ``columns`` of a file; its constructor checks the entries."""
    if type(columns) is not dict:
        raise ProblemError(f"problem is {short(columns)}; expected an object")
    _keys("problem", columns, _COLUMNS[kind.kind])
    for label, column in columns.items():
        if label in _FLAGS:
            columns[label] = _flags(label, column)
        elif label not in _NUMBERS and type(column) is not list:
            raise ProblemError(f"{label} is {short(column)}; expected a list")
    return kind(**columns) if kind is KnapsackProblem else kind(**columns, unit=unit)


def text_of(label: str, value: object) -> str:
    """Return ``value`` if it is printable text of at most `MAX_TEXT` characters, or raise `ProblemError`."""
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise ProblemError(
            f"{label} is {short(value)}; expected printable text of at most {MAX_TEXT} characters"
        )
    return value


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON text that is one object, without NaN, infinities and duplicate keys."""

    def refuse(constant: str) -> None:
        raise ProblemError(f"{constant} stands where only integers may")

    # Python's `json` silently takes the last of duplicate keys.
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, value in pairs:
            if key in entries:
                raise ProblemError(f"key {short(key)} stands there twice; expected it once")
            entries[key] = value
        return entries

    try:
        data = json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ProblemError(f"this is no JSON, or it is cut off: {error}") from None
    except RecursionError:
        raise ProblemError("this is no instance: it is nested too deeply") from None
    except ProblemError:
        raise
    except ValueError as error:  # an integer with more digits than Python's limit
        raise ProblemError(f"a number is too long: {error}") from None
    if type(data) is not dict:
        raise ProblemError(f"this is no instance: expected a JSON object, got {short(data)}")
    return data


def _keys(owner: str, data: dict[str, Any], expected: Sequence[str]) -> None:
    missing = [key for key in expected if key not in data]
    unknown = [key for key in data if key not in expected]
    if missing:
        raise ProblemError(
            f"{owner} has no key {short(missing[0])}; expected {', '.join(expected)}"
        )
    if unknown:
        raise ProblemError(
            f"{owner} has the unknown key {short(unknown[0])}; expected {', '.join(expected)}"
        )


def _flags(label: str, value: Any) -> list[bool]:
    if type(value) is not str or not set(value) <= {"0", "1"}:
        raise ProblemError(
            f"{label} is {short(value)}; expected text of digits 0 or 1, one for each node"
        )
    return [digit == "1" for digit in value]
