"""The JSON of an instance: written compactly, read with every entry checked.

One JSON object: what the problem is, then the problem column by column, one line each, with flags as
text of ``0`` and ``1``::

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

from remat.errors import ProblemError
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.node_link import is_node_link, read_node_link
from remat.solvers.problem import INT64_MAX, KnapsackProblem
from remat.solvers.schedule_problem import ScheduleProblem

#: Version of the format; a file of another one is refused.
VERSION = 1
#: Nodes, or items, that a problem in a file may have.
MAX_NODES = 1_000_000
#: Bytes that a file may have.
MAX_BYTES = 128 * 2**20
#: Characters that a name or another text in a file may have.
MAX_TEXT = 1_000

#: What stands before the problem, besides version and kind.
HEAD = ("name", "source", "cost", "unit", "full_bytes", "least_bytes")
_FLAGS = ("savable", "recomputable", "in_forward")
_GRAPH = ("names", "inputs", "cost", "size", *_FLAGS, "needed", "capacity")
_KNAPSACK = ("weights", "values", "capacity")
_SCHEDULE = tuple(f.name for f in fields(ScheduleProblem) if f.name not in ("unit", "known"))
_COLUMNS = {GraphProblem: _GRAPH, KnapsackProblem: _KNAPSACK, ScheduleProblem: _SCHEDULE}
#: What the problems are called in files.
KINDS = {GraphProblem: "graph", KnapsackProblem: "knapsack", ScheduleProblem: "schedule"}

Problem = GraphProblem | KnapsackProblem | ScheduleProblem


def dump(head: Mapping[str, Any], problem: Problem) -> str:
    """Writes an instance; equal instances give equal texts.

    Args:
        head: a value for each key of `HEAD`.
        problem: the problem.
    """
    columns = {key: getattr(problem, key) for key in _COLUMNS[type(problem)]}
    for key in _FLAGS if isinstance(problem, GraphProblem) else ():
        columns[key] = "".join("1" if flag else "0" for flag in columns[key])
    lines = _lines({"remat_instance": VERSION, "kind": KINDS[type(problem)]})
    lines += _lines({key: head[key] for key in HEAD})
    lines.append('"problem":{' + ",\n".join(_lines(columns)) + "}")
    return "{" + ",\n".join(lines) + "}\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [
        f'"{key}":{json.dumps(value, separators=(",", ":"), ensure_ascii=False)}'
        for key, value in values.items()
    ]


def parse(text: str) -> tuple[dict[str, Any], Problem]:
    """Reads what `dump` wrote: the head, unchecked, and the problem, with all but its texts checked.

    Raises:
        ProblemError: the text is no instance, cut off, of another version, too large, has unknown
            keys, or an entry that cannot be meant; the message names it in one line.
    """
    data = _object(text)
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
    kind, columns = data.pop("kind"), data.pop("problem")
    if kind not in KINDS.values():
        raise ProblemError(f"kind is {_short(kind)}; expected 'graph', 'knapsack' or 'schedule'")
    if type(columns) is not dict:
        raise ProblemError(f"problem is {_short(columns)}; expected an object")
    unit = text_of("unit", data["unit"])
    read: dict[str, Callable[[dict[str, Any], str], Problem]]
    read = {"graph": _graph, "knapsack": _knapsack, "schedule": _schedule}
    return data, read[kind](columns, unit)


def text_of(label: str, value: object) -> str:
    """The value, if it is a text that can be shown in one line; a `ProblemError` if not."""
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise ProblemError(
            f"{label} is {_short(value)}; expected printable text of at most {MAX_TEXT} characters"
        )
    return value


def integer(label: str, value: object) -> int:
    """The value, if it is a plain int from 0 to 2**63 - 1; a `ProblemError` if not."""
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise ProblemError(f"{label} is {_short(value)}; expected an integer from 0 to 2**63 - 1")
    return value


def few(label: str, values: Sequence[Any]) -> None:
    """Raises a `ProblemError` if there are more than `MAX_NODES`."""
    if len(values) > MAX_NODES:
        raise ProblemError(f"{label} has {len(values)} entries; at most {MAX_NODES} are read")


def _object(text: str) -> dict[str, Any]:
    """The one object of a JSON text; NaN, infinities and keys given twice are refused."""

    def refuse(constant: str) -> None:
        raise ProblemError(f"{constant} stands where only integers may")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ProblemError(f"key {_short(key)} stands there twice; expected it once")
            found[key] = value
        return found

    try:
        data = json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ProblemError(f"this is no JSON, or it is cut off: {error}") from None
    except RecursionError:
        raise ProblemError("this is no instance: it is nested too deeply") from None
    except ProblemError:
        raise
    except ValueError as error:  # an integer of more digits than Python reads
        raise ProblemError(f"a number is too long: {error}") from None
    if type(data) is not dict:
        raise ProblemError(f"this is no instance: expected a JSON object, got {_short(data)}")
    return data


def _graph(data: dict[str, Any], unit: str) -> GraphProblem:
    _keys("problem", data, _GRAPH)
    names = _list("names", data["names"])
    n = len(names)
    inputs = _list("inputs", data["inputs"], n)
    for i, row in enumerate(inputs):
        if type(row) is not list:
            raise ProblemError(f"inputs[{i}] is {_short(row)}; expected a list of nodes")
    if not _all_integers(list(chain.from_iterable(inputs))):
        for i, row in enumerate(inputs):
            _integers(f"inputs[{i}]", row)
    for i, row in enumerate(inputs):
        if row and max(row) >= i:
            raise ProblemError(
                f"inputs[{i}] ({_short(names[i])}) has node {max(row)}; expected earlier nodes "
                "only, so that there is no cycle: list each node after its inputs"
            )
    return GraphProblem(
        names=tuple(names),
        inputs=tuple(map(tuple, inputs)),
        cost=_integers("cost", _list("cost", data["cost"], n)),
        size=_integers("size", _list("size", data["size"], n)),
        savable=_flags("savable", data["savable"], n),
        recomputable=_flags("recomputable", data["recomputable"], n),
        in_forward=_flags("in_forward", data["in_forward"], n),
        needed=_integers("needed", _list("needed", data["needed"])),
        unit=unit,
        capacity=None if data["capacity"] is None else integer("capacity", data["capacity"]),
    )


def _schedule(data: dict[str, Any], unit: str) -> ScheduleProblem:
    _keys("problem", data, _SCHEDULE)
    for label in _SCHEDULE:
        if label not in ("capacity", "resident"):
            _list(label, data[label])
    return ScheduleProblem(**data, unit=unit)


def _knapsack(data: dict[str, Any], unit: str) -> KnapsackProblem:
    _keys("problem", data, _KNAPSACK)
    weights = _list("weights", data["weights"])
    return KnapsackProblem(
        weights=_integers("weights", weights),
        values=_integers("values", _list("values", data["values"], len(weights))),
        capacity=integer("capacity", data["capacity"]),
    )


def _keys(what: str, data: dict[str, Any], expected: Sequence[str]) -> None:
    missing = [key for key in expected if key not in data]
    unknown = [key for key in data if key not in expected]
    if missing:
        raise ProblemError(
            f"{what} has no key {_short(missing[0])}; expected {', '.join(expected)}"
        )
    if unknown:
        raise ProblemError(
            f"{what} has the unknown key {_short(unknown[0])}; expected {', '.join(expected)}"
        )


def _list(label: str, value: Any, length: int | None = None) -> list[Any]:
    if type(value) is not list:
        raise ProblemError(f"{label} is {_short(value)}; expected a list")
    few(label, value)
    if length is not None and len(value) != length:
        raise ProblemError(
            f"{label} has {len(value)} entries; expected {length}, one for each node or item"
        )
    return value


def _flags(label: str, value: Any, length: int) -> tuple[bool, ...]:
    if type(value) is not str or len(value) != length or not set(value) <= {"0", "1"}:
        raise ProblemError(
            f"{label} is {_short(value)}; expected text of {length} digits 0 or 1, one for each node"
        )
    return tuple(digit == "1" for digit in value)


def _integers(label: str, values: list[Any]) -> tuple[int, ...]:
    if not _all_integers(values):
        for i, value in enumerate(values):
            integer(f"{label}[{i}]", value)
    return tuple(values)


def _all_integers(values: list[Any]) -> bool:
    return not values or (
        set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= INT64_MAX
    )


def _short(value: object) -> str:
    """A value in a message: one line of sixty characters at most."""
    if isinstance(value, (list, dict)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return f"{json.dumps(value)}"
    if isinstance(value, str) and len(value) > 60:
        return f"text of {len(value)} characters"
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        return "an integer of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
