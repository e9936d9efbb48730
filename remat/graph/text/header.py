"""The head of a text: what graph it is, and what its symbolic sizes are made of."""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat.graph.text.expressions import SYMBOL
from remat.graph.text.fakes import Symbol
from remat.graph.text.literals import Reader
from remat.graph.text.syntax import Source, call_name, quoted

#: Version of the text form; a newer one is refused.
VERSION = 1

_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is said about a graph as a whole.

    Attributes:
        kind: ``"joint"``, or ``"graph"`` for one half or any other graph.
        name: what the graph is called.
        fields: of a joint graph, what a `JointGraph` holds besides the graph.
        device: where tensors lie that say nothing else.
    """

    kind: str
    name: str
    device: str = "cpu"
    fields: Mapping[str, Any]


_FIELDS: Mapping[str, type[Any]] = {
    "lower": str,
    "num_fwd_outputs": int,
    "static_inputs": tuple,
    "received": tuple,
}


def write_header(header: Header, symbols: Iterable[Symbol]) -> list[str]:
    """The lines of a head."""
    parts = [quoted(header.name), f"version={VERSION}", f"device={quoted(header.device)}"]
    for key, value in header.fields.items():
        if isinstance(value, str):
            parts.append(f"{key}={quoted(value)}")
        elif value != ():
            parts.append(f"{key}={_list(value) if isinstance(value, tuple) else value}")
    lines = _call(header.kind, parts)
    declared = [f"{s.name}={_write_symbol(s)}" for s in symbols]
    return lines + (_call("symbols", declared) if declared else [])


def _list(values: tuple[Any, ...]) -> str:
    """Positions as a list, over several lines where they are many."""
    text = str(list(values))
    if len(text) <= _WIDTH - 20:
        return text
    filled = textwrap.fill(text[1:-1], _WIDTH - 8)
    return f"[\n{textwrap.indent(filled, ' ' * 8)},\n    ]"


def _call(name: str, parts: list[str]) -> list[str]:
    """A call on one line where it fits, else with a line for each argument."""
    line = f"{name}({', '.join(parts)})"
    if len(line) <= _WIDTH and "\n" not in line:
        return [line]
    return [f"{name}(", *(f"    {part}," for part in parts), ")"]


def _write_symbol(symbol: Symbol) -> str:
    parts = [] if symbol.hint is None else [repr(symbol.hint)]
    parts += [] if symbol.least is None else [f"min={symbol.least!r}"]
    parts += [] if symbol.most is None else [f"max={symbol.most!r}"]
    if symbol.positive != symbol.name.startswith("s"):
        parts.append(f"positive={symbol.positive}")
    parts += ["size_like=True"] if symbol.size_like else []
    return f"symbol({', '.join(parts)})"


def symbols_of(found: Iterable[sympy.Symbol], env: ShapeEnv | None) -> list[Symbol]:
    """What an environment knows about symbols, in the order of their names."""
    known = []
    for symbol in sorted(found, key=lambda s: (s.name.rstrip("0123456789"), len(s.name), s.name)):
        bounds = None if env is None else env.var_to_range.get(symbol)
        hint = None if env is None else env.backed_var_to_val.get(symbol)
        known.append(
            Symbol(
                name=symbol.name,
                hint=None if hint is None else _number(hint),
                least=None if bounds is None else _number(bounds.lower),
                most=None if bounds is None else _number(bounds.upper),
                positive=bool(symbol.is_positive),
                size_like=env is not None and symbol in env.size_like,
            )
        )
    return known


def _number(value: Any) -> int | float | None:
    """A hint or bound as a number; None for what is infinite or none."""
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    if isinstance(value, (float, sympy.Float)) and math.isfinite(value):
        return float(value)
    return None


def read_header(source: Source, node: ast.stmt | None, kind: str) -> tuple[Header, torch.device]:
    """Reads the first statement of a text."""
    literals = Reader(source)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or call_name(call) != kind:
        raise source.error(node, "the first statement", f'{kind}("name", version={VERSION}, …)')
    if len(call.args) != 1:
        raise source.error(call, f"{len(call.args)} unnamed values", "one: the name of the graph")
    name = source.string(call.args[0])
    given = {k.arg: k.value for k in call.keywords}
    wanted = {"version", "device", *(_FIELDS if kind == "joint" else ())}
    if not wanted - {"static_inputs", "received"} <= given.keys() <= wanted:
        raise source.error(
            call,
            f"a head with {', '.join(sorted(str(k) for k in given)) or 'nothing'}",
            f"one with {', '.join(sorted(wanted))}",
        )
    version = source.integer(given["version"])
    if version != VERSION:
        raise source.error(
            call, f"a text of version {version}", f"version {VERSION}, as this remat reads"
        )
    device = literals.device(given["device"])
    fields = {k: _field(source, k, given[k], literals) for k in _FIELDS if k in given}
    return Header(kind=kind, name=name, device=str(device), fields=fields), device


def _field(source: Source, key: str, node: ast.expr, literals: Reader) -> Any:
    """One value of the head, checked."""
    value = literals.read(node)
    if isinstance(value, list):
        value = tuple(value)
    if key == "static_inputs":
        good = type(value) is tuple and all(type(v) is int and v >= 0 for v in value)
    elif key == "received":
        good = type(value) is tuple and all(
            type(v) is tuple and len(v) == 3 and all(type(x) is int and x >= 0 for x in v)
            for v in value
        )
    else:
        good = type(value) is _FIELDS[key] and value != "" and (type(value) is str or value >= 0)
    if not good:
        raise source.error(node, f"{key} as {source.quote(node)}", _EXPECTED[key])
    return value


_EXPECTED = {
    "lower": 'the name of a lowering, such as "inductor"',
    "num_fwd_outputs": "a number of 0 or more",
    "static_inputs": "a list of positions",
    "received": "a list of three numbers each",
}


def read_symbols(source: Source, node: ast.stmt | None) -> list[Symbol] | None:
    """Reads ``symbols(…)``; None if a statement is not that."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or call_name(call) != "symbols":
        return None
    if call.args:
        raise source.error(call.args[0], source.quote(call.args[0]), "name=symbol(…)")
    return [_read_symbol(source, k) for k in call.keywords]


def _read_symbol(source: Source, given: ast.keyword) -> Symbol:
    name, call = given.arg or "", given.value
    if not SYMBOL.fullmatch(name):
        raise source.error(
            given, f"a symbol called {name[:60]!r}", "a name such as s77, u0, zf1 or zuf1"
        )
    if not isinstance(call, ast.Call) or call_name(call) != "symbol" or len(call.args) > 1:
        raise source.error(call, source.quote(call), "symbol(hint, min=…, max=…)")
    is_float = name.startswith("z")
    values: dict[str, Any] = {}
    if call.args:
        values["hint"] = _bound(source, call.args[0], is_float)
    for part in call.keywords:
        if part.arg in ("min", "max"):
            key = "least" if part.arg == "min" else "most"
            values[key] = _bound(source, part.value, is_float)
        elif part.arg in ("positive", "size_like"):
            if not isinstance(part.value, ast.Constant) or type(part.value.value) is not bool:
                raise source.error(part, source.quote(part), "True or False")
            values[part.arg] = part.value.value
        else:
            raise source.error(part, f"'{part.arg}'", "min, max, positive or size_like")
    values.setdefault("positive", name.startswith("s"))
    order = [values.get(k) for k in ("least", "hint", "most")]
    known = [v for v in order if v is not None]
    if known != sorted(known):
        raise source.error(
            given, source.quote(given), "min to be below the hint, and that below max"
        )
    return Symbol(name=name, **values)


def _bound(source: Source, node: ast.expr, is_float: bool) -> int | float:
    if is_float and isinstance(node, ast.Constant) and type(node.value) is float:
        return node.value
    return source.integer(node)
