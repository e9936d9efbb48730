"""Symbolic sizes as Python expressions: ``s77//2 + 1`` out of SymPy, and back without evaluating."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy

from remat.errors import ProblemError
from remat.graph.text.syntax import Source, call_name
from remat.torch_compat import int_oo
from remat.torch_compat import sympy_functions as functions

#: A size: a number, or an expression over symbols.
Size = Any

#: Names that ShapeEnv gives to symbols: sizes, floats, and their unbacked kin.
SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,9}", re.ASCII)

#: Most terms that an expression may have when it is multiplied out, as guards and hints do.
_MAX_TERMS = 256
_MAX_POWER = 16
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
#: Functions of PyTorch's own that stand as calls.
_PLAIN = (
    "ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv Max Min FloatPow "
    "FloatTrueDiv IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity "
    "IsNonOverlappingAndDenseIndicator"
)
#: Whose second argument must be a small number: 2 to the power of a size is no size.
_GROWING = ("LShift", "PowByNatural", "RShift")


@functools.cache
def _functions() -> dict[str, Any]:
    """Functions that stand as calls, by name."""
    opaque = [n for n in vars(functions) if n.startswith(("OpaqueUnaryFn_", "BitwiseFn_"))]
    found = {n: getattr(functions, n) for n in (*_PLAIN.split(), *opaque, *_GROWING)}
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
    text, _ = _write(expression, used)
    return text


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


def _is_power(e: Any) -> bool:
    """Whether it is a power, or sums and products of some."""
    return isinstance(e, sympy.Pow) or (
        isinstance(e, (sympy.Add, sympy.Mul)) and any(map(_is_power, e.args))
    )


def _towers(e: Any, power: int) -> bool:
    """Whether powers within functions, to a power again, grow beyond the largest that may be written."""
    return e.has(sympy.Pow) and power * _degree(e) > _MAX_POWER


def _degree(e: Any) -> int:
    """The power to which symbols are raised in an expression, at most."""
    if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer):
        return abs(int(e.exp)) * _degree(e.base)
    if isinstance(e, sympy.Mul):
        return sum(map(_degree, e.args))
    return max(map(_degree, e.args), default=int(isinstance(e, sympy.Symbol)))


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
            raise self._source.error(node, self._source.quote(node), "a whole number of things")
        return found

    def read(self, node: ast.expr) -> Any:
        """An expression of any kind, in SymPy's form."""
        if not isinstance(node, ast.Name):
            self._source.shallow(node)
        key = node.id if isinstance(node, ast.Name) else ast.dump(node)
        if key not in self._known:
            self._known[key], terms = self._read(node)
            if terms > _MAX_TERMS:
                raise self._refusal(node, f"at most {_MAX_TERMS} terms when it is multiplied out")
        return self._known[key]

    def _refusal(self, node: ast.AST, expected: str) -> ProblemError:
        return self._source.error(node, f"the expression {self._source.quote(node)}", expected)

    def _read(self, node: ast.expr) -> tuple[Any, int]:
        """An expression, and a bound on its terms when it is multiplied out."""
        if isinstance(node, ast.Constant):
            value = self._source.constant(node)
            if type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
                return sympy.sympify(value), 1
            raise self._refusal(node, "finite numbers, and symbols")
        if isinstance(node, ast.Name):
            if node.id not in self._symbols:
                raise self._source.error(
                    node, f"the symbol {node.id[:60]!r}", "one that symbols(…) declares"
                )
            return self._symbols[node.id], 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value, terms = self._read(node.operand)
            return self._apply(node, lambda a: -a, value), terms
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            kind = _COMPARISONS.get(type(node.ops[0]))
            if kind is not None:
                sides = [self._read(x) for x in (node.left, node.comparators[0])]
                return self._apply(node, kind[1], *(x for x, _ in sides)), sum(n for _, n in sides)
        name = call_name(node)
        if name is not None and isinstance(node, ast.Call) and not node.keywords:
            return self._call(node, name)
        raise self._refusal(node, "sums, products, comparisons and functions of symbols")

    def _binary(self, node: ast.BinOp) -> tuple[Any, int]:
        if isinstance(node.op, ast.Mult):
            return self._product(node)
        left, n = self._read(node.left)
        if isinstance(node.op, ast.Pow):
            power = self._source.integer(node.right)
            if abs(power) > _MAX_POWER or not isinstance(
                node.left, (ast.Name, ast.BinOp, ast.Call)
            ):
                raise self._refusal(node, f"symbols to the power of {_MAX_POWER} at most")
            n = n ** abs(power)
            if n > _MAX_TERMS or _is_power(left) or _towers(left, abs(power)):
                raise self._refusal(node, f"no powers of powers, and at most {_MAX_TERMS} terms")
            return self._apply(node, lambda a: a**power, left), n
        right, m = self._read(node.right)
        if isinstance(node.op, ast.Add):
            return self._apply(node, lambda a, b: a + b, left, right), n + m
        if isinstance(node.op, ast.Sub):
            return self._apply(node, lambda a, b: a - b, left, right), n + m
        if isinstance(node.op, ast.FloorDiv):
            return self._apply(node, functions.FloorDiv, left, right), n + m
        raise self._refusal(node, "one of + - * // ** between symbols")

    def _product(self, node: ast.BinOp) -> tuple[Any, int]:
        """All factors of a product at once; two by two, SymPy would multiply numbers into sums."""
        factors: list[ast.expr] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mult):
            factors.append(left.right)
            left = left.left
        read = [self._read(x) for x in (left, *reversed(factors))]
        terms = math.prod(n for _, n in read)
        if terms > _MAX_TERMS:
            raise self._refusal(node, f"at most {_MAX_TERMS} terms when it is multiplied out")
        return self._apply(node, sympy.Mul, *(x for x, _ in read)), terms

    def _call(self, node: ast.Call, name: str) -> tuple[Any, int]:
        if name == "Rational" and len(node.args) == 2:
            p, q = (self._source.integer(x) for x in node.args)
            return self._apply(node, sympy.Rational, p, q), 1
        kind = _functions().get(name)
        if kind is None:
            raise self._source.error(
                node, f"the function {name[:60]!r}", f"one of {', '.join(sorted(_functions()))}"
            )
        if name in _GROWING and len(node.args) == 2:
            power = self._source.integer(node.args[1])
            if not 0 <= power <= _MAX_POWER:
                raise self._refusal(
                    node, f"a number of {_MAX_POWER} at most as its second argument"
                )
        read = [self._read(x) for x in node.args]
        return self._apply(node, kind, *(x for x, _ in read)), sum(n for _, n in read)

    def _apply(self, node: ast.AST, make: Callable[..., Any], *args: Any) -> Any:
        try:
            made = make(*args)
        except (ArithmeticError, AssertionError, AttributeError, TypeError, ValueError) as error:
            raise self._refusal(
                node, f"one that can be computed ({type(error).__name__}: {error})"
            ) from error
        if made.has(*_INFINITE):
            raise self._refusal(node, "one with a finite value")
        if isinstance(made, sympy.Integer) and int(made).bit_length() > 64:
            raise self._refusal(node, "numbers of 64 bits at most")
        return made
