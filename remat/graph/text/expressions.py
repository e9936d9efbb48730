"""Symbolic sizes as Python expressions: ``s77//2 + 1`` out of SymPy, and back without evaluating."""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy

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

_COMPARISONS: dict[type[ast.cmpop], tuple[str, type[sympy.Basic]]] = {
    ast.Eq: ("==", sympy.Eq),
    ast.NotEq: ("!=", sympy.Ne),
    ast.Lt: ("<", sympy.Lt),
    ast.LtE: ("<=", sympy.Le),
    ast.Gt: (">", sympy.Gt),
    ast.GtE: (">=", sympy.Ge),
}
_COMPARISON_SIGNS = {kind: sign for sign, kind in _COMPARISONS.values()}
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
    return str(expression) if type(expression) is int else _write(expression, used)[0]


#: How tightly the outermost operator of a text binds.
_COMPARED, _ADDED, _DIVIDED, _MULTIPLIED, _POWERED, _WHOLE = range(6)


def _write(e: Any, used: set[sympy.Symbol]) -> tuple[str, int]:
    """The text of an expression, and how tightly its outermost operator binds."""

    def inside(x: Any, least: int) -> str:
        text, tightness = _write(x, used)
        return text if tightness >= least else f"({text})"

    if isinstance(e, (bool, sympy.logic.boolalg.BooleanAtom)):
        return str(bool(e)), _WHOLE
    if isinstance(e, (int, sympy.Integer)):
        return str(int(e)), _WHOLE if e >= 0 else _MULTIPLIED
    if isinstance(e, (float, sympy.Float)):
        return repr(float(e)), _WHOLE if e >= 0 else _MULTIPLIED
    if isinstance(e, sympy.Symbol) and SYMBOL.fullmatch(e.name):
        used.add(e)
        return e.name, _WHOLE
    if isinstance(e, sympy.Rational):
        return f"Rational({e.p}, {e.q})", _WHOLE
    if isinstance(e, sympy.Add):
        terms = [inside(x, _ADDED) for x in e.as_ordered_terms()]
        return " + ".join(terms).replace("+ -", "- "), _ADDED
    if isinstance(e, sympy.Mul):
        factors = list(e.as_ordered_factors())
        if factors[0] == -1 and factors[1].is_Rational:  # it takes -4 apart
            factors[:2] = [-factors[1]]
        return "*".join(inside(x, _MULTIPLIED) for x in factors), _MULTIPLIED
    if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer):
        return f"{inside(e.base, _WHOLE)}**{int(e.exp)}", _POWERED
    if type(e) is functions.FloorDiv:
        return f"{inside(e.args[0], _WHOLE)}//{inside(e.args[1], _WHOLE)}", _DIVIDED
    if type(e) in _COMPARISON_SIGNS:
        sides = [inside(x, _ADDED) for x in e.args]
        return f" {_COMPARISON_SIGNS[type(e)]} ".join(sides), _COMPARED
    name = type(e).__name__
    if _functions().get(name) is not type(e):
        raise ProblemError(f"the expression {e} has a {name} in it, which has no text form")
    return f"{name}({', '.join(inside(x, _COMPARED) for x in e.args)})", _WHOLE


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
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._apply(node, operator.neg, operand)
            case ast.BinOp(op=ast.Mult()):
                return self._apply(node, sympy.Mul, *_factors(node))
            case ast.BinOp(op=ast.Pow()):
                power = self._source.integer(node.right)
                return self._apply(node, lambda x: x**power, node.left)
            case ast.BinOp(left=left, op=op, right=right):
                if type(op) in _OPERATORS:
                    return self._apply(node, _OPERATORS[type(op)], left, right)
                raise self._refusal(node, "one of + - * // ** between symbols")
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                if type(sign) in _COMPARISONS:
                    return self._apply(node, _COMPARISONS[type(sign)][1], left, right)
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


def _factors(node: ast.expr) -> list[ast.expr]:
    """All factors of a product: two by two, SymPy would multiply numbers into sums."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), node.right]
    return [node]
