"""Arguments of nodes as literals, names and a few calls, and back."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.text.expressions import expression_of, write_expression
from remat.graph.text.syntax import (
    IDENTIFIER,
    INTEGERS,
    MAX_NAME,
    MAX_STRING,
    Source,
    arguments,
    call_name,
    quoted,
    written_call,
)
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
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:\d{1,4})?", re.ASCII)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
#: What a class may be called: its name, with its module before it.
_CLASS = re.compile(rf"{IDENTIFIER.pattern}(\.{IDENTIFIER.pattern})*", re.ASCII)

#: Values whose text is what ``str`` makes of them; inf and nan are names that no node can have.
_AS_THEY_ARE = (type(None), bool, float, range, torch.dtype, torch.layout, torch.memory_format)
_LISTS = (list, fx.immutable_collections.immutable_list)
_DICTS = (dict, fx.immutable_collections.immutable_dict)


class Opaque:
    """What is left of an object that a text can name but not hold.

    Attributes:
        kind: class of the original, with its module.
        text: its ``repr``; empty where that would not be the same in every process.
    """

    kind: ClassVar[str]

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text or f"<{self.kind} that the text does not hold>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and (other.kind, other.text) == (self.kind, self.text)

    def __hash__(self) -> int:
        return hash((self.kind, self.text))


def write_opaque(value: Any) -> str:
    """An object that has no form of its own, by its class and its text."""
    text = repr(value)
    if isinstance(value, Opaque):
        name, text = value.kind, value.text
    else:
        parts = f"{type(value).__module__}.{type(value).__qualname__}".split(".")
        name = ".".join(re.sub(r"\W", "_", part, flags=re.ASCII) for part in parts)
    if _ADDRESS.search(text) or len(text) > MAX_STRING:
        text = ""
    return written_call("opaque", [f'"{name}"', quoted(text)] if text else [f'"{name}"'])


def read_opaque(source: Source, node: ast.expr) -> Opaque:
    """An object whose class is called as the original's is; no class is looked up."""
    args = arguments(node, "opaque", 1, 2)
    if args is None:
        raise source.error(node, 'opaque("module.Class", "text")')
    kind, text, *_ = *map(source.string, args), ""
    if len(kind) > MAX_NAME or not _CLASS.fullmatch(kind):
        raise source.error(node, "the dotted name of a class", f"the class {kind[:60]!r}")
    made: Opaque = type(kind.rpartition(".")[2], (Opaque,), {"kind": kind})(text)
    return made


class ArgumentWriter:
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
        kind = type(value)
        if isinstance(value, fx.Node):
            return value.name
        if kind is int:
            if value not in INTEGERS:
                raise ProblemError(f"the integer {value:.3e} has no text form: it exceeds 64 bits")
            return str(value)
        if kind in _LISTS:
            return f"[{', '.join(map(self.write, value))}]"
        if kind in _AS_THEY_ARE:
            return str(value)
        if kind is str:
            if len(value) > MAX_STRING:
                raise ProblemError(
                    f"a string of {len(value)} characters has no text form: at most {MAX_STRING} are "
                    "read"
                )
            return quoted(value)
        if kind in SYMBOLIC:
            return f"{kind.__name__}[{write_expression(expression_of(value), self.symbols)}]"
        if kind is tuple:
            return f"({', '.join(map(self.write, value))}{',' if len(value) == 1 else ''})"
        if kind in _DICTS:
            return f"{{{', '.join(f'{self.write(k)}: {self.write(v)}' for k, v in value.items())}}}"
        if kind is slice:
            return written_call("slice", map(self.write, (value.start, value.stop, value.step)))
        if kind is complex:
            return written_call("complex", map(repr, (value.real, value.imag)))
        if kind is torch.device:
            return f'torch.device("{value}")'
        if value is ...:
            return "..."
        if isinstance(value, (torch_compat.OpOverload, torch_compat.HigherOrderOperator)):
            return write_call(write_target(value))
        if isinstance(value, (list, tuple, dict)):
            raise ProblemError(
                f"a {kind.__name__} has no text form: expected a list, tuple or dict"
            )
        return write_opaque(value)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The text of a call."""
        parts = [self.write(a) for a in args]
        if all(IDENTIFIER.fullmatch(k) and not keyword.iskeyword(k) for k in kwargs):
            parts += [f"{k}={self.write(v)}" for k, v in kwargs.items()]
        else:  # names that Python reserves, and an order to be kept
            parts.append(f"**{self.write(kwargs)}")
        return written_call(write_call(name), parts)


class ArgumentReader:
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
        self._node = node
        self._symbolic = symbolic
        self._targets: dict[str, Any] = {}

    def read(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an argument."""
        depth = self._source.deeper(node, depth)
        match node:
            case ast.Name(id="inf" | "nan"):
                return float(node.id)
            case ast.Name() if self._node is not None:
                return self._node(node)
            case ast.Constant():
                return ... if node.value is ... else self._source.constant(node)
            case ast.List():
                return [self.read(x, depth) for x in node.elts]
            case ast.Tuple():
                return tuple([self.read(x, depth) for x in node.elts])
            case ast.Dict():
                return self._dict(node, depth)
            case ast.UnaryOp(op=ast.USub()):
                value = self.read(node.operand, depth)
                if type(value) in (int, float):
                    return self._source.integer(node) if type(value) is int else -value
            case ast.Attribute():
                name = self._source.dotted(node)
                return CONSTANTS[name] if name in CONSTANTS else self.target(node)
            case ast.Subscript() if self._symbolic is not None:
                return self._symbolic(node)
            case ast.Call():
                return self._call(node, depth)
        raise self._refusal(node)

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
                expected = "a dictionary with strings as keys"
                raise self._source.error(given, expected, "what follows **")
        return args, kwargs

    def target(self, node: ast.expr) -> Any:
        """The operator or function that a dotted name, or ``op("…")``, stands for."""
        quotes = arguments(node, "op", 1, 1)
        name = self._source.string(quotes[0]) if quotes else self._source.dotted(node)
        if name not in self._targets:
            try:
                self._targets[name] = read_target(name)
            except LookupError as error:
                got = f"the operator {name[:120]!r}"
                raise self._source.error(node, str(error.args[0]), got) from None
        return self._targets[name]

    def device(self, node: ast.expr) -> torch.device:
        """A device by the name in quotes."""
        name = self._source.string(node)
        try:
            if _DEVICE.fullmatch(name):
                return torch.device(name)
        except RuntimeError:
            pass
        raise self._source.error(node, "one such as 'cpu' or 'cuda:0'", f"the device {name[:60]!r}")

    def _refusal(self, node: ast.AST) -> ProblemError:
        return self._source.error(
            node,
            "a literal, the name of a node above, an operator, or one of torch.device(…), slice(…), "
            "range(…), complex(…), opaque(…)",
        )

    def _dict(self, node: ast.Dict, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else self.read(key, depth)
            if type(name) not in (str, int, bool, float):
                raise self._source.error(key or node, "a string or number", "a key of a dictionary")
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
                    pass
        raise self._refusal(node)


#: Calls that may stand in arguments: how many values they take, of which types, and what they make.
_CALLS: dict[str | None, tuple[range, tuple[type[Any], ...], Callable[..., Any]]] = {
    "slice": (range(1, 4), (int, type(None), fx.Node, torch.SymInt), slice),
    "range": (range(1, 4), (int,), range),
    "complex": (range(2, 3), (int, float), complex),
}
