"""Write operators and arguments of nodes as names, literals and a few calls, and parse the written text.

The parser finds operators only in tables of this module and in PyTorch's registries.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import keyword
import operator
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.memory.storages import SYMBOLIC
from remat.graph.purity import overload_named
from remat.graph.text.sizes import expression_of, write_expression
from remat.graph.text.syntax import (
    IDENTIFIER,
    Source,
    arguments,
    call_name,
    is_dotted,
    quoted,
    written_call,
)
from remat.torch_compat import dtype_abbrs

#: PyTorch objects that are written by name, such as ``torch.float32``.
CONSTANTS: dict[str, Any] = {
    str(constant): constant
    for constant in (
        *dtype_abbrs,
        *(v for v in vars(torch).values() if isinstance(v, (torch.layout, torch.memory_format))),
    )
}
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")

#: Types whose values are written with ``str``. FX names no node ``inf`` or ``nan``, so in a text these names always
#: mean the floats.
_AS_THEY_ARE = (type(None), bool, int, float, torch.dtype, torch.layout, torch.memory_format)
_LISTS = (list, fx.immutable_collections.immutable_list)
_DICTS = (dict, fx.immutable_collections.immutable_dict)
#: Targets of calls that a text can name, for messages.
_TARGETS = (
    "an operator as namespace.name.overload, such as aten.mm.default, a higher-order operator as higher_order.name, "
    "or a function of operator, math or torch.sym_*"
)


class Opaque:
    """Replacement for an object whose contents the text of a graph cannot hold.

    Attributes:
        kind: dotted name of the original object's class, with its module.
        text: ``repr`` of the original object; empty if the ``repr`` contains a memory address.
    """

    def __init__(self, kind: str, text: str = "") -> None:
        self.kind, self.text = kind, text

    def __repr__(self) -> str:
        return self.text or f"<{self.kind} that the text does not hold>"


def write_opaque(value: Any) -> str:
    """Return ``opaque("module.Class", "repr")`` for an object that has no text form of its own."""
    if isinstance(value, Opaque):
        name, text = value.kind, value.text
    else:
        kind, text = type(value), repr(value)
        # The name of a local class contains `<locals>`. All characters must form identifiers.
        name = re.sub(r"[^\w.]", "_", f"{kind.__module__}.{kind.__qualname__}", flags=re.ASCII)
    # A memory address differs between processes.
    parts = [name] if not text or _ADDRESS.search(text) else [name, text]
    return written_call("opaque", map(quoted, parts))


def read_opaque(source: Source, node: ast.expr) -> Opaque:
    """Return an `Opaque`, of a new class, for an object that was written as ``opaque("module.Class", "text")``.

    Raises:
        ProblemError: the expression is not ``opaque("module.Class", "text")``.
    """
    args = arguments(node, "opaque", 1, 2)
    if args is None:
        raise source.error(node, 'opaque("module.Class", "text")')
    kind, *text = map(source.string, args)
    if not is_dotted(kind):
        raise source.error(node, "the dotted name of a class", f"the class {kind[:60]!r}")
    # The class must have the original's name, because fingerprints contain class names of such
    # values.
    stand_in: Opaque = type(kind.rpartition(".")[2], (Opaque,), {})(kind, *text)
    return stand_in


@functools.cache
def _descriptors() -> dict[str | None, type[Any]]:
    """Return AOTAutograd's descriptor classes of inputs and outputs, by class name."""
    roots = (torch_compat.descriptors.AOTInput, torch_compat.descriptors.AOTOutput)
    return {
        name: kind
        for name, kind in sorted(vars(torch_compat.descriptors).items())
        if isinstance(kind, type) and issubclass(kind, roots) and dataclasses.is_dataclass(kind)
    }


class ArgumentWriter:
    """Writes the arguments of nodes, and AOTAutograd's descriptors, as text.

    Attributes:
        symbols: SymPy symbols of the sizes in the arguments written so far.
    """

    def __init__(self) -> None:
        self.symbols: set[Any] = set()

    def write(self, value: Any) -> str:
        """Return the text of an argument of a node, or of a descriptor such as ``PlainAOTInput(0)``.

        Raises:
            ProblemError: the argument has no text form, or contains a value without one, such as a
                named tuple.
        """
        kind = type(value)
        if isinstance(value, fx.Node):
            return value.name
        if kind in _LISTS:
            return f"[{', '.join(map(self.write, value))}]"
        if kind in _AS_THEY_ARE:
            return str(value)
        if kind is str:
            return quoted(value)
        if kind in SYMBOLIC:
            return f"{kind.__name__}[{write_expression(expression_of(value), self.symbols)}]"
        if kind is tuple:
            return f"({', '.join(map(self.write, value))}{',' if len(value) == 1 else ''})"
        if kind in _DICTS:
            return f"{{{', '.join(f'{self.write(k)}: {self.write(v)}' for k, v in value.items())}}}"
        if kind is complex:
            return written_call("complex", map(repr, (value.real, value.imag)))
        if kind is torch.device:
            return f'torch.device("{value}")'
        if value is ...:
            return "..."
        if isinstance(value, (torch_compat.OpOverload, torch_compat.HigherOrderOperator)):
            return write_target(value)
        if isinstance(value, (list, tuple, dict, slice)):
            raise ProblemError(
                f"a {kind.__name__} has no text form: expected a list, tuple or dict"
            )
        if _descriptors().get(kind.__name__) is kind:
            values = (getattr(value, f.name) for f in dataclasses.fields(kind))
            return written_call(kind.__name__, map(self.write, values))
        return write_opaque(value)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the text of a call of an operator or function."""
        parts = [self.write(a) for a in args]
        if all(IDENTIFIER.fullmatch(k) and not keyword.iskeyword(k) for k in kwargs):
            parts += [f"{k}={self.write(v)}" for k, v in kwargs.items()]
        else:  # `from=1` is no Python syntax, and one dict for all arguments keeps their order
            parts.append(f"**{self.write(kwargs)}")
        return written_call(write_target(target), parts)


class ArgumentReader:
    """Reads the arguments of nodes, and AOTAutograd's descriptors, from text.

    Args:
        source: the text, for error messages.
        node: maps a name in the text to the graph node; None if names of nodes are not allowed.
        symbolic: maps ``SymInt[…]``, ``SymFloat[…]`` or ``SymBool[…]`` to a symbolic number; None if
            symbolic numbers are not allowed.
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

    def read(self, node: ast.expr) -> Any:
        """Convert the syntax tree of an argument to the argument's value.

        Raises:
            ProblemError: the expression is not a valid argument.
        """
        match node:
            case ast.Name(id="inf" | "nan"):
                return float(node.id)
            case ast.Name() if self._node is not None:
                return self._node(node)
            case ast.Constant(value=None | bool() | int() | float() | complex() | str() as value):
                return value
            case ast.Constant(value=value) if value is ...:
                return value
            case ast.List():
                return [self.read(x) for x in node.elts]
            case ast.Tuple():
                return tuple([self.read(x) for x in node.elts])
            case ast.Dict():
                return self._dict(node)
            case ast.UnaryOp(op=ast.USub()):
                value = self.read(node.operand)
                if type(value) in (int, float):
                    return -value
            case ast.Attribute():
                name = self._source.dotted(node)
                return CONSTANTS[name] if name in CONSTANTS else self.target(node)
            case ast.Subscript() if self._symbolic is not None:
                return self._symbolic(node)
            case ast.Call(keywords=[]):
                return self._call(node)
        raise self._refusal(node)

    def call(self, node: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments that the syntax tree of a call denotes."""
        args = tuple(self.read(a) for a in node.args)
        kwargs: dict[str, Any] = {}
        for given in node.keywords:
            value = self.read(given.value)
            if given.arg is not None:
                kwargs[given.arg] = value
            elif isinstance(value, dict) and all(
                type(k) is str and IDENTIFIER.fullmatch(k) for k in value
            ):
                # Identifiers only, because FX writes the keys into generated code.
                kwargs.update(value)
            else:
                expected = "a dictionary with names as keys"
                raise self._source.error(given, expected, "what follows **")
        return args, kwargs

    def target(self, node: ast.expr) -> Any:
        """Return the operator or function that a dotted name, or ``op("NAME")``, denotes.

        Raises:
            ProblemError: the operator is unknown.
        """
        quotes = arguments(node, "op", 1, 1)
        name = self._source.string(quotes[0]) if quotes else self._source.dotted(node)
        # A text names few operators, but each of them many times.
        if name not in self._targets:
            try:
                self._targets[name] = read_target(name)
            except ProblemError as error:
                raise self._source.error(node, _TARGETS, str(error)) from None
        return self._targets[name]

    def device(self, node: ast.expr) -> torch.device:
        """Return the device that a string literal names.

        Raises:
            ProblemError: the string does not name a device.
        """
        name = self._source.string(node)
        try:
            device = torch.device(name)
            if str(device) == name:  # PyTorch takes a large index modulo 256
                return device
        except RuntimeError:
            pass
        raise self._source.error(node, "one such as 'cpu' or 'cuda:0'", f"the device {name[:60]!r}")

    def descriptor(self, node: ast.expr) -> Any:
        """Return the AOTAutograd descriptor that an expression denotes; for ``opaque(…)``, return an `Opaque`.

        Raises:
            ProblemError: the expression is not a descriptor of AOTAutograd.
        """
        if call_name(node) not in (*_descriptors(), "opaque"):
            raise self._source.error(node, "a descriptor of AOTAutograd, such as PlainAOTInput(0)")
        return self.read(node)

    def _refusal(self, node: ast.AST) -> ProblemError:
        """Return the error for an expression that is not a valid argument."""
        return self._source.error(
            node,
            "a literal, the name of a node above, an operator, a descriptor such as PlainAOTInput(0), or one of "
            "torch.device(…), complex(…), opaque(…)",
        )

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else self.read(key)
            if type(name) not in (str, int, bool, float):
                raise self._source.error(key or node, "a string or number", "a key of a dictionary")
            result[name] = self.read(value)
        return result

    def _call(self, node: ast.Call) -> Any:
        name = call_name(node)
        if name == "op":
            return self.target(node)
        if name == "opaque":
            return read_opaque(self._source, node)
        if ast.unparse(node.func) == "torch.device" and len(node.args) == 1:
            return self.device(node.args[0])
        args = [self.read(a) for a in node.args]
        if name == "complex" and [type(a) in (int, float) for a in args] == [True, True]:
            return complex(*args)
        if name not in _descriptors():
            raise self._refusal(node)
        kind = _descriptors()[name]
        fields = get_type_hints(kind)
        if len(args) != len(fields) or not all(map(isinstance, args, fields.values())):
            form = ", ".join(f"{field}: {of.__name__}" for field, of in fields.items())
            raise self._source.error(node, f"{name}({form})")
        return kind(*args)


@functools.cache
def write_target(target: Any) -> str:
    """Return the dotted name of an operator or function, such as ``aten.mm.default``, or ``op("NAME")``.

    Raises:
        ProblemError: `read_target` does not find the target by its name.
    """
    if isinstance(target, torch_compat.OpOverload):
        name = str(target)
    elif isinstance(target, torch_compat.HigherOrderOperator):
        name = f"higher_order.{target.name()}"  # type: ignore[no-untyped-call]
    else:
        name = next((name for name, function in _functions().items() if function is target), "")
    try:
        read_target(name)
    except ProblemError:
        raise ProblemError(f"{target!r} has no text form: expected {_TARGETS}") from None
    # A Python keyword, as in `aten.random.from`, is no attribute in Python's syntax.
    return f'op("{name}")' if any(map(keyword.iskeyword, name.split("."))) else name


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Return the Python functions that a text may call, by dotted name such as ``math.floor``."""
    others = (operator.getitem, operator.not_, torch.sym_sum, torch.sym_int, torch.sym_sqrt)
    functions = sorted([*ops.symbol_operators(), *others], key=lambda f: f.__name__)
    return {f"{f.__module__.removeprefix('_')}.{f.__name__}": f for f in functions}


def read_target(name: str) -> Any:
    """Return the operator or function with a dotted name.

    Raises:
        ProblemError: no operator or function has this name.
    """
    if name in _functions():
        return _functions()[name]
    if "." not in name or not is_dotted(name):
        raise ProblemError(f"the name {name[:120]!r}")
    library, _, rest = name.partition(".")
    for module in torch_compat.REGISTERED_BY.get(library, ()):
        try:
            return overload_named(f"{library}::{rest}")
        except ProblemError:
            importlib.import_module(module)  # may register the operator
    return overload_named(f"{library}::{rest}")
