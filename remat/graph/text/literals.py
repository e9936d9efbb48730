"""Write operators and arguments of nodes as names, literals and a few calls, and parse the written text.

The parser finds operators only in tables of this module and in PyTorch's registries.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import keyword
import math
import operator
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.memory.storages import SYMBOLIC
from remat.graph.purity import overload_names
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
_AS_THEY_ARE = (type(None), bool, int, float, range, torch.dtype, torch.layout, torch.memory_format)
_LISTS = (list, fx.immutable_collections.immutable_list)
_DICTS = (dict, fx.immutable_collections.immutable_dict)

#: Python functions that a node may call, by module: arithmetic on sizes, and `getitem` for elements of tuples.
_FUNCTIONS: dict[str, str] = {
    "operator": "abs add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ "
    "pos pow rshift sub truediv xor",
    "math": "ceil floor trunc sqrt cos cosh sin sinh tan tanh asin acos atan exp log log2",
    "torch": "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_sqrt _sym_cos "
    "_sym_cosh _sym_sin _sym_sinh _sym_tan _sym_tanh _sym_asin _sym_acos _sym_atan _sym_log2",
    "builtins": "abs max min pow round",
}


class Opaque:
    """Replacement for an object whose contents the text of a graph cannot hold.

    Attributes:
        kind: dotted name of the original object's class, with its module.
        text: ``repr`` of the original object; empty if the ``repr`` contains a memory address.
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
    """Return ``opaque("module.Class", "repr")`` for an object that has no text form of its own."""
    text = repr(value)
    if isinstance(value, Opaque):
        name, text = value.kind, value.text
    else:
        parts = f"{type(value).__module__}.{type(value).__qualname__}".split(".")
        # The name of a local class contains `<locals>`. All characters must form identifiers.
        name = ".".join(re.sub(r"\W", "_", part, flags=re.ASCII) for part in parts)
    # A memory address differs between processes.
    if _ADDRESS.search(text):
        text = ""
    return written_call("opaque", [f'"{name}"', quoted(text)] if text else [f'"{name}"'])


def read_opaque(source: Source, node: ast.expr) -> Opaque:
    """Return an `Opaque`, of a new class, for an object that was written as ``opaque("module.Class", "text")``.

    Raises:
        ProblemError: the expression is not ``opaque("module.Class", "text")``.
    """
    args = arguments(node, "opaque", 1, 2)
    if args is None:
        raise source.error(node, 'opaque("module.Class", "text")')
    kind, text, *_ = *map(source.string, args), ""
    if not is_dotted(kind):
        raise source.error(node, "the dotted name of a class", f"the class {kind[:60]!r}")
    # The class must have the original's name, because fingerprints contain class names of such
    # values.
    stand_in: Opaque = type(kind.rpartition(".")[2], (Opaque,), {"kind": kind})(text)
    return stand_in


class ArgumentWriter:
    """Writes the arguments of nodes as text.

    Attributes:
        symbols: SymPy symbols of the sizes in the arguments written so far.
    """

    def __init__(self) -> None:
        self.symbols: set[Any] = set()

    def write(self, value: Any) -> str:
        """Return the text of an argument of a node.

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
        if kind is slice:
            return written_call("slice", map(self.write, (value.start, value.stop, value.step)))
        if kind is complex:
            return written_call("complex", map(repr, (value.real, value.imag)))
        if kind is torch.device:
            return f'torch.device("{value}")'
        if value is ...:
            return "..."
        if isinstance(value, (torch_compat.OpOverload, torch_compat.HigherOrderOperator)):
            return write_target(value)
        if isinstance(value, (list, tuple, dict)):
            raise ProblemError(
                f"a {kind.__name__} has no text form: expected a list, tuple or dict"
            )
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
    """Reads the arguments of nodes from text.

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
            case ast.Constant():
                return ... if node.value is ... else self._source.constant(node)
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
            case ast.Call():
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
            except LookupError as error:
                got = f"the operator {name[:120]!r}"
                raise self._source.error(node, str(error.args[0]), got) from None
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

    def _refusal(self, node: ast.AST) -> ProblemError:
        """Return the error for an expression that is not a valid argument."""
        return self._source.error(
            node,
            "a literal, the name of a node above, an operator, or one of torch.device(…), slice(…), "
            "range(…), complex(…), opaque(…)",
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
        if isinstance(node.func, ast.Attribute) and not node.keywords and len(node.args) == 1:
            if self._source.dotted(node.func) == "torch.device":
                return self.device(node.args[0])
        elif name in _CALLS and not node.keywords:
            count, kinds, make = _CALLS[name]
            args = [self.read(a) for a in node.args]
            if len(args) in count and all(type(a) in kinds for a in args):
                try:
                    return make(*args)
                except (TypeError, ValueError, OverflowError):
                    pass
        raise self._refusal(node)


#: Calls allowed in arguments, by name: allowed numbers of values, allowed types of values, and the constructor.
_CALLS: dict[str | None, tuple[range, tuple[type[Any], ...], Callable[..., Any]]] = {
    "slice": (range(1, 4), (int, type(None), fx.Node, torch.SymInt), slice),
    "range": (range(1, 4), (int,), range),
    "complex": (range(2, 3), (int, float), complex),
}


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
    except LookupError:
        raise ProblemError(
            f"{target!r} has no text form: expected an operator of torch.ops, or a function of "
            "operator, math or torch.sym_*"
        ) from None
    # A Python keyword, as in `aten.random.from`, is no attribute in Python's syntax.
    return f'op("{name}")' if any(map(keyword.iskeyword, name.split("."))) else name


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Return the Python functions that a text may call, by dotted name such as ``math.floor``."""
    modules: dict[str, Any] = {m.__name__: m for m in (operator, math, torch, builtins)}
    return {
        f"{where}.{name}": getattr(modules[where], name)
        for where, names in _FUNCTIONS.items()
        for name in names.split()
    }


def read_target(name: str) -> Any:
    """Return the operator or function with a dotted name.

    Raises:
        LookupError: no operator or function has this name. The message describes the expected names.
    """
    if "." not in name or not is_dotted(name):
        raise LookupError("a name such as aten.mm.default")
    if name in _functions():
        return _functions()[name]
    library, *rest = name.split(".")
    if library in _FUNCTIONS:
        raise LookupError(f"one of {library}.{{{', '.join(_FUNCTIONS[library].split())}}}")
    higher_order = library == "higher_order"
    if len(rest) != (1 if higher_order else 2):
        form = "a higher-order operator as higher_order.name"
        raise LookupError(form if higher_order else "an operator as namespace.name.overload")
    target = _registered(library, rest)
    for module in torch_compat.REGISTERED_BY.get(library, ()):
        if target is None:  # the import may register the operator
            importlib.import_module(module)
            target = _registered(library, rest)
    if target is not None:
        return target
    if higher_order:
        raise LookupError(
            f"a higher-order operator that is registered in this process; '{rest[0]}' is none: "
            "import what defines it first"
        )
    overloads = overload_names(library, rest[0])
    if overloads:
        raise LookupError(f"one of {library}.{rest[0]}.{{{', '.join(overloads)}}}")
    raise LookupError(
        f"an operator that is registered in this process; library '{library}' has no "
        f"'{rest[0]}': import what defines it first"
    )


def _registered(namespace: str, names: list[str]) -> Any:
    """Return the operator registered as ``namespace.name.overload`` or ``higher_order.name``; None if there is none."""
    if namespace == "higher_order":
        return torch_compat.higher_order_ops.get(names[0])
    name, overload = names
    # A text may contain any name. Only names that the dispatcher knows are looked up on `torch.ops`.
    if overload not in overload_names(namespace, name):
        return None
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
