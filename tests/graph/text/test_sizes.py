"""Symbolic sizes as text."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy import functions as f

from remat.errors import ProblemError
from remat.graph.text.sizes import Expressions, write_expression
from remat.graph.text.syntax import Source

s0 = sympy.Symbol("s0", positive=True, integer=True)
s1 = sympy.Symbol("s1", positive=True, integer=True)
u0 = sympy.Symbol("u0", integer=True)
zf0 = sympy.Symbol("zf0", real=True)
SYMBOLS = {str(s): s for s in (s0, s1, u0, zf0)}


def read(text: str) -> Any:
    source = Source(text)
    (statement,) = source.body
    assert isinstance(statement, ast.Expr)
    return Expressions(source, SYMBOLS).read(statement.value)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (7, "7"),
        (s0, "s0"),
        (s0 * s1 - 4 * s0, "s0*s1 - 4*s0"),
        (2 * (s0 - 1) * s1, "s1*(2*s0 - 2)"),
        (sympy.Mul(2, s0 + 1, s1 + 1), "2*(s0 + 1)*(s1 + 1)"),
        (sympy.Mul(-4, s0 + 1, s1 + u0, evaluate=True), "-4*(s0 + 1)*(s1 + u0)"),
        (-s0 / 2 - s1, "-s0/2 - s1"),
        (-((s0 + 1) * (s1 + 1)) / 3, "-(s0 + 1)*(s1 + 1)/3"),
        (s0**2 / 2, "s0**2/2"),
        (s0 / s1, "s0/s1"),
        ((s0 + 1) / (2 * s1**2), "(s0 + 1)/(2*s1**2)"),
        (f.FloorDiv(s0 + 1, s1), "(s0 + 1)//s1"),
        (2 * f.FloorDiv(s0, 3) + 1, "2*(s0//3) + 1"),
        (f.FloorDiv(f.FloorDiv(s0, s1), u0), "s0//(s1*u0)"),
        (s0 - 3 * f.FloorDiv(s0, 3), "s0 - 3*(s0//3)"),
        (f.Mod(s0, 8) + f.PythonMod(u0, 3), "(Mod(s0, 8)) + (PythonMod(u0, 3))"),
        (f.CleanDiv(s0, s1) + 1, "(CleanDiv(s0, s1)) + 1"),
        (f.Identity(s0 + 1) * s1, "s1*(Identity(s0 + 1))"),
        (f.ModularIndexing(s0, 2, 4), "ModularIndexing(s0, 2, 4)"),
        (f.Max(1, u0 - 2), "Max(1, u0 - 2)"),
        (f.PowByNatural(s0, 3), "s0**3"),
        (f.Max(1, f.FloorDiv(s0**2, s1)) ** 2, "Max(1, (s0**2)//s1)**2"),
        (f.IntTrueDiv(s0, s1), "IntTrueDiv(s0, s1)"),
        (f.TruncToInt(zf0 * 0.5), "TruncToInt(0.5*zf0)"),
        (f.OpaqueUnaryFn_sqrt(f.ToFloat(s0)), "OpaqueUnaryFn_sqrt(ToFloat(s0))"),
        (f.Where(u0 > 3, s0, s1), "Where(u0 > 3, s0, s1)"),
        (u0 >= 2, "u0 >= 2"),
        (sympy.Eq(u0 + s0, 5), "s0 + u0 == 5"),
        (sympy.Ne(u0, s0), "u0 != s0"),
        (sympy.And(u0 > 1, u0 < s0), "And(u0 > 1, u0 < s0)"),
        (sympy.Not(sympy.Or(u0 > 1, sympy.Eq(u0, s0))), "Not(Or(u0 == s0, u0 > 1))"),
        (sympy.true, "True"),
    ],
)
def test_expressions_are_written_and_read(expression: Any, text: str) -> None:
    used: set[Any] = set()
    assert write_expression(expression, used) == text
    assert used == getattr(expression, "free_symbols", set())
    again = read(text)
    assert again == expression
    assert str(again) == str(expression)  # what fingerprints are made of


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("s0*s1**-1", s0 / s1),
        ("Mod(s0, 8) + PythonMod(u0, 3)", f.Mod(s0, 8) + f.PythonMod(u0, 3)),
    ],
)
def test_other_spellings_are_read(text: str, expression: Any) -> None:
    assert str(read(text)) == str(expression)


def numbers() -> st.SearchStrategy[Any]:
    leaves = st.one_of(st.integers(-9, 9).map(sympy.Integer), st.sampled_from([s0, s1, u0]))

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda p: p[0] + p[1]),
            pairs.map(lambda p: p[0] * p[1]),
            pairs.map(lambda p: p[0] - p[1]),
            pairs.map(lambda p: f.Max(*p)),
            st.tuples(inner, st.integers(1, 9)).map(lambda p: f.FloorDiv(*p)),
            st.tuples(inner, st.integers(1, 9)).map(lambda p: f.PythonMod(*p)),
        )

    return st.recursive(leaves, grow, max_leaves=8)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(expression=numbers())
def test_any_expression_is_read_back(expression: Any) -> None:
    text = write_expression(expression, set())
    again = read(text)
    assert again == expression
    assert write_expression(again, set()) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s2", "column 1: the symbol 's2'; expected one that symbols(…) declares"),
        (
            "s0 + 'x'",
            "column 6: the expression ''x''; expected numbers, symbols, + - * / // **, comparisons, and ",
        ),
        ("s0 ** s1", "(TypeError: the exponent s1 is no integer)"),
        ("s0 // 0", "expected one that can be computed (ZeroDivisionError"),
        ("Max()", "expected one with a finite value"),
        ("Max(s0, key=1)", "expected numbers, symbols, + - * / // **, comparisons, and "),
        (
            "eval('1')",
            "column 1: the expression 'eval('1')'; expected numbers, symbols, + - * / // **, comparisons, and ",
        ),
        ("s0.is_integer", "expected numbers, symbols, + - * / // **, comparisons, and "),
        ("s0[0]", "expected numbers, symbols, + - * / // **, comparisons, and "),
        ("0 < s0 < 3", "expected numbers, symbols, + - * / // **, comparisons, and "),
        ("s0 @ s1", "expected numbers, symbols, + - * / // **, comparisons, and "),
        ("1e400*s0", "expected one with a finite value"),
        ("~s0", "expected numbers, symbols, + - * / // **, comparisons, and "),
        ("-(u0 > 1)", "expected one that can be computed (TypeError"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(ProblemError) as caught:
        read(text)
    assert says in str(caught.value)


def test_what_has_no_text_is_named() -> None:
    odd = sympy.Symbol("tmp0") + sympy.sin(s0)
    with pytest.raises(
        ProblemError, match=r"'(tmp0|sin\(s0\))' is a (Symbol|sin), which has no text form"
    ):
        write_expression(odd, set())
