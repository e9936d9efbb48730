"""Symbolic sizes of a step, and its bytes as a function of these sizes.

With dynamic shapes, a plan meets a budget in bytes only up to some sizes. The bytes of a step are expressions of the
step's symbolic sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from remat import torch_compat
from remat.errors import BudgetError
from remat.graph.capture.source import source_line
from remat.graph.joint import outputs_of
from remat.graph.memory.liveness import StorageKind, own_outputs, sums_of
from remat.graph.memory.storages import (
    UNBACKED_HINT,
    expression_of,
    hint,
    numbers_of,
    planned_sizes,
    sizes_at,
)
from remat.planning.plan import Plan
from remat.sac.run.operators import plain_parts

#: A bound of at least this number counts as no bound, because no tensor of this size fits in memory.
LARGEST = 2**50


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A symbolic size of a step, with its range.

    Attributes:
        name: the symbol, such as ``"s0"``.
        number: the size that the step is planned for.
        least: smallest possible size.
        most: largest possible size; None if unknown or unbounded.
        source: origin of the size in the user's code, for messages.
        place: triple (position, part, dimension) of an input tensor that has this size in this
            dimension; ``part`` counts in `_parts`. For an input that is a number, the dimension is
            None. If no input has this size, ``place`` is None.
        declared: whether no guard may narrow the range, because the user declared the range or the
            size is data-dependent.
        marked: whether the user marked the size as dynamic, so that Dynamo refuses to make it
            constant.
    """

    name: str
    number: int
    least: int = 0
    most: int | None = None
    source: str = ""
    place: tuple[int, int, int | None] | None = None
    declared: bool = False
    marked: bool = False

    def read(self, inputs: Sequence[Any]) -> Any:
        """Return the value of this size in a run with the given inputs; the planned value if no input has this size."""
        if self.place is None:
            return self.number
        at, part, dimension = self.place
        value = _parts(inputs[at])[part]
        return value if dimension is None else value.size(dimension)


def sizes_of(example_inputs: Sequence[Any]) -> dict[str, Size]:
    """Return a dict from a symbol's name to its `Size`, for each symbol that is a size of an input.

    Sizes that are compound expressions of symbols, such as ``2*s0``, are left out.
    """
    sizes: dict[str, Size] = {}
    marks: dict[Any, tuple[bool, bool]] | None = None
    parts = ((k, j, part) for k, v in enumerate(example_inputs) for j, part in enumerate(_parts(v)))
    for k, j, value in parts:
        is_tensor = isinstance(value, torch.Tensor)
        for d, size in enumerate(numbers_of(value)):
            symbol = expression_of(size)
            if symbol is None or not symbol.is_Symbol or symbol.name in sizes:
                continue
            env = size.node.shape_env
            if marks is None:
                marks = _marks(env)
            declared, marked = marks.get(symbol, (False, False))
            sources = env.var_to_sources.get(symbol) or ()
            sizes[symbol.name] = Size(
                name=symbol.name,
                number=hint(size),
                **_range_of(env, symbol),
                source=str(sources[0].name) if sources else symbol.name,
                place=(k, j, d if is_tensor else None),
                # A guard on a data-dependent size (one without a hint) would raise instead of causing a recompilation.
                declared=declared or not size.node.has_hint(),
                marked=marked,
            )
    return sizes


def _parts(value: Any) -> list[Any]:
    """Return a value and then its inner tensors, because only the inner tensors have all sizes of a jagged tensor."""
    return [value, *plain_parts(value)] if isinstance(value, torch.Tensor) else [value]


def _range_of(env: Any, symbol: Any) -> dict[str, Any]:
    """Return the least and the largest possible value of a symbolic size, as keyword arguments of `Size`."""
    range_ = env.var_to_range.get(symbol)
    least, most = (_finite(getattr(range_, name, None)) for name in ("lower", "upper"))
    return {"least": max(0, least or 0), "most": most}


def _finite(bound: Any) -> int | None:
    """Return a bound of a range as an int; None if the bound is infinite or at least `LARGEST` in magnitude."""
    number = int(bound) if isinstance(bound, (int, sympy.Integer)) else None
    return None if number is None or abs(number) >= LARGEST else number


def _marks(env: Any) -> dict[Any, tuple[bool, bool]]:
    """Return, by symbol, two bools: whether the user declared the symbol's range, and marked the symbol as dynamic."""
    marks: dict[Any, tuple[bool, bool]] = {}
    for tracked in getattr(env, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        if not isinstance(tracked.fake, torch.Tensor):
            continue
        for size, constraint in zip(tracked.fake.size(), constraints, strict=False):
            symbol = expression_of(size)
            if symbol is None or constraint is None or constraint.warn_only:
                continue
            declared, _ = marks.get(symbol, (False, True))
            marks[symbol] = declared or hasattr(constraint, "vr"), True
    return marks


def largest_declared(example_inputs: Sequence[Any]) -> dict[str, Size]:
    """Return the sizes that planning under a budget in bytes uses instead of the traced sizes.

    If the user declared the range of a size, planning uses the largest value of the range, because
    no guard may narrow the range. If the user marked a size as dynamic, and it was traced at its
    least value, planning uses the least value plus 1. A plan for the least value could need a guard
    that allows only this value, and the size would become constant.

    Returns:
        A dict from each symbol's name to the `Size`, whose attribute ``number`` is the size to plan
        for.
    """
    largest = {}
    for name, size in sizes_of(example_inputs).items():
        if size.declared and size.most is not None:
            largest[name] = replace(size, number=size.most)
        # Symbolic sizes are at least 2, because Dynamo makes 0 and 1 constants.
        elif size.marked and not size.declared and size.number <= max(2, size.least):
            largest[name] = replace(size, number=size.number + 1)
    return largest


@contextlib.contextmanager
def at_declared_sizes(example_inputs: Sequence[Any], *, in_bytes: bool) -> Iterator[None]:
    """Make planning in the ``with`` block use the sizes of `largest_declared`, under a budget in bytes.

    Args:
        example_inputs: example inputs of the step.
        in_bytes: whether a budget in bytes applies; if not, sizes stay as traced.

    Raises:
        BudgetError: the block raised this error, to whose message the sizes are added.
    """
    largest = largest_declared(example_inputs) if in_bytes else {}
    try:
        with sizes_at({**planned_sizes(), **{n: size.number for n, size in largest.items()}}):
            yield
    except BudgetError as error:
        if not largest:
            raise
        named = ", ".join(f"{size.source} = {size.number}" for size in largest.values())
        raise BudgetError(
            f"{error}. It was planned for the largest of its declared sizes, {named}: declare smaller ones, with mark_dynamic(…, max=…), or mark none"
        ) from None


class SizedBytes:
    """Function that returns an upper bound on a step's bytes, if the dynamic sizes are within given ranges.

    The bytes are those that the step's budget limits: the bytes of the peak, or the saved bytes.

    Args:
        plan: the step's plan, with the memory of the compiled code if that is known.

    Attributes:
        taken: bytes at the sizes that were planned for.
        symbols: names of the symbolic sizes on which the bytes depend.
    """

    def __init__(self, plan: Plan) -> None:
        timeline = plan.timeline
        # If the compiled bytes have no symbolic sizes, the simulated ones are used instead.
        if all(x.size is None for x in timeline.lifetimes):
            timeline = plan.simulated
        peak = plan.requested.on_peak
        self.taken = plan.peak_bytes if peak else plan.saved_bytes
        chosen = [x for x in timeline.lifetimes if peak or x.kind is StorageKind.SAVED]
        # Saved values are all alive when backward begins, so one program point suffices to sum their bytes.
        self._spans = [
            (x.nbytes, x.size, x.first if peak else 0, x.last if peak else 0) for x in chosen
        ]
        self._program_points = len(timeline.program_points) if peak else 1
        self._sizes = {size: _multiplied(size) for _, size, *_ in self._spans if size is not None}
        self.symbols = {s.name for size in self._sizes for s in size.free_symbols}
        # The timeline leaves out saved-tensor hooks. It also leaves out Inductor's changes if Inductor's code could not
        # be simulated with symbolic sizes. The plan's bytes may include both, so the bytes are scaled up.
        simulated = self._sum({})
        self._more = max(1.0, self.taken / simulated) if simulated else 1.0

    def __call__(self, ranges: Mapping[str, tuple[int, int | None]]) -> int:
        """Return an upper bound on the bytes that a step takes, if its dynamic sizes are within given ranges.

        Args:
            ranges: dict from a symbol's name to its least and largest value; None for no largest
                value. A symbol without an entry may have any size.
        """
        bounds = {size: _upper(expression, ranges) for size, expression in self._sizes.items()}
        if any(bound is None for bound in bounds.values()):
            return LARGEST**2  # above every budget
        return int(self._sum(bounds) * self._more)

    def _sum(self, bounds: Mapping[Any, int | None]) -> int:
        """Return the peak in bytes over all program points, for the values in ``bounds`` of symbolic sizes."""
        spans = (
            (bounds.get(size) or 0 if size in bounds else nbytes, first, last)
            for nbytes, size, first, last in self._spans
        )
        return max(sums_of(spans, self._program_points))


def _upper(size: Any, ranges: Mapping[str, tuple[int, int | None]]) -> int | None:
    """Return an upper bound on an expression whose symbols are within given ranges; None if there is no bound."""
    symbols = {s: ranges.get(s.name, (0, None)) for s in size.free_symbols}
    if _grows(size) and all(most is not None for _, most in symbols.values()):
        return int(size.xreplace({s: sympy.Integer(most) for s, (_, most) in symbols.items()}))
    within = {
        s: torch_compat.ValueRanges(least, torch_compat.int_oo if most is None else most)
        for s, (least, most) in symbols.items()
    }
    upper = torch_compat.bound_sympy(size, within).upper
    is_finite = upper not in (torch_compat.int_oo, sympy.oo)
    return int(upper) if is_finite and getattr(upper, "is_number", True) else None


def _multiplied(size: Any) -> Any:
    """Return an expression expanded if its expanded form is a polynomial without negative terms, or unchanged."""
    # The bound of a growing expression is its value at the largest sizes, which is exact and fast.
    expanded = sympy.expand(size)
    return expanded if _grows(expanded) else size


def _grows(e: Any) -> bool:
    """Return whether an expression is a polynomial without negative terms."""
    if e.is_Symbol:
        return True
    if e.is_Integer:
        return bool(e >= 0)
    if e.is_Pow:
        return bool(e.exp.is_Integer) and e.exp >= 0 and _grows(e.base)
    return (e.is_Add or e.is_Mul) and all(map(_grows, e.args))


def _learned_sizes(plan: Plan, names: set[str]) -> list[Size]:
    """Return the `Size` of each symbol that no input has as a size, such as the data-dependent ``"u0"``."""
    sizes: dict[str, Size] = {name: Size(name=name, number=UNBACKED_HINT) for name in names}
    left = set(names)
    for node in plan.forward.graph.nodes if names else ():
        value = node.meta.get("val")
        for size in numbers_of(value):
            expression = expression_of(size)
            for symbol in () if expression is None else expression.free_symbols:
                if symbol.name in left:
                    left.discard(symbol.name)
                    env = size.node.shape_env
                    sizes[symbol.name] = Size(
                        name=symbol.name,
                        number=hint(env.create_symintnode(symbol, hint=None)),
                        **_range_of(env, symbol),
                        source=f"{symbol.name} ({source_line(node)})",
                    )
    return [*sizes.values()]


class RunSizes:
    """Read the values that given symbolic sizes have in each run of a step.

    Args:
        plan: the step's plan.
        example_inputs: inputs that the step was traced with.
        symbols: names of the symbolic sizes.

    Attributes:
        planned: dict from a symbol to its `Size`.
        unseen: symbols of the sizes that cannot be read after a run.
    """

    def __init__(self, plan: Plan, example_inputs: Sequence[Any], symbols: set[str]) -> None:
        inputs = {n: s for n, s in sizes_of(example_inputs).items() if n in symbols}
        learned = _learned_sizes(plan, symbols - inputs.keys())
        self.planned = inputs | {s.name: s for s in learned}
        values = outputs_of(plan.forward.graph)[own_outputs(plan.forward) :]
        numbers = [v.meta.get("val") for v in values if isinstance(v, fx.Node)]
        kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
        self._saved_numbers = [
            getattr(expression_of(v), "name", "") for v in numbers if isinstance(v, kinds)
        ]
        self.unseen = {s.name for s in learned if s.name not in self._saved_numbers}

    @property
    def are_automatic(self) -> bool:
        """Whether the step's sizes are dynamic only because Dynamo has compiled the step for other sizes before."""
        is_requested = not torch_compat.dynamo_config.assume_static_by_default
        return not is_requested and all(s.place and not s.marked for s in self.planned.values())

    def read(self, arguments: Sequence[Any], node: Any) -> dict[str, int]:
        """Return the sizes of a finished run, by symbol; a size that cannot be read has its planned value."""
        seen = {name: int(size.read(arguments)) for name, size in self.planned.items()}
        numbers = torch_compat.saved_numbers(node)
        if len(numbers) == len(self._saved_numbers):
            seen |= {
                n: int(k) for n, k in zip(self._saved_numbers, numbers, strict=True) if n in seen
            }
        return seen
