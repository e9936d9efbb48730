"""Symbols of sizes as text and back, and fake tensors whose sizes are made of them."""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc

from remat import torch_compat
from remat.graph.text.expressions import SYMBOL, Size, size_of
from remat.graph.text.syntax import Source, call_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """What is known about a symbol.

    Attributes:
        name: as ShapeEnv calls it: sizes begin with s, unbacked ones with u, floats with zf or zuf.
        hint: its value in the run that was traced; None for an unbacked symbol.
        min: lower end of its range; None where that is minus infinity.
        max: upper end of its range; None where that is infinity.
        positive: whether SymPy may take it for positive.
        size_like: an unbacked symbol that is the size of something.
    """

    name: str
    hint: int | float | None = None
    min: int | float | None = None
    max: int | float | None = None
    positive: bool = False
    size_like: bool = False

    @property
    def is_float(self) -> bool:
        return self.name.startswith("z")


class Fakes:
    """Makes fake values under one mode.

    Args:
        symbols: what sizes are made of.

    Attributes:
        symbols: SymPy's symbols, by name.
        mode: what fake tensors are made under.
    """

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self._env = ShapeEnv()
        self.mode = torch_compat.FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self.symbols = {s.name: self._declare(s) for s in symbols}
        self._made: dict[tuple[str, Any], Any] = {}

    def _declare(self, symbol: Symbol) -> sympy.Symbol:
        kind = {"real": True} if symbol.is_float else {"integer": True}
        if symbol.name.startswith("zuf"):
            kind = {}
        positive = {"positive": True} if symbol.positive else {}
        made = sympy.Symbol(symbol.name, **kind, **positive)
        infinity: Any = sympy.oo if symbol.is_float else torch_compat.int_oo
        self._env.var_to_range[made] = torch_compat.ValueRanges(
            -infinity if symbol.min is None else symbol.min,
            infinity if symbol.max is None else symbol.max,
        )
        # Where guards and errors about the symbol are said to come from: this text, not the user's code.
        here = self._env._get_sloc("graph text")
        self._env.var_to_range_sloc[made] = ValueRangesSLoc(here, here)
        self._env.var_to_sources[made] = []
        self._env.var_to_stack[made] = torch_compat.CapturedTraceback.extract()  # type: ignore[no-untyped-call]
        if symbol.hint is not None:
            self._env.backed_var_to_val[made] = sympy.sympify(symbol.hint)
        if symbol.size_like:
            self._env.size_like.add(made)
        return made

    def number(self, kind: str, expression: Any) -> Any:
        """A SymInt, SymFloat or SymBool, by the name of its type."""
        key = (kind, expression)
        if key not in self._made:
            make, plain = _NUMBERS[kind]
            value = sympy.sympify(expression)
            known = self._known(value)
            node = SymNode(value, self._env, plain, None if known is None else plain(known))
            self._made[key] = make(node)
        return self._made[key]

    def _known(self, value: Any) -> Any:
        """What an expression comes to in the run that was traced; None for unbacked symbols."""
        hints: Mapping[Any, Any] = self._env.backed_var_to_val
        return value.xreplace(hints) if value.free_symbols <= hints.keys() else None

    def hint(self, size: Size) -> int | None:
        """A size in the run that was traced; None where unbacked symbols stand in it."""
        if type(size) is int:
            return size
        known = self._known(size)
        return None if known is None else int(known)

    def size(self, size: Size) -> Any:
        """A size as PyTorch takes it."""
        return size if type(size) is int else self.number("SymInt", size)

    def without_guards(self) -> contextlib.AbstractContextManager[None]:
        """Lets what asks about symbols be answered by their hints, and learn nothing from it."""
        return self._env.suppress_guards()

    def memory(self, nbytes: Size) -> torch.UntypedStorage:
        """Memory that is not there, of so many bytes."""
        flat = torch.empty((self.size(nbytes),), dtype=torch.uint8, device="meta")
        return flat.untyped_storage()

    def tensor(
        self,
        dtype: torch.dtype,
        sizes: Sequence[Size],
        strides: Sequence[Size],
        offset: Size,
        memory: torch.UntypedStorage,
        *,
        device: torch.device,
        grad: bool = False,
    ) -> torch_compat.FakeTensor:
        """A strided fake tensor over a piece of memory that is large enough."""
        shape = [self.size(s) for s in sizes]
        step = [self.size(s) for s in strides]
        # The size of the memory has been checked: no guard about it is to narrow a symbol.
        with torch.no_grad(), self.without_guards():
            meta = torch.empty(0, dtype=dtype, device="meta")
            if all(type(s) is int for s in (*shape, *step, offset)):
                meta.set_(memory, offset, shape, step)
            else:  # a view asks nothing about symbols that only a run could answer
                count = torch_compat.sympy_functions.FloorDiv(
                    size_of(memory.nbytes()), dtype.itemsize
                )
                meta.set_(memory, 0, [self.size(size_of(count))], [1])
                meta = meta.as_strided(shape, step, self.size(offset))
        if grad:
            meta.requires_grad_()
        return torch_compat.FakeTensor(self.mode, meta, device)

    def sparse(
        self, dtype: torch.dtype, sizes: Sequence[Size], layout: torch.layout, device: torch.device
    ) -> torch.Tensor:
        """A fake tensor of another layout."""
        with self.mode:
            return torch.empty(
                tuple(map(self.size, sizes)), dtype=dtype, layout=layout, device=device
            )


_NUMBERS: dict[str, tuple[Any, type[Any]]] = {
    "SymInt": (torch.SymInt, int),
    "SymFloat": (torch.SymFloat, float),
    "SymBool": (torch.SymBool, bool),
}


def write_symbol(symbol: Symbol) -> str:
    """The declaration of a symbol: ``symbol(8, min=2, max=64)``."""
    parts = [] if symbol.hint is None else [repr(symbol.hint)]
    parts += [] if symbol.min is None else [f"min={symbol.min!r}"]
    parts += [] if symbol.max is None else [f"max={symbol.max!r}"]
    if symbol.positive != symbol.name.startswith("s"):
        parts.append(f"positive={symbol.positive}")
    parts += ["size_like=True"] if symbol.size_like else []
    return f"symbol({', '.join(parts)})"


def symbols_of(used: Iterable[sympy.Symbol], env: ShapeEnv | None) -> list[Symbol]:
    """The hints and ranges that an environment has for symbols, in the order of their names."""
    ordered = sorted(used, key=lambda s: (s.name.rstrip("0123456789"), len(s.name), s.name))
    if env is None:
        return [Symbol(name=s.name, positive=bool(s.is_positive)) for s in ordered]
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
    """A hint or bound as a number; None for what is infinite or none."""
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    if isinstance(value, (float, sympy.Float)) and math.isfinite(value):
        return float(value)
    return None


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
    for key, value in [("hint", x) for x in call.args] + [(k.arg, k.value) for k in call.keywords]:
        literal = value.value if isinstance(value, ast.Constant) else None
        if key in ("positive", "size_like"):
            if type(literal) is not bool:
                raise source.error(value, "True or False")
            values[key] = literal
        elif key in ("hint", "min", "max"):
            is_float = name.startswith("z") and type(literal) is float
            values[key] = literal if is_float else source.integer(value)
        else:
            raise source.error(call, "min, max, positive or size_like", f"'{key}'")
    known = [v for v in map(values.get, ("min", "hint", "max")) if v is not None]
    if known != sorted(known):
        raise source.error(given, "min to be below the hint, and that below max")
    return Symbol(name=name, **values)
