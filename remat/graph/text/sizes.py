"""Write and read symbolic sizes such as ``(s77//2) + 1`` and their symbols, and create fake values.

SymPy prints the expressions of symbolic sizes. The reader walks the syntax tree and executes no text.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from sympy.core.parameters import distribute
from sympy.core.relational import Relational
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.text.syntax import Source, call_name
from remat.torch_compat import int_oo
from remat.torch_compat import sympy_functions as functions

#: An int, or a SymPy expression over symbols.
Size = Any

#: Pattern of the names of ShapeEnv's symbols: sizes (s), floats (zf), unbacked sizes (u), unbacked floats (zuf).
SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,9}", re.ASCII)

_NAMES = re.compile(r"\b[su]\d{1,9}\b", re.ASCII)

_INFINITE = (sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, int_oo, -int_oo)


def _times(a: Any, b: Any) -> Any:
    """Return the product of two SymPy objects."""
    # SymPy would distribute a number over a sum, as if the other factors of `2*(s0 + 1)*s1` did not follow.
    with distribute(False):
        return a * b


def _power(base: Any, exponent: Any) -> Any:
    """Return a SymPy object to the power of an integer."""
    if not isinstance(exponent, sympy.Integer):
        raise TypeError(f"the exponent {exponent} is no integer")
    return base**exponent


#: Functions for the operators in the text of a size.
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: lambda x: _times(-1, x),
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.Div: lambda over, under: _times(over, 1 / under),
    ast.FloorDiv: functions.FloorDiv,
    ast.Pow: _power,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}


@functools.cache
def _functions() -> dict[str, Any]:
    """Return the functions that the text of a size may call, by name: PyTorch's SymPy functions, And, Or and Not."""
    own = {
        name: kind
        for name, kind in vars(functions).items()
        if isinstance(kind, type)
        and issubclass(kind, Application)
        and kind.__module__ == functions.__name__
    }
    return {**own, "And": sympy.And, "Or": sympy.Or, "Not": sympy.Not}


def size_of(value: Any) -> Size:
    """Convert a size, stride or number of bytes to an int if it is constant, otherwise to a SymPy expression."""
    if type(value) is int:
        return value
    expression = expression_of(value) if hasattr(value, "node") else value
    return int(expression) if isinstance(expression, (int, sympy.Integer)) else expression


def expression_of(value: Any) -> Any:
    """Return the SymPy expression of a symbolic number."""
    expression = getattr(value.node, "expr", None)
    if expression is None:
        raise ProblemError(f"the number {value} has no text form: it is no expression of symbols")
    return expression


def read_size(text: str) -> Size:
    """Parse a size that `write_expression` wrote, and create a SymPy symbol for each name in it.

    Raises:
        ProblemError: the text is not an expression over sizes.
    """
    source = Source(text)
    if len(source.body) != 1 or not isinstance(source.body[0], ast.Expr):
        raise ProblemError(f"{text[:60]!r} is no expression of sizes")
    names = set(_NAMES.findall(text))
    # SymPy's symbols are equal only if their assumptions are equal too. ShapeEnv's `s` symbols are positive.
    symbols = {n: sympy.Symbol(n, integer=True, positive=n.startswith("s")) for n in names}
    return Expressions(source, symbols).size(source.body[0].value)


def write_expression(expression: Size, used: set[sympy.Symbol]) -> str:
    """Return the text of a size or symbolic expression, and add its symbols to ``used``.

    Raises:
        ProblemError: part of the expression has no text form.
    """
    if type(expression) is int:
        return str(expression)
    value = sympy.sympify(expression)
    used |= value.free_symbols
    text: str = _PRINTER.doprint(value)
    return text


class _Printer(StrPrinter):  # type: ignore[misc]
    """SymPy's printer, changed so that `Expressions` reads the same expression back from the text.

    Integer quotients are written with ``//``, floats with all digits, and comparisons as operators.
    PyTorch's functions are written as calls with the name of their class.
    """

    def _print(self, expr: Any, **kwargs: Any) -> str:
        kind = type(expr)
        if isinstance(expr, sympy.Symbol):
            has_text = SYMBOL.fullmatch(expr.name) is not None
        elif isinstance(expr, sympy.Pow):
            # The reader accepts integer literals as exponents only.
            has_text = isinstance(expr.exp, sympy.Integer)
        else:
            has_text = isinstance(expr, _PLAIN_KINDS) or _functions().get(kind.__name__) is kind
        if not has_text:
            raise ProblemError(f"'{expr}' is a {kind.__name__}, which has no text form in sizes")
        if kind is functions.FloorDiv:
            return "//".join(
                self.parenthesize(x, PRECEDENCE["Atom"], strict=True) for x in expr.args
            )
        if isinstance(expr, sympy.Float):
            return repr(float(expr))
        if isinstance(expr, Relational):
            sides = [self.parenthesize(x, PRECEDENCE["Relational"]) for x in expr.args]
            return f" {expr.rel_op} ".join(sides)
        if _functions().get(kind.__name__) is kind:
            return f"{kind.__name__}({', '.join(map(self._print, expr.args))})"
        text: str = super()._print(expr, **kwargs)
        return text


_PRINTER = _Printer()
#: SymPy types that are written with Python's literals and operators.
_PLAIN_KINDS = (
    sympy.Rational,
    sympy.Float,
    sympy.logic.boolalg.BooleanAtom,
    sympy.Add,
    sympy.Mul,
    functions.FloorDiv,
    Relational,
)


class Expressions:
    """Converts syntax trees of expressions over declared symbols to SymPy objects."""

    def __init__(self, source: Source, symbols: Mapping[str, sympy.Symbol]) -> None:
        self._source = source
        self._symbols = symbols

    def size(self, node: ast.expr) -> Size:
        """Return the size that an expression denotes: an int, or a SymPy expression.

        Raises:
            ProblemError: the expression is invalid, or its values are not integers.
        """
        if isinstance(node, ast.Constant):
            return self._source.integer(node)
        size = self.read(node)
        if isinstance(size, sympy.Integer):
            return int(size)
        if getattr(size, "is_integer", None) is False or not isinstance(size, sympy.Expr):
            raise self._source.error(node, "a whole number of things")
        return size

    def read(self, node: ast.expr) -> Any:
        """Convert the syntax tree of any expression to a SymPy object.

        Raises:
            ProblemError: the expression is invalid, or has an undeclared symbol or an infinite
                value.
        """
        make, parts = self._operation(node)
        values = [self.read(x) for x in parts]
        try:
            result = make(*values)
        except (ArithmeticError, AssertionError, AttributeError, TypeError, ValueError) as error:
            expected = f"one that can be computed ({type(error).__name__}: {error})"
            raise self._source.error(node, expected, "the expression {}") from error
        if result.has(*_INFINITE):
            raise self._source.error(node, "one with a finite value", "the expression {}")
        return result

    def _operation(self, node: ast.expr) -> tuple[Callable[..., Any], list[ast.expr]]:
        """Return the function that computes an expression from its operands, and the syntax trees of the operands."""
        make: Callable[..., Any] | None = None
        parts: list[ast.expr] = []
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                make = functools.partial(sympy.sympify, number)
            case ast.Name(id=name):
                if name not in self._symbols:
                    expected, got = "one that symbols(…) declares", f"the symbol {name[:60]!r}"
                    raise self._source.error(node, expected, got)
                make = functools.partial(self._symbols.__getitem__, name)
            case ast.UnaryOp(op=sign, operand=operand):
                make, parts = _OPERATORS.get(type(sign)), [operand]
            case ast.BinOp(left=left, op=sign, right=right):
                make, parts = _OPERATORS.get(type(sign)), [left, right]
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                make, parts = _OPERATORS.get(type(sign)), [left, right]
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                make, parts = _functions().get(name), args
        if make is None:
            expected = (
                f"numbers, symbols, + - * / // **, comparisons, and {', '.join(_functions())}"
            )
            raise self._source.error(node, expected, "the expression {}")
        return make, parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """Declaration of a symbol in sizes, as the text of a graph states it.

    Attributes:
        name: name in ShapeEnv, such as ``s77``: s for sizes, u for unbacked sizes, zf for floats,
            zuf for unbacked floats.
        hint: value of the symbol in the traced run; None for an unbacked symbol.
        min: lower end of the symbol's range; None for minus infinity.
        max: upper end of the symbol's range; None for infinity.
        positive: whether SymPy may assume that the symbol is positive.
        size_like: whether an unbacked symbol is the size of a tensor.
    """

    name: str
    hint: int | float | None = None
    min: int | float | None = None
    max: int | float | None = None
    positive: bool = False
    size_like: bool = False

    def __post_init__(self) -> None:
        numbers = [v for v in (self.min, self.hint, self.max) if v is not None]
        kinds = (int, float) if self.is_float else (int,)
        if not all(type(v) in kinds for v in numbers) or numbers != sorted(numbers):
            raise ValueError("min to be below the hint, and that below max; all of them numbers")
        if {type(self.positive), type(self.size_like)} != {bool}:
            raise ValueError("True or False as positive and size_like")

    @property
    def is_float(self) -> bool:
        return self.name.startswith("z")


class Fakes:
    """Creates fake tensors and symbolic numbers in one fake mode.

    Attributes:
        symbols: SymPy symbols by name.
        mode: fake mode of the fake tensors.
    """

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self._env = ShapeEnv()
        self.mode = torch_compat.FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self.symbols = {s.name: self._declare(s) for s in symbols}
        self._numbers: dict[tuple[str, Any], Any] = {}

    def _declare(self, symbol: Symbol) -> sympy.Symbol:
        """Create a SymPy symbol, and record its hint and range in the shape environment."""
        kind = {"real": True} if symbol.is_float else {"integer": True}
        # ShapeEnv creates unbacked floats without assumptions, and SymPy compares assumptions too.
        if symbol.name.startswith("zuf"):
            kind = {}
        positive = {"positive": True} if symbol.positive else {}
        created = sympy.Symbol(symbol.name, **kind, **positive)
        infinity: Any = sympy.oo if symbol.is_float else int_oo
        self._env.var_to_range[created] = torch_compat.ValueRanges(
            -infinity if symbol.min is None else symbol.min,
            infinity if symbol.max is None else symbol.max,
        )
        # Messages about guards on the symbol name the graph text as the source, not the user's code.
        location = self._env._get_sloc("graph text")
        self._env.var_to_range_sloc[created] = ValueRangesSLoc(location, location)
        self._env.var_to_sources[created] = []
        self._env.var_to_stack[created] = torch_compat.CapturedTraceback.extract()  # type: ignore[no-untyped-call]
        if symbol.hint is not None:
            self._env.backed_var_to_val[created] = sympy.sympify(symbol.hint)
        if symbol.size_like:
            self._env.size_like.add(created)
        return created

    def number(self, kind: str, expression: Any) -> Any:
        """Return a symbolic number of the type ``SymInt``, ``SymFloat`` or ``SymBool`` for a SymPy expression."""
        key = (kind, expression)
        if key not in self._numbers:
            make, plain = _NUMBERS[kind]
            value = sympy.sympify(expression)
            hint = self._at_hints(value)
            node = SymNode(value, self._env, plain, None if hint is None else plain(hint))
            self._numbers[key] = make(node)
        return self._numbers[key]

    def _at_hints(self, value: Any) -> Any:
        """Return a SymPy expression with hints in place of its symbols; None if one of the symbols is unbacked."""
        hints: Mapping[Any, Any] = self._env.backed_var_to_val
        return value.xreplace(hints) if value.free_symbols <= hints.keys() else None

    def hint(self, size: Size) -> int | None:
        """Return the value of a size in the traced run; None if the size has unbacked symbols."""
        if type(size) is int:
            return size
        value = self._at_hints(size)
        return None if value is None else int(value)

    def size(self, size: Size) -> Any:
        """Return a size in PyTorch's form: an int or a `torch.SymInt`."""
        return size if type(size) is int else self.number("SymInt", size)

    def without_guards(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which evaluating symbols uses hints and adds no guards."""
        return self._env.suppress_guards()

    def tensor(
        self,
        dtype: torch.dtype,
        place: tuple[Sequence[Size], Sequence[Size], Size],
        device: torch.device,
        memory: Size | torch.Tensor,
    ) -> torch.Tensor:
        """Return a fake tensor.

        Args:
            dtype: dtype of the elements.
            place: sizes, strides and storage offset, in elements.
            device: device of the tensor.
            memory: a tensor whose storage the tensor shares, or the bytes of a new storage.
        """
        shape, step = ([self.size(s) for s in sizes] for sizes in place[:2])
        offset = place[2]
        if not isinstance(memory, torch.Tensor):
            memory = torch.empty((self.size(memory),), dtype=torch.uint8, device="meta")
        storage = memory.untyped_storage()
        # The caller has checked the size of the storage, so no guard about it may narrow a symbol.
        with torch.no_grad(), self.without_guards():
            meta = torch.empty(0, dtype=dtype, device="meta")
            if all(type(s) is int for s in (*shape, *step, offset)):
                meta.set_(storage, offset, shape, step)
            else:  # `as_strided` evaluates no condition on unbacked symbols, whose values are unknown
                count = functions.FloorDiv(size_of(storage.nbytes()), dtype.itemsize)
                meta.set_(storage, 0, [self.size(size_of(count))], [1])
                meta = meta.as_strided(shape, step, self.size(offset))
        return torch_compat.FakeTensor(self.mode, meta, device)


_NUMBERS: dict[str, tuple[Any, type[Any]]] = {
    "SymInt": (torch.SymInt, int),
    "SymFloat": (torch.SymFloat, float),
    "SymBool": (torch.SymBool, bool),
}


def write_symbol(symbol: Symbol) -> str:
    """Return the declaration of a symbol, such as ``symbol(8, min=2, max=64)``."""
    parts = [] if symbol.hint is None else [repr(symbol.hint)]
    parts += [] if symbol.min is None else [f"min={symbol.min!r}"]
    parts += [] if symbol.max is None else [f"max={symbol.max!r}"]
    # Symbols of backed sizes are positive by default.
    if symbol.positive != symbol.name.startswith("s"):
        parts.append(f"positive={symbol.positive}")
    parts += ["size_like=True"] if symbol.size_like else []
    return f"symbol({', '.join(parts)})"


def symbols_of(used: Iterable[sympy.Symbol], env: ShapeEnv | None) -> list[Symbol]:
    """Return the declarations of symbols, sorted by name, with the hints and ranges of a shape environment."""
    # Sorted by letters, then by number, so that s9 comes before s10.
    ordered = sorted(used, key=lambda s: (s.name.rstrip("0123456789"), len(s.name), s.name))
    env = env or ShapeEnv()
    ranges = {s: env.var_to_range.get(s) for s in ordered}
    return [
        Symbol(
            name=s.name,
            hint=_number(env.backed_var_to_val.get(s)),
            min=_number(getattr(ranges[s], "lower", None)),
            max=_number(getattr(ranges[s], "upper", None)),
            positive=bool(s.is_positive),
            size_like=s in env.size_like,
        )
        for s in ordered
    ]


def _number(value: Any) -> int | float | None:
    """Convert a hint or a bound of a range to a number; None for an infinite or missing value."""
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    if isinstance(value, (float, sympy.Float)) and math.isfinite(value):
        return float(value)
    return None


def read_symbols(source: Source, node: ast.stmt | None) -> list[Symbol] | None:
    """Return the declarations in a ``symbols(…)`` statement; None for any other statement."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or call_name(call) != "symbols":
        return None
    if call.args:
        raise source.error(call.args[0], "name=symbol(…)")
    return [_read_symbol(source, k) for k in call.keywords]


def _read_symbol(source: Source, given: ast.keyword) -> Symbol:
    """Read one symbol's declaration, such as ``s0=symbol(8, min=2, max=64)``."""
    name, call = given.arg or "", given.value
    if not SYMBOL.fullmatch(name):
        got = f"a symbol called {name[:60]!r}"
        raise source.error(given, "a name such as s77, u0, zf1 or zuf1", got)
    if not isinstance(call, ast.Call) or call_name(call) != "symbol" or len(call.args) > 1:
        raise source.error(call, "symbol(hint, min=…, max=…)")
    given_values = [("hint", x) for x in call.args] + [(str(k.arg), k.value) for k in call.keywords]
    kinds, expected = (int, float, bool), "a number, True or False"
    stated = {key: source.literal(x, kinds, expected) for key, x in given_values}
    try:
        return Symbol(name=name, **{"positive": name.startswith("s"), **stated})
    except TypeError:
        expected = "hint, min, max, positive or size_like"
        raise source.error(call, expected, f"'{', '.join(stated)}'") from None
    except ValueError as error:
        raise source.error(given, str(error)) from None
