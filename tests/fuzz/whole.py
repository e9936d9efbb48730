"""Random programs as whole steps of ``backend="remat"``: sizes that change, sizes that the data tells, graph breaks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st

import remat
from remat.errors import BudgetError, BudgetWarning, CaptureError, RematError
from remat.torch_compat import dynamo_config, functorch_config, inductor_config
from tests.fuzz.captured import quiet
from tests.fuzz.check import SEEN, near
from tests.fuzz.draw import programs
from tests.fuzz.functions import checkpoint, plainly
from tests.fuzz.lines import OF_DATA, TABLE, holds_at_any_size
from tests.fuzz.program import Program, run_step
from tests.steps import differences, measure_held

#: How a size is marked: not at all (PyTorch makes the second one a symbol), or with ``mark_dynamic``.
MARKS = ("unmarked", "marked", "range")
Left = dict[str, torch.Tensor]
#: What must be left behind at each size: one of the two, value by value.
Expected = dict[int, tuple[Left, Left]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A program, the sizes that it runs at, and the budgets that it runs under.

    Attributes:
        program: the program; it may break its graph.
        rows: the size of inputs that changes.
        sizes: what it is, one call after the other.
        mark: how inputs are marked.
        budget: a ratio.
        kind: what another budget bounds.
        part: where its bytes lie between the least and those of budget 1.
        lower: the lowering.
    """

    program: Program
    rows: int
    sizes: tuple[int, ...]
    mark: str
    budget: float
    kind: str
    part: float
    lower: str = "eager"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        rest = (f"# {f.name}: {getattr(self, f.name)!r}" for f in fields(self)[1:])
        return "\n".join([repr(self.program), *rest])

    @property
    def breaks(self) -> bool:
        """Whether the program breaks its graph."""
        return "graph_break" in self.program.source

    @property
    def of_data(self) -> bool:
        """Whether the data tells some of its sizes."""
        return any(op.text.split("{")[0] in self.program.source for op in OF_DATA)

    def in_bytes(self, plans: Sequence[remat.Plan]) -> remat.Saved | remat.Peak:
        """The other budget, by the figures of plans; it may be less than what can be held."""
        if self.kind == "ratio of the peak":
            return remat.Peak(self.budget)
        if self.kind == "peak":
            peak = max(p.without_peak_bytes for p in plans)
            return remat.Peak(max(2, int(peak * (0.7 + 0.3 * self.part))))
        full, least = (sum(getattr(p, n) for p in plans) for n in ("saved_bytes", "least_bytes"))
        return remat.Saved(max(0, int(least + self.part * (full - least))))

    def at(self, size: int) -> Program:
        """The program with inputs of another size."""
        inputs = tuple(
            replace(i, shape=tuple(size if s == self.rows else s for s in i.shape))
            for i in self.program.inputs
        )
        return replace(self.program, inputs=inputs)


@st.composite
def whole_steps(draw: st.DrawFn, *, lower: str = "eager") -> Step:
    """Random steps."""
    drawn = draw(st.sampled_from(["sizes", "sizes", "data", "data", "breaks", "breaks", "all"]))
    several = drawn in ("sizes", "all")
    table = TABLE
    if several:
        able = ((weight, list(filter(holds_at_any_size, group))) for weight, group in TABLE)
        table = tuple((weight, group) for weight, group in able if group)
    if drawn in ("data", "all"):
        table = ((8, OF_DATA), *table)
    program = draw(programs(most_lines=8, table=table, apart=True))
    if drawn in ("breaks", "all"):
        lines = list(program.lines)
        places = draw(st.sets(st.integers(1, len(lines)), min_size=1, max_size=3))
        for place in sorted(places, reverse=True):
            lines.insert(place, "torch._dynamo.graph_break()")
        program = replace(program, lines=tuple(lines))
    rows = program.inputs[0].shape[0]
    others = st.lists(st.integers(2, 2 * rows), min_size=1, max_size=2)
    return Step(
        program=program,
        rows=rows,
        sizes=(rows, *(draw(others) if several else ())),
        mark=draw(st.sampled_from(MARKS)) if several else MARKS[0],
        budget=draw(st.one_of(st.sampled_from([0.0, 0.0, 1.0]), st.floats(0, 1, width=16))),
        kind=draw(st.sampled_from(["saved", "saved", "peak", "peak", "ratio of the peak"])),
        part=draw(st.sampled_from([-0.1, 0.0, 0.0, 0.2, 0.5, 0.8, 1.0])),
        lower=lower,
    )


def check_step(step: Step) -> None:
    """At every size and budget a step leaves behind what it does without remat, within its bytes or it says so."""
    expected = expect(step)
    if expected is None:
        return
    SEEN["steps"] += 1
    SEEN["steps that break their graph"] += step.breaks
    SEEN[f"steps at several sizes: {step.mark}"] += len(expected) > 1
    SEEN["steps with sizes that the data tells"] += step.of_data
    plans = run_under(step, {"budget": step.budget}, expected)
    if not plans:
        SEEN["nothing to differentiate"] += 1
        return
    budget = step.in_bytes(plans)
    run_under(step, {"budget": budget}, expected)
    if step.breaks:
        check_list(step, expected)


def expect(step: Step) -> Expected | None:
    """What a step leaves behind at each size without remat; None where PyTorch refuses it."""
    eager: dict[int, Left] = {}
    for size in dict.fromkeys(step.sizes):
        program = step.at(size)
        try:
            eager[size] = run_step(program.function(plainly), *program.tensors())
        except (RuntimeError, IndexError, ValueError):
            SEEN["sizes that eager PyTorch refuses"] += 1
    backend = "aot_eager" if step.lower == "eager" else "inductor"
    try:
        # CSE merges calls of custom operators that count or draw; `remat.graph.capture.tangents` says why of the other setting.
        with functorch_config.patch(cse=False, guess_tangent_strides_as_outputs=False):
            found, _ = compile_and_run(step, tuple(eager), backend=backend)
    except Exception as error:
        SEEN[f"steps refused by {backend}: {type(error).__name__}"] += 1
        return None
    for size, left in found.items():
        far = [k for k in differences(left, eager[size]) if k not in ("random state", "calls")]
        if any(not near(left[k], eager[size][k]) for k in far):
            SEEN[f"steps of {backend} that differ from eager"] += 1
    return {size: (left, eager[size]) for size, left in found.items()}


def compile_and_run(
    step: Step, sizes: Sequence[int], **how: Any
) -> tuple[dict[int, Left], dict[int, int]]:
    """Compiles a step; returns what it leaves behind at each size, and the bytes that it holds for backward."""
    torch._dynamo.reset()
    compiled = torch.compile(step.program.function(checkpoint), fullgraph=not step.breaks, **how)
    left: dict[int, Left] = {}
    held: dict[int, int] = {}
    with alike(), quiet():
        for size in sizes:
            weights, args = step.at(size).tensors()
            mark(step, args)
            left[size] = {k: v.clone() for k, v in run_step(compiled, weights, args).items()}
            _, args = step.at(size).tensors()
            mark(step, args)
            held[size] = measure_held(compiled, args)
    return left, held


def mark(step: Step, args: list[torch.Tensor]) -> None:
    if step.mark == "unmarked":
        return
    ranges = {"min": 2, "max": max(step.sizes) + 1} if step.mark == "range" else {}
    for arg, given in zip(args, step.program.inputs, strict=True):
        for dim, size in enumerate(given.shape):
            if size == step.rows and arg.dim() == len(given.shape):
                torch._dynamo.mark_dynamic(arg, dim, **ranges)


def run_under(step: Step, options: dict[str, Any], expected: Expected) -> list[remat.Plan]:
    """Runs a step under a budget; returns its plans, none where the budget was refused by name."""
    options = {"lower": step.lower, **options}
    budget, before = options.get("budget"), len(remat.plans())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", remat.PeakWarning)
        warnings.simplefilter("always", BudgetWarning)
        try:
            found, held = compile_and_run(step, tuple(expected), backend="remat", options=options)
        except Exception as error:
            # A later graph may write to what backward reads again; see docs/inputs.md.
            if "modified by an inplace operation" in str(error) and "reread_inputs" not in options:
                SEEN["inputs that a later graph writes to"] += 1
                if "plan" in options:
                    return []
                return run_under(step, {**options, "reread_inputs": False}, expected)
            refusal = refusal_of(error)
            # As compiled, or at the largest declared size, a saved plan may take more than its bytes, and is refused.
            more = step.lower == "inductor" or step.mark == "range"
            saved = more and "plan" in options and "the saved plan for" in str(refusal)
            in_bytes = isinstance(refusal, BudgetError) and not isinstance(budget, float | None)
            if refusal is None or not (in_bytes or saved):
                raise
            SEEN[f"refused by name: {type(refusal).__name__} under {type(budget).__name__}"] += 1
            return []
    SEEN[f"runs under {type(budget).__name__}"] += len(found)
    for size, left in found.items():
        plain, eager = expected[size]
        # PyTorch's partitioner reads a buffer again that forward has written to: eager PyTorch is right.
        names = [k for k in differences(left, plain) if not near(left[k], eager[k])]
        if step.lower == "inductor":
            names = [k for k in names if not near(left[k], plain[k])]
        assert not names, f"at {size} under {options} it differs from PyTorch in {names}"
    warned = any(issubclass(w.category, (BudgetWarning, remat.PeakWarning)) for w in caught)
    SEEN["warned of what a budget cannot hold"] += warned
    if isinstance(budget, remat.Saved) and not warned:
        assert max(held.values()) <= budget.nbytes, f"bytes held by size: {held}, of {budget}"
    plans = remat.plans()[before:]
    for plan in plans:
        if not isinstance(budget, remat.Peak):  # A peak bounds no saved bytes.
            assert plan.saved_bytes <= plan.capacity, f"{plan.saved_bytes} of {plan.capacity}"
        # As compiled, a ratio is held nearly, to 5 %. It stands for bytes at the sizes of tracing, which the data may change.
        compiled = step.lower == "inductor"
        if plan.peak_limit and not warned and not (compiled and plan.learns_sizes):
            assert plan.peak_bytes <= plan.peak_limit * (1.05 if compiled else 1)
    return list(plans)


def check_list(step: Step, expected: Expected) -> None:
    """The graphs of a step are planned together, and the step runs on these plans."""
    size = next(iter(expected))
    program = step.at(size)
    with alike(), quiet():
        torch._dynamo.reset()
        function = program.function(checkpoint)
        _, args = program.tensors()
        mark(step, args)
        # By real numbers: sizes that the data tells are numbers to the next graph.
        try:
            joints = remat.capture(function, args, lower=step.lower, fullgraph=False, run=True)
        except CaptureError as error:
            # Other draws choose other rows, perhaps none.
            if "ZeroDivisionError" not in str(error):
                raise
            SEEN["lists of graphs: other draws divide by zero rows"] += 1
            return
        first = remat.plan(joints, step.budget)
        budget = step.in_bytes(list(first))
        try:
            plans = remat.plan(joints, budget)
        except BudgetError:
            SEEN["lists of graphs: a budget refused by name"] += 1
            plans = first
        else:
            SEEN[f"lists of graphs that were planned together: {step.kind}"] += 1
            if isinstance(budget, remat.Saved):
                assert plans.saved_bytes <= budget.nbytes
            elif budget.nbytes is not None:
                assert plans.peak_bytes <= budget.nbytes
    run_under(step, {"plan": plans}, {size: expected[size]})


def refusal_of(error: BaseException | None) -> RematError | None:
    """Our own error behind what Dynamo raises."""
    while error is not None and not isinstance(error, RematError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


@contextmanager
def alike() -> Iterator[None]:
    """Sizes that the data tells are part of graphs; Inductor draws as eager PyTorch does."""
    sizes = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with dynamo_config.patch(sizes), inductor_config.patch(fallback_random=True):
        yield
