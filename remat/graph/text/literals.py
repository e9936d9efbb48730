"""Arguments of nodes as literals, names and a few calls, and back."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.text.expressions import expression_of, write_expression
from remat.graph.text.opaque import read_opaque, write_opaque
from remat.graph.text.syntax import INTEGERS, MAX_STRING, Source, arguments, call_name, quoted
from remat.graph.text.targets import read_target, write_call, write_target
from remat.torch_compat import dtype_abbrs

#: Objects of PyTorch that stand by their names, such as ``torch.float32``.
CONSTANTS: dict[str, Any] = {
    str(thing): thing
    for thing in (
        *dtype_abbrs,
        *(v for v in vars(torch).values() if isinstance(v, (torch.layout, torch.memory_format))),
    )
}
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:\d{1,4})?", re.ASCII)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Writer:
    """Writes arguments.

    Attributes:
        symbols: the symbols that came up.
    """

    def __init__(self) -> None:
        self.symbols: set[Any] = set()

    def write(self, value: Any) -> str:
        """The text of an argument.

        Raises:
            ProblemError: it holds nodes in a container that has no text form.
        """
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return writer(self, value)
        if isinstance(value, (torch_compat.OpOverload, torch_compat.HigherOrderOperator)):
            return write_call(write_target(value))
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (list, tuple, dict)):
            raise ProblemError(
                f"a {type(value).__name__} has no text form: expected a list, tuple or dict"
            )
        return write_opaque(value)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The text of a call."""
        parts = [self.write(a) for a in args]
        plain = {k: v for k, v in kwargs.items() if _is_keyword(k)}
        parts += [f"{k}={self.write(v)}" for k, v in plain.items()]
        if len(plain) < len(kwargs):  # names that Python reserves, and an order to be kept
            parts = [*parts[: len(args)], f"**{self._dict(kwargs)}"]
        return f"{write_call(name)}({', '.join(parts)})"

    def _list(self, value: list[Any]) -> str:
        return f"[{', '.join(map(self.write, value))}]"

    def _tuple(self, value: tuple[Any, ...]) -> str:
        return f"({', '.join(map(self.write, value))}{',' if len(value) == 1 else ''})"

    def _dict(self, value: dict[Any, Any]) -> str:
        return f"{{{', '.join(f'{self.write(k)}: {self.write(v)}' for k, v in value.items())}}}"

    def _slice(self, value: slice) -> str:
        return f"slice({', '.join(map(self.write, (value.start, value.stop, value.step)))})"

    def _int(self, value: int) -> str:
        if value not in INTEGERS:
            raise ProblemError(f"the integer {value:.3e} has no text form: it exceeds 64 bits")
        return str(value)

    def _complex(self, value: complex) -> str:
        return f"complex({self._float(value.real)}, {self._float(value.imag)})"

    def _float(self, value: float) -> str:
        return repr(value)  # inf and nan are names that no node can have

    def _str(self, value: str) -> str:
        if len(value) > MAX_STRING:
            raise ProblemError(
                f"a string of {len(value)} characters has no text form: at most {MAX_STRING} are read"
            )
        return quoted(value)

    def _symbolic(self, value: Any) -> str:
        return f"{type(value).__name__}[{write_expression(expression_of(value), self.symbols)}]"


def _is_keyword(name: Any) -> bool:
    return bool(IDENTIFIER.fullmatch(name)) and not keyword.iskeyword(name)


def _constant(_: Writer, value: Any) -> str:
    return str(value)


_WRITERS: dict[type[Any], Callable[[Writer, Any], str]] = {
    fx.Node: lambda _, value: str(value.name),
    type(None): _constant,
    bool: _constant,
    int: Writer._int,
    float: Writer._float,
    complex: Writer._complex,
    str: Writer._str,
    type(...): lambda _, value: "...",
    slice: Writer._slice,
    range: lambda _, value: repr(value),
    list: Writer._list,
    tuple: Writer._tuple,
    dict: Writer._dict,
    fx.immutable_collections.immutable_list: Writer._list,
    fx.immutable_collections.immutable_dict: Writer._dict,
    torch.dtype: _constant,
    torch.layout: _constant,
    torch.memory_format: _constant,
    torch.device: lambda _, value: f'torch.device("{value}")',
    torch.SymInt: Writer._symbolic,
    torch.SymFloat: Writer._symbolic,
    torch.SymBool: Writer._symbolic,
}


class Reader:
    """Reads arguments.

    Args:
        source: the text.
        node: finds a node of the graph by its name; None where no node may stand.
        symbolic: makes a symbolic number of ``SymInt[…]`` and its like; None where none may stand.
    """

    def __init__(
        self,
        source: Source,
        node: Callable[[ast.Name], fx.Node] | None = None,
        symbolic: Callable[[ast.Subscript], Any] | None = None,
    ) -> None:
        self._source = source
        self._node = node or self._nothing
        self._symbolic = symbolic or self._nothing
        self._targets: dict[str, Any] = {}

    def read(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an argument."""
        reader = _READERS.get(type(node))
        if reader is None:
            raise self._refusal(node)
        return reader(self, node, self._source.deeper(node, depth))

    def call(self, node: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call."""
        args = tuple(self.read(a) for a in node.args)
        kwargs: dict[str, Any] = {}
        for given in node.keywords:
            value = self.read(given.value)
            if given.arg is not None:
                kwargs[given.arg] = value
            elif isinstance(value, dict) and all(type(k) is str for k in value):
                kwargs.update(value)
            else:
                raise self._source.error(
                    given, "what follows **", "a dictionary with strings as keys"
                )
        return args, kwargs

    def target(self, node: ast.expr) -> Any:
        """The operator or function that a dotted name, or ``op("…")``, stands for."""
        quotes = arguments(node, "op", 1, 1)
        name = self._source.string(quotes[0]) if quotes else self._source.dotted(node)
        if name in self._targets:
            return self._targets[name]
        try:
            self._targets[name] = found = read_target(name)
            return found
        except LookupError as error:
            raise self._source.error(
                node, f"the operator {name[:120]!r}", str(error.args[0])
            ) from None

    def device(self, node: ast.expr) -> torch.device:
        """A device by the name in quotes."""
        name = self._source.string(node)
        try:
            if _DEVICE.fullmatch(name):
                return torch.device(name)
        except RuntimeError:
            pass
        raise self._source.error(node, f"the device {name[:60]!r}", "one such as 'cpu' or 'cuda:0'")

    def _nothing(self, node: ast.expr) -> Any:
        raise self._refusal(node)

    def _refusal(self, node: ast.AST) -> ProblemError:
        return self._source.error(
            node,
            self._source.quote(node),
            "a literal, the name of a node above, an operator, or one of torch.device(…), slice(…), "
            "range(…), complex(…), opaque(…)",
        )

    def _name(self, node: ast.Name, depth: int) -> Any:
        if node.id in ("inf", "nan"):
            return float(node.id)
        return self._node(node)

    def _sign(self, node: ast.UnaryOp, depth: int) -> Any:
        value = self.read(node.operand, depth)
        if isinstance(node.op, ast.USub) and type(value) in (int, float):
            return self._source.integer(node) if type(value) is int else -value
        raise self._refusal(node)

    def _attribute(self, node: ast.Attribute, depth: int) -> Any:
        name = self._source.dotted(node)
        return CONSTANTS[name] if name in CONSTANTS else self.target(node)

    def _items(self, node: ast.List | ast.Tuple, depth: int) -> Any:
        items = [self.read(x, depth) for x in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)

    def _dict(self, node: ast.Dict, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else self.read(key, depth)
            if type(name) not in (str, int, bool, float):
                raise self._source.error(key or node, "a key of a dictionary", "a string or number")
            found[name] = self.read(value, depth)
        return found

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = call_name(node)
        if name == "op":
            return self.target(node)
        if name == "opaque":
            return read_opaque(self._source, node)
        if isinstance(node.func, ast.Attribute) and not node.keywords and len(node.args) == 1:
            if self._source.dotted(node.func) == "torch.device":
                return self.device(node.args[0])
        elif name in _CALLS and not node.keywords:
            count, kinds, make = _CALLS[name]
            args = [self.read(a, depth) for a in node.args]
            if len(args) in count and all(type(a) in kinds for a in args):
                try:
                    return make(*args)
                except (TypeError, ValueError, OverflowError):
                    raise self._refusal(node) from None
        raise self._refusal(node)


_Calls = dict[str | None, tuple[range, tuple[type[Any], ...], Callable[..., Any]]]
#: Calls that may stand in arguments: how many values they take, of which types, and what they make.
_CALLS: _Calls = {
    "slice": (range(1, 4), (int, type(None), fx.Node, torch.SymInt), slice),
    "range": (range(1, 4), (int,), range),
    "complex": (range(2, 3), (int, float), complex),
}

_READERS: dict[type[ast.expr], Callable[[Reader, Any, int], Any]] = {
    ast.Constant: lambda r, node, _: ... if node.value is ... else r._source.constant(node),
    ast.Name: Reader._name,
    ast.UnaryOp: Reader._sign,
    ast.Attribute: Reader._attribute,
    ast.List: Reader._items,
    ast.Tuple: Reader._items,
    ast.Dict: Reader._dict,
    ast.Call: Reader._call,
    ast.Subscript: lambda r, node, _: r._symbolic(node),
}
