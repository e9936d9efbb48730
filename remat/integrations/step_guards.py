"""Check the sizes of a compiled step.

With dynamic shapes, a plan meets a budget in bytes only up to some sizes. The step's bytes are known
as expressions of its symbolic sizes. Upper bounds of these expressions give the largest sizes that
meet the budget. A guard makes Dynamo recompile for larger sizes. Sizes that no guard can bound are
checked when the step runs, and so are all sizes of a step that exceeds its budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning, PlanError, Said, warn
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
from remat.units import Budget, format_apart, format_bytes

#: A bound of at least this number counts as no bound, because no tensor of this size fits in memory.
_LARGEST = 2**50
_DECLARED = "It was planned for the largest of its declared sizes"


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
        """Return this size of a step's inputs; the planned size if no input has it."""
        if self.place is None:
            return self.number
        at, part, dimension = self.place
        value = _parts(inputs[at])[part]
        return value if dimension is None else value.size(dimension)


def sizes_of(example_inputs: Sequence[Any]) -> dict[str, Size]:
    """Return a dict from a symbol's name to its `Size`, for each symbol that is a size of an input.

    Sizes that are compound expressions of symbols, such as ``2*s0``, are left out.
    """
    found: dict[str, Size] = {}
    marks: dict[Any, tuple[bool, bool]] | None = None
    parts = ((k, j, part) for k, v in enumerate(example_inputs) for j, part in enumerate(_parts(v)))
    for k, j, value in parts:
        is_tensor = isinstance(value, torch.Tensor)
        for d, size in enumerate(numbers_of(value)):
            symbol = expression_of(size)
            if symbol is None or not symbol.is_Symbol or symbol.name in found:
                continue
            env = size.node.shape_env
            if marks is None:
                marks = _marks(env)
            declared, marked = marks.get(symbol, (False, False))
            sources = env.var_to_sources.get(symbol) or ()
            found[symbol.name] = Size(
                name=symbol.name,
                number=hint(size),
                **_range_of(env, symbol),
                source=str(sources[0].name) if sources else symbol.name,
                place=(k, j, d if is_tensor else None),
                # A guard on a data-dependent size (one without a hint) would raise instead of causing a recompilation.
                declared=declared or not size.node.has_hint(),
                marked=marked,
            )
    return found


def _parts(value: Any) -> list[Any]:
    """Return a value, followed by the plain tensors in it; only these have all sizes of a jagged tensor."""
    return [value, *plain_parts(value)] if isinstance(value, torch.Tensor) else [value]


def _range_of(env: Any, symbol: Any) -> dict[str, Any]:
    """Return the least and the largest possible value of a symbol.

    Args:
        env: the shape environment of the symbol.
        symbol: the symbol.

    Returns:
        A dictionary with the keys ``least`` and ``most``, which are attributes of `Size`.
    """
    known = env.var_to_range.get(symbol)
    least, most = (_finite(getattr(known, name, None)) for name in ("lower", "upper"))
    return {"least": max(0, least or 0), "most": most}


def _finite(bound: Any) -> int | None:
    """Return a bound of a range as an int; None if infinite or at least `_LARGEST` in magnitude."""
    found = int(bound) if isinstance(bound, (int, sympy.Integer)) else None
    return None if found is None or abs(found) >= _LARGEST else found


def _marks(env: Any) -> dict[Any, tuple[bool, bool]]:
    """Return the symbols whose range the user declared, or that the user marked as dynamic.

    Args:
        env: the shape environment of the symbols.

    Returns:
        A dict from a symbol to a pair: whether its range was declared, and whether it was marked.
        Symbols that the user neither declared nor marked are missing.
    """
    found: dict[Any, tuple[bool, bool]] = {}
    for tracked in getattr(env, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        if not isinstance(tracked.fake, torch.Tensor):
            continue
        for size, constraint in zip(tracked.fake.size(), constraints, strict=False):
            symbol = expression_of(size)
            if symbol is None or constraint is None or constraint.warn_only:
                continue
            declared, _ = found.get(symbol, (False, True))
            found[symbol] = declared or hasattr(constraint, "vr"), True
    return found


def largest_declared(example_inputs: Sequence[Any]) -> dict[str, Size]:
    """Return the sizes that planning under a budget in bytes uses instead of the traced sizes.

    If the user declared the range of a size, planning uses the largest value of the range, because
    no guard may narrow the range. If the user marked a size as dynamic, and it was traced at its
    least value, planning uses the least value plus 1. Otherwise a guard might allow the least value
    only, which would make the size constant.

    Args:
        example_inputs: example inputs of the step.

    Returns:
        A dict from the symbol's name to the `Size`, whose attribute ``number`` is the size to plan
        for.
    """
    found = {}
    for name, size in sizes_of(example_inputs).items():
        if size.declared and size.most is not None:
            found[name] = replace(size, number=size.most)
        # Symbolic sizes are at least 2, because Dynamo makes 0 and 1 constants.
        elif size.marked and not size.declared and size.number <= max(2, size.least):
            found[name] = replace(size, number=size.number + 1)
    return found


@contextlib.contextmanager
def at_declared_sizes(example_inputs: Sequence[Any], *, in_bytes: bool) -> Iterator[None]:
    """Make planning in the ``with`` block use the sizes of `largest_declared`, under a budget in bytes.

    Args:
        example_inputs: example inputs of the step.
        in_bytes: whether a budget in bytes applies; if not, sizes stay as traced.

    Raises:
        BudgetError: the block raised this error. The sizes are added to its message.
    """
    largest = largest_declared(example_inputs) if in_bytes else {}
    try:
        with sizes_at({**planned_sizes(), **{n: size.number for n, size in largest.items()}}):
            yield
    except BudgetError as error:
        if not largest or _DECLARED in str(error):  # an inner block has added the sizes already
            raise
        named = ", ".join(f"{size.source} = {size.number}" for size in largest.values())
        raise BudgetError(
            f"{error}. {_DECLARED}, {named}: declare smaller ones, with mark_dynamic(…, max=…), or mark none"
        ) from None


class SizedBytes:
    """Function that returns an upper bound of a step's bytes over given ranges of its sizes.

    The bytes are those that the step's budget limits: the bytes of the peak, or the saved bytes.

    Args:
        plan: the step's plan, with the figures of the compiled code if there are any.

    Attributes:
        taken: bytes at the sizes that were planned for.
        symbols: names of the symbolic sizes on which the bytes depend.
    """

    def __init__(self, plan: Plan) -> None:
        timeline = plan.timeline
        # If the compiled bytes have no symbolic sizes, the simulated ones are used instead.
        if all(x.size is None for x in timeline.lifetimes):
            timeline = plan.simulated
        peak = plan.asked.on_peak
        self.taken = plan.peak_bytes if peak else plan.saved_bytes
        chosen = [x for x in timeline.lifetimes if peak or x.kind is StorageKind.SAVED]
        # Saved values are all alive when backward begins, so one program point suffices to sum their bytes.
        self._spans = [
            (x.nbytes, x.size, x.first if peak else 0, x.last if peak else 0) for x in chosen
        ]
        self._moments = len(timeline.moments) if peak else 1
        self._sizes = {size: _multiplied(size) for _, size, *_ in self._spans if size is not None}
        self.symbols = {s.name for size in self._sizes for s in size.free_symbols}
        # The timeline leaves out saved-tensor hooks. It also leaves out Inductor's changes if Inductor's code could not
        # be simulated with symbolic sizes. The plan's figures may include both, so the bytes are scaled up.
        simulated = self._sum({})
        self._more = max(1.0, self.taken / simulated) if simulated else 1.0

    def __call__(self, ranges: Mapping[str, tuple[int, int | None]]) -> int:
        """Return an upper bound of the bytes over ranges of sizes.

        Args:
            ranges: dict from a symbol's name to its least and largest value; None for no largest
                value. A symbol without an entry may have any size.
        """
        bounds = {size: _upper(whole, ranges) for size, whole in self._sizes.items()}
        if any(bound is None for bound in bounds.values()):
            return _LARGEST**2  # above every budget
        return int(self._sum(bounds) * self._more)

    def _sum(self, bounds: Mapping[Any, int | None]) -> int:
        """Return the largest number of bytes that are alive at one program point.

        Args:
            bounds: dict from the symbolic size of a storage to its number of bytes. If the symbolic
                size of a storage is missing, its planned bytes are used.
        """
        spans = (
            (bounds.get(size) or 0 if size in bounds else nbytes, first, last)
            for nbytes, size, first, last in self._spans
        )
        return max(sums_of(spans, self._moments))


def _upper(size: Any, ranges: Mapping[str, tuple[int, int | None]]) -> int | None:
    """Return an upper bound of an expression over ranges of its symbols; None if unbounded."""
    symbols = {s: ranges.get(s.name, (0, None)) for s in size.free_symbols}
    if _grows(size) and all(most is not None for _, most in symbols.values()):
        return int(size.xreplace({s: sympy.Integer(most) for s, (_, most) in symbols.items()}))
    within = {
        s: torch_compat.ValueRanges(least, torch_compat.int_oo if most is None else most)
        for s, (least, most) in symbols.items()
    }
    found = torch_compat.bound_sympy(size, within).upper
    is_finite = found not in (torch_compat.int_oo, sympy.oo)
    return int(found) if is_finite and getattr(found, "is_number", True) else None


def _multiplied(size: Any) -> Any:
    """Return the expanded form of an expression if it passes `_grows`; otherwise the given expression."""
    # The bound of a growing expression is its value at the largest sizes, which is exact and fast.
    whole = sympy.expand(size)
    return whole if _grows(whole) else size


def _grows(e: Any) -> bool:
    """Return whether an expression is a polynomial without negative terms.

    Such an expression grows with each of its symbols.
    """
    if e.is_Symbol:
        return True
    if e.is_Integer:
        return bool(e >= 0)
    if e.is_Pow:
        return bool(e.exp.is_Integer) and e.exp >= 0 and _grows(e.base)
    return (e.is_Add or e.is_Mul) and all(map(_grows, e.args))


#: Type of a callback to call after each run of a step. The callback gets the arguments of the run, and the node of
#: autograd's graph that will run backward.
Look = Callable[[Sequence[Any], Any], None]


def guard_sizes(
    example_inputs: Sequence[Any],
    made: Plan,
    budget: Budget,
    said: Said,
    *,
    saved: Plan | None,
    watched: bool,
) -> Look | None:
    """Make Dynamo recompile a step for sizes at which its plan may exceed a budget in bytes.

    The function adds guards for the sizes of the traced inputs. A tracer without guards, such as
    ``aot_function``, does not recompile. If a size can be neither bounded by a guard nor checked
    when the step runs, the function warns.

    Args:
        example_inputs: inputs that the step was traced with.
        made: the step's plan, with the figures of the compiled code if these are known.
        budget: the step's budget, which the plan may exceed.
        said: the bytes that warnings about this step have named.
        saved: the saved plan that the step was split by, which no new plan may replace; None if the step was planned.
        watched: whether the returned callback will be called after each run.

    Returns:
        A callback that checks the sizes that no guard can bound. None if no such check is needed,
        or if ``watched`` is False.

    Raises:
        PlanError: a saved plan exceeds its budget in bytes at the traced sizes.
    """
    limit = budget.peak_bytes or budget.nbytes
    if limit is None or not (made.symbolic or made.learns_sizes):
        return None
    bytes_at = SizedBytes(made)
    if saved is not None and budget.on_peak:
        # A saved plan from a set meets the budget together with the set's other graphs. A graph alone keeps its outputs
        # alive to its end, so the peak of one graph alone may exceed the budget.
        limit = max(limit, saved.peak_bytes)
    if saved is not None and bytes_at.taken > limit:
        raise PlanError(
            f"the saved plan for '{made.graph}' was made under the budget {budget.label}, and takes "
            f"{format_bytes(bytes_at.taken)} ({bytes_at.taken} bytes) at these sizes; expected sizes at which it "
            f"takes at most {limit} bytes. Plan again at the largest sizes, or under a ratio, which grows with them"
        )
    most = limit  # bytes from which on Dynamo recompiles the step
    if bytes_at.taken > limit:
        said.nbytes = max(said.nbytes, bytes_at.taken)  # compilation has warned
        # A plan for other sizes may meet the budget. Dynamo compiles a function eight times at most, so the bytes of
        # a step that is checked when it runs double before it is compiled again.
        most = 2 * bytes_at.taken if watched else said.quiet
    of_run = RunSizes.of(made, example_inputs, bytes_at.symbols)
    # No guard may bound a data-dependent or a declared size: the guard would raise instead of causing a recompilation.
    sizes = [*of_run.planned.values()]
    given = {s.name: (s.least, s.most) for s in sizes}
    fixed: dict[str, tuple[int, int | None]] = {
        s.name: (s.least, s.number) for s in sizes if s.place is None or s.declared
    }
    free = {s.name: s for s in sizes if s.name not in fixed}
    if bytes_at(given) <= limit:
        return None
    # If the budget holds for every value of the sizes that no guard bounds, guards on the other sizes suffice.
    widest = {name: given[name] for name in fixed}
    if bytes_at({**widest, **{n: (s.least, s.number) for n, s in free.items()}}) <= most:
        fixed = widest
    for name, largest in _largest(bytes_at, most, free, fixed).items():
        torch._check(free[name].read(example_inputs) <= largest)  # type: ignore[no-untyped-call]  # adds the guard
        given[name] = free[name].least, largest
    if bytes_at(given) <= max(limit, said.quiet):
        return None
    look = _SizeCheck(made, bytes_at, budget, limit, said, of_run, fixed)
    if watched and not of_run.unseen:
        return look
    warn(
        f"'{made.graph}' {'holds' if most == limit else 'exceeds'} its budget {budget.label} for {look.shown()}. The step "
        "takes more at larger sizes, which depend on the data and are not checked as it runs. Keep them smaller, or "
        "give a smaller budget",
        BudgetWarning,
    )
    return look if watched else None


def _learned_sizes(made: Plan, names: set[str]) -> list[Size]:
    """Return the `Size` of each symbol that no input has as a size, such as the data-dependent ``"u0"``.

    Args:
        made: the plan, whose forward graph has values with these symbols.
        names: the symbols.
    """
    found: dict[str, Size] = {name: Size(name=name, number=UNBACKED_HINT) for name in names}
    left = set(names)
    for node in made.forward.graph.nodes if names else ():
        value = node.meta.get("val")
        for size in numbers_of(value):
            expression = expression_of(size)
            for symbol in () if expression is None else expression.free_symbols:
                if symbol.name in left:
                    left.discard(symbol.name)
                    env = size.node.shape_env
                    found[symbol.name] = Size(
                        name=symbol.name,
                        number=hint(env.create_symintnode(symbol, hint=None)),
                        **_range_of(env, symbol),
                        source=f"{symbol.name} ({source_line(node)})",
                    )
    return [*found.values()]


class RunSizes:
    """Read the sizes of a finished run of a step.

    Args:
        made: the step's plan.
        sizes: the sizes to read.

    Attributes:
        planned: dict from a symbol to its `Size`.
        unseen: symbols of the sizes that cannot be read after a run.
    """

    def __init__(self, made: Plan, sizes: Sequence[Size]) -> None:
        values = outputs_of(made.forward.graph)[own_outputs(made.forward) :]
        numbers = [v.meta.get("val") for v in values if isinstance(v, fx.Node)]
        kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
        self._handed = [
            getattr(expression_of(v), "name", "") for v in numbers if isinstance(v, kinds)
        ]
        self.planned = {s.name: s for s in sizes}
        self.unseen = {s.name for s in sizes if s.place is None and s.name not in self._handed}

    @classmethod
    def of(cls, made: Plan, example_inputs: Sequence[Any], symbols: set[str]) -> RunSizes:
        """Build the reader of the sizes with the given symbols.

        Args:
            made: the step's plan.
            example_inputs: inputs that the step was traced with.
            symbols: the symbols.
        """
        inputs = {n: s for n, s in sizes_of(example_inputs).items() if n in symbols}
        return cls(made, [*inputs.values(), *_learned_sizes(made, symbols - inputs.keys())])

    @property
    def are_automatic(self) -> bool:
        """Whether the sizes are dynamic only because Dynamo, which is compiling, has seen others before."""
        asked = not torch_compat.dynamo_config.assume_static_by_default
        return not asked and all(s.place and not s.marked for s in self.planned.values())

    def read(self, arguments: Sequence[Any], step: Any) -> dict[str, int]:
        """Return the sizes of a finished run; a size that cannot be read has its planned value.

        Args:
            arguments: arguments of the run.
            step: the node of autograd's graph that runs backward.
        """
        seen = {name: int(size.read(arguments)) for name, size in self.planned.items()}
        numbers = torch_compat.handed_numbers(step)
        if len(numbers) == len(self._handed):
            seen |= {n: int(k) for n, k in zip(self._handed, numbers, strict=True) if n in seen}
        return seen


class _SizeCheck:
    """Callback that checks the sizes of each run of a step.

    The callback warns if the step exceeds its budget at the sizes of a run, and takes over a tenth
    more than earlier warnings named.

    Args:
        made: the step's plan.
        bytes_at: the step's bytes as a function of sizes.
        budget: the budget.
        limit: bytes above which the callback warns.
        said: the bytes that warnings about this step have named.
        sizes: all sizes on which the bytes depend.
        unbounded: symbols of the sizes that no guard bounds.
    """

    def __init__(
        self,
        made: Plan,
        bytes_at: SizedBytes,
        budget: Budget,
        limit: int,
        said: Said,
        sizes: RunSizes,
        unbounded: Collection[str],
    ) -> None:
        self._bytes_at, self._budget, self._limit, self._said = bytes_at, budget, limit, said
        self._sizes, self._graph = sizes, made.graph
        self._shown = [n for n in sizes.planned if n in unbounded] or [*sizes.planned]
        self._held: Mapping[str, int] = dict.fromkeys(sizes.planned, -1)

    def __call__(self, arguments: Sequence[Any], step: Any) -> None:
        """Check the sizes of a finished run.

        Args:
            arguments: arguments of the run.
            step: the node of autograd's graph that runs backward.
        """
        seen = self._sizes.read(arguments, step)
        if all(number <= self._held[name] for name, number in seen.items()):
            return
        most = max(self._limit, self._said.quiet)
        # If no warning is due at twice these sizes, later runs up to these sizes skip the sum.
        for times in (2, 1):
            upto = {name: times * number for name, number in seen.items()}
            within = {n: (self._sizes.planned[n].least, k) for n, k in upto.items()}
            if self._bytes_at(within) <= most:
                self._held = upto
                return
        taken = self._bytes_at({n: (k, k) for n, k in seen.items()})
        if taken > most:
            self._said.nbytes = taken
            self._warn(taken, seen)

    def _warn(self, taken: int, seen: Mapping[str, int]) -> None:
        """Warn that the step exceeds its budget, and suggest a smaller one if the plan was within the budget.

        The suggested budget is the given budget times the ratio of the planned bytes to ``taken``.

        Args:
            taken: bytes at the sizes of the run.
            seen: the sizes of the run.
        """
        more, most = format_apart(taken, self._limit)
        remedy, peak = "Raise the budget", self._budget.on_peak
        if self._bytes_at.taken <= self._limit:
            less = self._limit * self._bytes_at.taken // taken
            instead = Budget(peak_bytes=less) if peak else Budget(nbytes=less)
            remedy = f"budget='{instead}' makes up for it"
        warn(
            f"'{self._graph}' {'has a peak of' if peak else 'keeps'} {more} ({taken} bytes) at {self.shown(seen)}, above "
            f"the {most} ({self._limit} bytes) of its budget {self._budget.label}. It was planned for {self.shown()}. "
            f"{remedy}; or keep these sizes smaller. {Said.NEXT}",
            BudgetWarning,
        )

    def shown(self, numbers: Mapping[str, int] | None = None) -> str:
        """Return a text that lists each size that no guard bounds, with a value.

        Args:
            numbers: dict from each symbol to the value to show; None for the planned values.
        """
        planned = self._sizes.planned
        found = {n: planned[n].number for n in self._shown} if numbers is None else numbers
        return ", ".join(f"{planned[n].source or n} = {found[n]}" for n in self._shown)


def _largest(
    bytes_at: SizedBytes,
    limit: int,
    free: Mapping[str, Size],
    fixed: Mapping[str, tuple[int, int | None]],
) -> dict[str, int]:
    """Return the largest sizes, of the symbols in ``free``, at which a step still meets its budget.

    The sizes in ``free`` grow by one common factor, which is found by bisection.

    Args:
        bytes_at: the step's bytes as a function of sizes.
        limit: the budget in bytes.
        free: sizes that a guard can bound.
        fixed: least and largest value of each other size, by symbol.

    Returns:
        Dict from a symbol in ``free`` to its largest size. Sizes that need no bound are left out.
    """

    def upto(times: float) -> dict[str, int]:
        grown = {n: int(size.number * times) for n, size in free.items()}
        return {n: min(most, free[n].most or most) for n, most in grown.items()}

    def holds(most: Mapping[str, int | None]) -> bool:
        ranges = {n: (min(free[n].least, free[n].number), most[n]) for n in free}
        return bytes_at({**fixed, **ranges}) <= limit

    few, many = 1.0, 2.0
    while many < _LARGEST and holds(upto(many)):
        few, many = many, 2 * many
    while upto(few) != upto(many) and many - few > few / 1024:
        middle = (few + many) / 2
        few, many = (middle, many) if holds(upto(middle)) else (few, middle)
    found: dict[str, int | None] = {**upto(few)}
    for name in free:
        if holds({**found, name: free[name].most}):
            found[name] = None
    return {name: most for name, most in found.items() if most is not None}
