"""Symbolic sizes as Python expressions: ``(s77//2) + 1`` out of SymPy, and back without evaluating."""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from remat.errors import ProblemError
from remat.graph.text.syntax import Source
from remat.torch_compat import int_oo
from remat.torch_compat import sympy_functions as functions

#: A size: a number, or an expression over symbols.
Size = Any

#: Names that ShapeEnv gives to symbols: sizes, floats, and their unbacked kin.
SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,9}", re.ASCII)

_NAMES = re.compile(r"\b[su]\d{1,9}\b", re.ASCII)

_INFINITE = (sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, int_oo, -int_oo)

_COMPARISONS: dict[type[ast.cmpop], type[sympy.Basic]] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
_OPERATORS: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: functions.FloorDiv,
}
#: Functions of PyTorch's own that stand as calls.
_PLAIN = (
    "ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv Max Min FloatPow "
    "FloatTrueDiv IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity "
    "IsNonOverlappingAndDenseIndicator LShift PowByNatural RShift"
)


@functools.cache
def _functions() -> dict[str, Any]:
    """Functions that stand as calls, by name."""
    opaque = [n for n in vars(functions) if n.startswith(("OpaqueUnaryFn_", "BitwiseFn_"))]
    found = {n: getattr(functions, n) for n in (*_PLAIN.split(), *opaque)}
    return {**found, "And": sympy.And, "Or": sympy.Or, "Not": sympy.Not}


def size_of(value: Any) -> Size:
    """A size, stride or number of bytes as an int or an expression."""
    if type(value) is int:
        return value
    expression = expression_of(value) if hasattr(value, "node") else value
    return int(expression) if isinstance(expression, (int, sympy.Integer)) else expression


def expression_of(value: Any) -> Any:
    """The expression of a symbolic number.

    Raises:
        ProblemError: it has none, as the sizes of nested tensors.
    """
    expression = getattr(value.node, "expr", None)
    if expression is None:
        raise ProblemError(f"the number {value} has no text form: it is no expression of symbols")
    return expression


def read_size(text: str) -> Size:
    """A size of symbols that `write_expression` wrote, by their names.

    Raises:
        ProblemError: the text is none.
    """
    source = Source(text)
    if len(source.body) != 1 or not isinstance(source.body[0], ast.Expr):
        raise ProblemError(f"{text[:60]!r} is no expression of sizes")
    names = set(_NAMES.findall(text))
    symbols = {n: sympy.Symbol(n, integer=True, positive=n.startswith("s")) for n in names}
    return Expressions(source, symbols).size(source.body[0].value)


def write_expression(expression: Size, used: set[sympy.Symbol]) -> str:
    """The text of an expression.

    Args:
        expression: an int, or what SymPy made of sizes.
        used: takes up the symbols in it.

    Raises:
        ProblemError: something in it has no text form.
    """
    if type(expression) is int:
        return str(expression)
    value = sympy.sympify(expression)
    for part in sympy.preorder_traversal(value):
        if not _has_text(part):
            name = type(part).__name__
            raise ProblemError(f"the expression {value} has a {name} in it, which has no text form")
    used |= value.free_symbols
    text: str = _PRINTER.doprint(value)
    return text


def _has_text(part: Any) -> bool:
    """Whether a part of an expression can be read again, given its own parts."""
    if isinstance(part, sympy.Symbol):
        return SYMBOL.fullmatch(part.name) is not None
    if isinstance(part, sympy.Pow):
        return isinstance(part.exp, sympy.Integer)
    return isinstance(part, _PLAIN_KINDS) or _functions().get(type(part).__name__) is type(part)


class _Printer(StrPrinter):  # type: ignore[misc]
    """SymPy's printer, with quotients of integers as Python has them, and floats by all their digits."""

    def _print(self, expr: Any, **kwargs: Any) -> str:
        kind = type(expr)
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
#: Numbers, truth values, sums, products, quotients and comparisons.
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
    """Reads expressions over declared symbols."""

    def __init__(self, source: Source, symbols: Mapping[str, sympy.Symbol]) -> None:
        self._source = source
        self._symbols = symbols
        self._known: dict[str, Any] = {}

    def size(self, node: ast.expr) -> Size:
        """An int, or an expression with whole values."""
        if isinstance(node, ast.Constant):
            return self._source.integer(node)
        found = self.read(node)
        if isinstance(found, sympy.Integer):
            return int(found)
        if getattr(found, "is_integer", None) is False or not isinstance(found, sympy.Expr):
            raise self._source.error(node, "a whole number of things")
        return found

    def read(self, node: ast.expr) -> Any:
        """An expression of any kind, in SymPy's form."""
        key = node.id if isinstance(node, ast.Name) else ast.dump(node)
        if key not in self._known:
            self._known[key] = self._read(node)
        return self._known[key]

    def _read(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                value = self._source.constant(node)
                if type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
                    return sympy.sympify(value)
                raise self._refusal(node, "finite numbers, and symbols")
            case ast.Name(id=name):
                if name in self._symbols:
                    return self._symbols[name]
                raise self._source.error(
                    node, "one that symbols(…) declares", f"the symbol {name[:60]!r}"
                )
            case ast.BinOp(op=ast.Mult() | ast.Div()) | ast.UnaryOp(op=ast.USub()):
                over, under = _factors(node)
                return self._apply(node, partial(_product, len(over)), *over, *under)
            case ast.BinOp(op=ast.Pow()):
                power = self._source.integer(node.right)
                return self._apply(node, lambda x: x**power, node.left)
            case ast.BinOp(left=left, op=op, right=right):
                if type(op) in _OPERATORS:
                    return self._apply(node, _OPERATORS[type(op)], left, right)
                raise self._refusal(node, "one of + - * / // ** between symbols")
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                if type(sign) in _COMPARISONS:
                    return self._apply(node, _COMPARISONS[type(sign)], left, right)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self._call(node, name, args)
        raise self._refusal(node, "sums, products, comparisons and functions of symbols")

    def _call(self, node: ast.Call, name: str, args: list[ast.expr]) -> Any:
        if name == "Rational" and len(args) == 2:
            p, q = map(self._source.integer, args)
            return self._apply(node, lambda: sympy.Rational(p, q))
        function = _functions().get(name)
        if function is None:
            known = f"one of {', '.join(sorted(_functions()))}"
            raise self._source.error(node, known, f"the function {name[:60]!r}")
        return self._apply(node, function, *args)

    def _apply(self, node: ast.expr, make: Callable[..., Any], *args: ast.expr) -> Any:
        """Apply a function to expressions; the result must be finite."""
        values = [self._read(x) for x in args]
        try:
            made = make(*values)
        except (ArithmeticError, AssertionError, AttributeError, TypeError, ValueError) as error:
            expected = f"one that can be computed ({type(error).__name__}: {error})"
            raise self._refusal(node, expected) from error
        if made.has(*_INFINITE):
            raise self._refusal(node, "one with a finite value")
        return made

    def _refusal(self, node: ast.AST, expected: str) -> ProblemError:
        return self._source.error(node, expected, "the expression {}")


def _factors(node: ast.expr) -> tuple[list[ast.expr], list[ast.expr]]:
    """All factors and divisors of a product: two by two, SymPy would multiply numbers into sums."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            over, under = _factors(operand)
            return [ast.Constant(-1), *over], under
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            over, under = _factors(left)
            return [*over, right], under
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            over, under = _factors(left)
            return over, [*under, right]
    return [node], []


def _product(factors: int, *values: Any) -> Any:
    """The product of the first values, divided by the others."""
    return sympy.Mul(*values[:factors], *(1 / x for x in values[factors:]))
