"""Random programs, drawn by Hypothesis line by line while they run on small tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.functions import POLICIES, plainly
from tests.fuzz.lines import BUFFERS, POINTWISE, TABLE, Table
from tests.fuzz.operators import LARGEST, Operator
from tests.fuzz.program import Input, Kind, Program, make_inputs, namespace

#: Regions are nested this deep.
DEEPEST = 2
#: How often each operator was written.
WRITTEN: Counter[str] = Counter()


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    regions: bool = False,
    most_lines: int = 14,
    table: Table = TABLE,
    apart: bool = False,
) -> Program:
    """Training steps that eager PyTorch runs, forward and backward.

    Args:
        regions: with checkpointed regions.
        most_lines: lines, at most; a region counts as one.
        table: what lines are drawn from.
        apart: rows and columns of inputs are of different numbers.
    """
    inputs = draw(all_inputs(apart=apart))
    writer = _Writer(inputs, table)
    wanted = draw(st.integers(2, most_lines))
    while len(writer.lines) < wanted and writer.patience:
        if regions and draw(st.integers(0, 4)) == 0:
            writer.region(draw)
        else:
            writer.line(draw)
    return writer.finish(draw)


@st.composite
def all_inputs(draw: st.DrawFn, *, apart: bool = False) -> tuple[Input, ...]:
    """Inputs of few different sizes, so that they fit one another."""
    # The state of a generator takes 5,056 bytes: only what is larger pays to be drawn again.
    sizes = st.sampled_from(draw(st.sampled_from([(2, 3, 4), (80, 90), (80, 90)])))
    rows = draw(sizes)
    columns = draw(sizes.filter(lambda size: not apart or size != rows))
    shapes = [
        (rows, columns),
        (columns, rows),
        (columns,),
        (2, rows, columns),
        (rows, rows),
        (),
        (1, columns),
    ]
    inputs = [Input(shape=(rows, columns)), Input(shape=(columns, rows))]
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([*[Kind.DATA] * 4, *[Kind.WEIGHT] * 3, *Kind]))
        shape = draw(st.sampled_from(shapes))
        dtype = "float32"
        if kind is Kind.DATA:
            floats = ["float32", "float32", "float64", "bfloat16", "float16"]
            dtype = draw(st.sampled_from([*floats, "int64", "bool"]))
        if draw(st.integers(0, 9)) == 0:
            shape = (0, *shape[1:])
        of = draw(st.integers(0, len(inputs) - 1))
        if kind in (Kind.SAME, Kind.VIEW):
            shape, dtype = inputs[of].shape, inputs[of].dtype
        if kind is Kind.VIEW and inputs[of].kind is not Kind.DATA:
            kind = Kind.SAME
        inputs.append(Input(shape=shape, dtype=dtype, kind=kind, of=of))
    # Two buffers with which batches can be normalised, a mask, and indices.
    inputs += [Input(shape=(columns,), kind=Kind.DATA)] * 2
    inputs += [Input(shape=(rows, columns), dtype="bool", kind=Kind.DATA)]
    inputs += [Input(shape=(rows,), dtype="int64", kind=Kind.DATA)]
    return tuple(inputs)


class _Writer:
    """A program as far as it is written, and its values as they are then."""

    def __init__(self, inputs: tuple[Input, ...], table: Table) -> None:
        self.inputs = inputs
        self.table = table
        self.lines: list[str] = []
        self.patience = 40
        self._names = 0
        self._read: set[str] = set()
        #: What looks at memory of another value, and which of it through strides of its own.
        self._views: set[str] = set()
        self._windows: set[str] = set()
        self._begin()
        memories = Counter(v.untyped_storage()._cdata for v in self.values.values())
        self._views |= {
            k for k, v in self.values.items() if memories[v.untyped_storage()._cdata] > 1
        }

    def _begin(self) -> None:
        """The values as they are before the first line."""
        torch.manual_seed(0)
        self.weights, args = make_inputs(self.inputs)
        self.space = namespace(plainly)
        self.values = {f"a{k}": v for k, v in enumerate(args)}
        self._given = tuple(self.values)

    def line(self, draw: Any) -> None:
        """Writes one more line, unless what was drawn fits nothing or autograd refuses it."""
        op = self._operator(draw, self.table)
        written = self._write(draw, op)
        WRITTEN[op.text] += written is not None
        if written is None:
            self.patience -= 1
        elif (op.writes or op.spoils) and not self._differentiable():
            self._begin()
            for text in self.lines:
                self._run(text)
            # Functions of regions are no values.
            made = self.values.items()
            self.values = {k: v for k, v in made if isinstance(v, torch.Tensor)}
            self.patience -= 1
        else:
            self.lines.append(written)

    def region(self, draw: Any, depth: int = 1) -> None:
        """Writes a checkpointed region; in it, nothing is written to."""
        outer, before = self.lines, dict(self.values)
        self.lines = []
        for _ in range(draw(st.integers(1, 5))):
            if depth < DEEPEST and draw(st.integers(0, 5)) == 0:
                self.region(draw, depth + 1)
            else:
                op = self._operator(draw, TABLE[:-2])
                written = None if op.spoils else self._write(draw, op)
                self.lines += [] if written is None else [written]
        body, self.lines = self.lines, outer
        inside = self.values
        made = [k for k in inside if k not in before]
        if not made:
            self.patience -= 1
            return
        text = "\n".join(body)
        handed = [k for k in before if _mentions(text, k)]
        returned = made[-2:] if draw(st.booleans()) else made[-1:]
        name, results = f"region_{self._name()}", [self._name() for _ in returned]
        policy = draw(st.sampled_from([None, *POLICIES]))
        option = "" if policy is None else f", policy={policy!r}"
        indented = text.replace("\n", "\n    ")
        self.values = {**before, **dict(zip(results, (inside[k] for k in returned), strict=True))}
        for name, k in zip(results, returned, strict=True):
            self._views |= {name} if k in self._views else set()
            self._windows |= {name} if k in self._windows else set()
        self.lines.append(
            f"def {name}({', '.join(handed)}):\n    {indented}\n    return {', '.join(returned)},\n"
            f"{', '.join(results)}, = checkpoint({', '.join([name, *handed])}{option})"
        )

    def finish(self, draw: Any) -> Program:
        """Chooses what is returned: something differentiated, and whatever else."""
        made = list(self.values)
        wanted = [k for k in made if self.values[k].requires_grad and k not in self._read]
        wanted = [k for k in wanted if k.startswith("v")]
        if not wanted:
            self.lines.append("v = torch.sin(a0) @ a1")
            wanted = ["v"]
        outputs = [*wanted[-3:], *draw(st.lists(st.sampled_from(made), max_size=3))]
        return Program(inputs=self.inputs, lines=tuple(self.lines), outputs=tuple(outputs))

    def _name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _operator(self, draw: Any, table: Table) -> Operator:
        """An operator that something fits, by the weights of groups and within them."""
        values = self.values.values()
        group = draw(st.sampled_from([group for weight, group in table for _ in range(weight)]))
        able = [op for op in group if any(map(op.fits[0], values))] or POINTWISE
        return draw(st.sampled_from([op for op in able for _ in range(op.weight)]))  # type: ignore[no-any-return]

    def _write(self, draw: Any, op: Operator) -> str | None:
        """The text of a line after it has run, or None where it cannot."""
        names: list[str] = []
        for fits in op.fits:
            earlier = [self.values[n] for n in names]
            found = [k for k, v in self.values.items() if fits(v, *earlier)]
            if not found:
                return None
            if op in BUFFERS and draw(st.booleans()):
                found = [k for k in found if k in self._given] or found
            # What was differentiated last is read more often: programs grow long, not wide.
            late = [k for k in found if self.values[k].requires_grad][-2:] or found[-2:]
            names.append(draw(st.sampled_from(late if draw(st.integers(0, 2)) else found)))
            self._read.add(names[-1])
        if op.writes and self._is_refused(op, names[0]):
            return None
        values = [self.values[n] for n in names]
        text = op.text.format(*names, **op.draws(draw, *values))
        if op.writes:
            if op.transposes:
                self._views.add(names[0])
            return text if self._run(text) else None
        try:
            result = eval(text, self.space, self.values)
        except (RuntimeError, IndexError, ValueError):
            return None
        for place in op.spoils:
            torch.autograd.graph.increment_version(values[place])
        results = result if isinstance(result, (tuple, list)) else [result]
        if sum(r.numel() for r in results) > LARGEST or len(results) > 6:
            return None
        made = [self._name() for _ in results]
        self.values.update(zip(made, results, strict=True))
        for name in made:
            self._note_view(op, name, names)
        return f"{', '.join(made)}{',' if isinstance(result, (tuple, list)) else ''} = {text}"

    def _is_refused(self, op: Operator, name: str) -> bool:
        """PyTorch traces no write through ``as_strided`` of a view."""
        return name in self._windows or (op.strides and name in self._views)

    def _note_view(self, op: Operator, name: str, of: Sequence[str]) -> None:
        memory = self.values[name].untyped_storage()._cdata
        shared = {k for k in of if self.values[k].untyped_storage()._cdata == memory}
        if shared:
            self._views.add(name)
        if shared & self._windows or (op.strides and shared & self._views):
            self._windows.add(name)

    def _run(self, text: str) -> bool:
        try:
            exec(text, self.space, self.values)
        except (RuntimeError, IndexError, ValueError):
            return False
        return True

    def _differentiable(self) -> bool:
        """Whether backward still finds what it saved."""
        ends = [v for v in self.values.values() if v.requires_grad]
        try:
            torch.autograd.grad(
                ends,
                self.weights,
                [torch.ones_like(v) for v in ends],
                retain_graph=True,
                allow_unused=True,
            )
        except RuntimeError:
            return False
        return True


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None
