"""The head of a text: what graph it is, and what its symbolic sizes are made of."""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat.graph.text.expressions import SYMBOL
from remat.graph.text.fakes import Symbol
from remat.graph.text.literals import ArgumentReader
from remat.graph.text.syntax import Source, call_name, quoted

#: Version of the text form; a newer one is refused.
VERSION = 1

_WIDTH = 100


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is tuple and all(map(is_item, value))


def _is_triples(value: Any) -> bool:
    return _is_list_of(lambda item: _is_list_of(_is_count)(item) and len(item) == 3)(value)


def _is_turn(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 4:
        return False
    at, received, shared, returned = value
    is_positions = _is_list_of(_is_count)(returned)
    return _is_count(at) and _is_triples(received) and _is_triples(shared) and is_positions


_TRIPLES = ("a list of three numbers each", _is_triples)

#: Fields of a joint graph: what is expected of each, and whether a value is that.
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "lower": (
        'the name of a lowering, such as "inductor"',
        lambda value: type(value) is str and value != "",
    ),
    "num_fwd_outputs": ("a number of 0 or more", _is_count),
    "static_inputs": ("a list of positions", _is_list_of(_is_count)),
    "received": _TRIPLES,
    "shared": _TRIPLES,
    "returned": ("a list of positions", _is_list_of(_is_count)),
    "runs": ("a number of 1 or more", lambda value: _is_count(value) and value > 0),
    "turns": (
        "a list of turns, each a number, two tuples of three numbers each, and a tuple of positions",
        _is_list_of(_is_turn),
    ),
}

_OPTIONAL = frozenset(("static_inputs", "received", "shared", "returned", "runs", "turns"))


def write_header(
    kind: str, name: str, device: str, fields: Mapping[str, Any], symbols: Iterable[Symbol]
) -> list[str]:
    """The lines of a head.

    Args:
        kind: ``"joint"``, or ``"graph"`` for one half or any other graph.
        name: what the graph is called.
        device: where tensors lie that say nothing else.
        fields: of a joint graph, what a `JointGraph` holds besides the graph.
        symbols: what sizes are made of.
    """
    parts = [quoted(name), f"version={VERSION}", f"device={quoted(device)}"]
    for key, value in fields.items():
        if isinstance(value, str):
            parts.append(f"{key}={quoted(value)}")
        elif value != ():
            parts.append(f"{key}={_list(value) if isinstance(value, tuple) else value}")
    lines = _call(kind, parts)
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
    ordered = sorted(found, key=lambda s: (s.name.rstrip("0123456789"), len(s.name), s.name))
    if env is None:
        return [Symbol(name=s.name, positive=bool(s.is_positive)) for s in ordered]
    ranges = {s: env.var_to_range.get(s) for s in ordered}
    return [
        Symbol(
            name=s.name,
            hint=_number(env.backed_var_to_val.get(s)),
            least=_number(getattr(ranges[s], "lower", None)),
            most=_number(getattr(ranges[s], "upper", None)),
            positive=bool(s.is_positive),
            size_like=s in env.size_like,
        )
        for s in ordered
    ]


def _number(value: Any) -> int | float | None:
    """A hint or bound as a number; None for what is infinite or none."""
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    if isinstance(value, (float, sympy.Float)) and math.isfinite(value):
        return float(value)
    return None


def read_header(
    source: Source, node: ast.stmt | None, kind: str
) -> tuple[str, torch.device, dict[str, Any]]:
    """Name, device and fields of a graph, by the first statement of a text; see `write_header`."""
    literals = ArgumentReader(source)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or call_name(call) != kind:
        raise source.error(node, f'{kind}("name", version={VERSION}, …)', "the first statement")
    if len(call.args) != 1:
        got = f"{len(call.args)} unnamed values"
        raise source.error(call, "one: the name of the graph", got)
    name = source.string(call.args[0])
    given = {k.arg: k.value for k in call.keywords}
    wanted = {"version", "device", *(_FIELDS if kind == "joint" else ())}
    if not wanted - _OPTIONAL <= given.keys() <= wanted:
        got = f"a head with {', '.join(sorted(map(str, given))) or 'nothing'}"
        raise source.error(call, f"one with {', '.join(sorted(wanted))}", got)
    version = source.integer(given["version"])
    if version != VERSION:
        expected = f"version {VERSION}, as this remat reads"
        raise source.error(call, expected, f"a text of version {version}")
    device = literals.device(given["device"])
    fields: dict[str, Any] = {}
    for key, (expected, is_right) in _FIELDS.items():
        if key in given:
            value = literals.read(given[key])
            fields[key] = tuple(value) if isinstance(value, list) else value
            if not is_right(fields[key]):
                raise source.error(given[key], expected, f"{key} as {{}}")
    return name, device, fields


def read_symbols(source: Source, node: ast.stmt | None) -> list[Symbol] | None:
    """Reads ``symbols(…)``; None if a statement is not that."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or call_name(call) != "symbols":
        return None
    if call.args:
        raise source.error(call.args[0], "name=symbol(…)")
    return [_read_symbol(source, k) for k in call.keywords]


def _read_symbol(source: Source, given: ast.keyword) -> Symbol:
    name, call = given.arg or "", given.value
    if not SYMBOL.fullmatch(name):
        got = f"a symbol called {name[:60]!r}"
        raise source.error(given, "a name such as s77, u0, zf1 or zuf1", got)
    if not isinstance(call, ast.Call) or call_name(call) != "symbol" or len(call.args) > 1:
        raise source.error(call, "symbol(hint, min=…, max=…)")
    values: dict[str, Any] = {"positive": name.startswith("s")}
    for key, value in [("", x) for x in call.args] + [(k.arg, k.value) for k in call.keywords]:
        if key in _BOUNDS:
            values[_BOUNDS[key]] = _read_bound(source, value, is_float=name.startswith("z"))
        elif key in ("positive", "size_like"):
            if not isinstance(value, ast.Constant) or type(value.value) is not bool:
                raise source.error(value, "True or False")
            values[key] = value.value
        else:
            raise source.error(call, "min, max, positive or size_like", f"'{key}'")
    known = [v for v in map(values.get, ("least", "hint", "most")) if v is not None]
    if known != sorted(known):
        raise source.error(given, "min to be below the hint, and that below max")
    return Symbol(name=name, **values)


_BOUNDS: Mapping[str | None, str] = {"": "hint", "min": "least", "max": "most"}


def _read_bound(source: Source, node: ast.expr, *, is_float: bool) -> int | float:
    if is_float and isinstance(node, ast.Constant) and type(node.value) is float:
        return node.value
    return source.integer(node)
