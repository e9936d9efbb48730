"""Simulate the memory of a compiled step by running Inductor's code on fake tensors.

Inductor generates Python code that allocates buffers and calls kernels. The generated code shows every fusion, in-place
write, layout change and early free. This module runs the generated code on fake tensors, with kernels that do nothing.
Every storage is tracked from the statement that allocates it to the statement that drops its last reference.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import sympy
import torch
from torch import fx

from remat import torch_compat
from remat.graph.joint import outputs_of
from remat.graph.memory.liveness import Lifetime, StorageKind, Timeline, own_outputs
from remat.graph.memory.storages import expression_of, hint, planned_sizes
from remat.graph.text.sizes import Fakes, read_size, size_of, symbols_of, write_expression
from remat.running.measure import StorageWatch
from remat.running.workspace import in_proportion, may_allocate, workspace_bytes

#: Prefixes of calls in the generated code that run no kernel: they allocate, view or check memory.
_QUIET = ("empty_strided", "reinterpret_tensor", "assert_", "get_raw_stream")
#: Stands for the last program point of a storage that is alive at the end of the step.
_NEVER = sys.maxsize
#: Functions in the generated code that are not part of the step.
_BESIDE = ("get_args", "benchmark_compiled_module")


@dataclass(slots=True, kw_only=True)
class CompiledGraph:
    """The forward or backward graph of a step, with the code that Inductor generated for it.

    Attributes:
        given: pair (name, value) of each input; the value is a fake tensor, a number or a symbol.
        returned: name of each output's node; an empty text if the output is not a node.
        values: fake value of each output; None if the output is not a node.
        own: number of outputs that the user gets. In a forward graph, the outputs after these are
            saved for backward.
        code: the Python code that Inductor generated.
        constants: dict from a name in the code to the tensor that the code reads under this name.
        key: key of the compiled graph in Inductor's cache; None if the graph is not cached.
    """

    given: Sequence[tuple[str, Any]]
    returned: Sequence[str]
    values: Sequence[Any]
    own: int
    code: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        """Record the inputs and outputs of a graph before Inductor compiles it."""
        # The record has only names and fake values, no nodes, since Inductor changes the graph.
        names = [n.name for n in module.graph.find_nodes(op="placeholder")]
        outputs = outputs_of(module.graph)
        return cls(
            given=tuple(zip(names, inputs, strict=True)),
            returned=[v.name if isinstance(v, fx.Node) else "" for v in outputs],
            values=[v.meta.get("val") if isinstance(v, fx.Node) else None for v in outputs],
            own=own_outputs(module),
        )


def compiled_timeline(
    forward: CompiledGraph, backward: CompiledGraph | None = None, *, symbolic: bool = False
) -> Timeline:
    """Return the lifetimes of all storages of a compiled step, with one program point per kernel.

    Args:
        forward: the forward graph, whose outputs are those for the user, then the saved values.
        backward: the backward graph, whose inputs are the saved values and the tangents; None if the step is one graph.
        symbolic: whether to express bytes as functions of symbolic sizes, which makes the
            simulation slower.

    Raises:
        Exception: the generated code is of an unknown kind, or needs the value of a tensor.
    """
    sizes = _Sizes.of(forward, backward) if symbolic else None
    simulation = _Simulation(sizes)
    guards: Any = contextlib.nullcontext() if sizes is None else sizes.fakes.without_guards()
    plain = torch_compat.FakeTensorMode(allow_non_fake_inputs=True)
    with plain if sizes is None else sizes.fakes.mode, torch.no_grad(), guards:
        given = [simulation.given(name, like, StorageKind.INPUT) for name, like in forward.given]
        # The code empties its list of arguments. It gets a copy of ``given``, since inputs live until the step's end.
        outputs = simulation.run(forward, [*given])
        if sizes is not None:
            sizes.learn(forward.values, outputs, simulation.nbytes)
        if backward is None:
            simulation.mark(outputs, StorageKind.OUTPUT)
            return simulation.timeline()
        simulation.begin_backward()
        own = outputs[: forward.own]
        simulation.mark(own, StorageKind.OUTPUT)
        simulation.mark(outputs, StorageKind.SAVED, forward.returned)
        value_of = dict(zip(forward.returned, outputs, strict=True))
        arguments = [
            value_of[name]
            if name in value_of
            else simulation.given(name, like, StorageKind.TANGENT)
            for name, like in backward.given
        ]
        held = [
            x
            for x, (name, _) in zip(arguments, backward.given, strict=True)
            if name not in value_of
        ]
        if not torch_compat.holds_tangents():
            held = []
        # Without `del`, references in this function would keep all saved activations alive until backward ends.
        del outputs, value_of
        gradients = simulation.run(backward, arguments)
        simulation.mark(gradients, StorageKind.GRADIENT)
        timeline = simulation.timeline()
    del given, own, gradients, held
    return timeline


def held_bytes(timeline: Timeline) -> int:
    """Return the bytes saved for backward that are neither inputs nor outputs of the step."""
    return sum(x.nbytes for x in timeline.lifetimes if x.kind is StorageKind.SAVED)


def write_timeline(timeline: Timeline) -> str:
    """Serialise a timeline as JSON, to be stored beside a compiled step."""
    rows = [
        [x.node, x.nbytes, x.kind.value, x.first, x.last, x.saved_as, _text_of(x.size)]
        for x in timeline.lifetimes
    ]
    return json.dumps([timeline.program_points, timeline.boundary, rows])


def read_timeline(text: str) -> Timeline:
    """Parse a timeline from JSON text that `write_timeline` returned.

    Raises:
        ValueError: the text is not JSON of a timeline.
    """
    program_points, boundary, rows = json.loads(text)
    lifetimes = (
        Lifetime(
            node=node,
            nbytes=nbytes,
            kind=StorageKind(kind),
            source="",
            first=first,
            last=last,
            saved_as=saved_as,
            size=read_size(size) if size else None,
        )
        for node, nbytes, kind, first, last, saved_as, size in rows
    )
    return Timeline(
        program_points=tuple(program_points), boundary=boundary, lifetimes=tuple(lifetimes)
    )


def _text_of(size: Any) -> str:
    return "" if size is None else write_expression(size, set())


class _Sizes:
    """Translate between the symbolic sizes of a traced step and the symbolic sizes in its generated code."""

    def __init__(self, fakes: Fakes) -> None:
        self.fakes = fakes
        self._generated: dict[Any, Any] = {}  # from a symbol of the step to the size in the code
        self._learned: set[Any] = set()  # data-dependent symbols that the code of forward created

    @classmethod
    def of(cls, forward: CompiledGraph, backward: CompiledGraph | None) -> _Sizes:
        """Create the translation of sizes, for the symbols in the inputs of the forward and the backward graph."""
        graphs = filter(None, (forward, backward))
        sizes = [n for graph in graphs for _, v in graph.given for n in _numbers(v)]
        backed = [n for n in sizes if expression_of(n) is not None and n.node.has_hint()]
        symbols = {s for n in backed for s in expression_of(n).free_symbols}
        unbacked = [
            n for _, v in forward.given for n in _numbers(v) if expression_of(n) is not None
        ]
        if any(not n.node.has_hint() for n in unbacked):
            # The symbol of such a size could not be distinguished from symbols that the generated code creates.
            raise NotImplementedError("an input has sizes without a hint")
        at = planned_sizes()
        described = symbols_of(symbols, backed[0].node.shape_env if backed else None)
        return cls(Fakes([replace(s, hint=at.get(s.name, s.hint)) for s in described]))

    def learn(self, values: Sequence[Any], outputs: Sequence[Any], nbytes: Sequence[Any]) -> None:
        """Learn the names of symbolic sizes in the generated code from the sizes of forward's outputs."""
        for value, output in zip(values, outputs, strict=True):
            for size, generated in zip(_numbers(value), _numbers(output), strict=False):
                expression = expression_of(size)
                if expression is not None and expression.is_Symbol:
                    self._generated.setdefault(expression, size_of(generated))
        # In the generated code, data-dependent sizes such as those of ``nonzero`` have symbols of their own.
        sizes = [e for e in map(expression_of, nbytes) if e is not None]
        self._learned = {s for e in sizes for s in e.free_symbols} - {*self.fakes.symbols.values()}

    def at(self, size: Any) -> Any:
        """Translate a size of the traced step into the symbols of the generated code."""
        expression = expression_of(size)
        if expression is None:
            return size
        return self.fakes.size(size_of(expression.xreplace(self._generated)))

    def of_step(self, size: Any) -> Any:
        """Translate a size in the generated code into symbols of the traced step; None for a plain number."""
        expression = expression_of(size)
        if expression is None:
            return None
        own = {*self.fakes.symbols.values()}
        back = {s: symbol for symbol, s in self._generated.items() if s in self._learned}
        # A data-dependent size that forward does not return has no symbol in the step, so a new symbol is created.
        back |= {s: sympy.Symbol(f"{s.name}?", integer=True) for s in self._learned - back.keys()}
        # A data-dependent symbol that only the code of backward has stems from a recomputed operator. Forward's
        # data-dependent symbols bound it.
        again = expression.free_symbols - own - back.keys()
        back |= dict.fromkeys(again, sympy.Max(*back.values()) if back else sympy.Symbol("u?"))
        return expression.xreplace(back)


def _numbers(value: Any) -> tuple[Any, ...]:
    """Return sizes and strides of a tensor in one tuple, or any other value as a tuple of one item."""
    return (
        tuple(value.size()) + tuple(value.stride()) if isinstance(value, torch.Tensor) else (value,)
    )


class _Simulation(StorageWatch):  # type: ignore[no-untyped-call]
    """Run the generated code of forward and backward, and record when each storage is allocated and freed."""

    def __init__(self, sizes: _Sizes | None = None) -> None:
        super().__init__()
        self._sizes = sizes
        self._program_points: list[str] = []
        self._boundary = 1
        self._lives: list[Lifetime] = []

    def given(self, name: str, like: Any, kind: StorageKind) -> Any:
        """Allocate a simulated input of a graph, with the size, stride, dtype and device of ``like``."""
        number = hint if self._sizes is None else self._sizes.at
        if not isinstance(like, torch.Tensor):
            return number(like) if isinstance(like, torch.SymInt) else like
        size, stride = (tuple(map(number, numbers)) for numbers in (like.size(), like.stride()))
        tensor = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
        self.add(tensor, name)
        self.mark([tensor], kind)
        return tensor

    def run(self, graph: CompiledGraph, arguments: list[Any]) -> list[Any]:
        """Run the generated code of a graph, and return the graph's outputs."""
        call = _call_of(graph, self._program_points.append)
        with self:
            return list(call(arguments))

    @property
    def nbytes(self) -> list[Any]:
        """Bytes of each storage that the simulation has allocated so far, as numbers or symbolic sizes."""
        return [x.size for x in self._lives]

    def begin_backward(self) -> None:
        """Mark the end of forward; program points that are recorded later belong to backward."""
        # A forward without kernels still has one program point, as in `Timeline`.
        if not self._program_points:
            self._program_points.append("")
        self._boundary = len(self._program_points)

    def mark(self, values: Sequence[Any], kind: StorageKind, names: Sequence[str] = ()) -> None:
        """Set the kind of the storages of tensors; for saved values, also set the names under which they are saved."""
        for value, name in zip_longest(values, names, fillvalue=""):
            if isinstance(value, torch.Tensor):
                at = self._alive.get(torch_compat.storage_id(value.untyped_storage()))
                # Every storage is temporary when it is allocated; a kind that was set before stays.
                if at is not None and self._lives[at].kind is StorageKind.TEMPORARY:
                    self._lives[at] = replace(self._lives[at], kind=kind, saved_as=name)

    def timeline(self) -> Timeline:
        """Return the lifetimes of all storages that the simulation recorded."""
        if len(self._program_points) == self._boundary:
            self._program_points.append("")
        end = len(self._program_points) - 1
        lifetimes = [
            replace(
                x,
                first=min(x.first, end),
                last=min(x.last, end),
                size=None if self._sizes is None else self._sizes.of_step(x.size),
            )
            for x in self._lives
        ]
        return Timeline(
            program_points=tuple(self._program_points),
            boundary=self._boundary,
            lifetimes=tuple(sorted(lifetimes, key=lambda x: (x.first, x.last))),
        )

    def on_storage(self, state: int | None, nbytes: Any, source: str) -> int:
        if state is not None:
            return state
        self._append(source, nbytes, _NEVER)
        return len(self._lives) - 1

    def _append(self, node: str, nbytes: Any, last: int) -> None:
        """Record the lifetime of a storage that is allocated at the current program point."""
        life = Lifetime(
            node=node,
            nbytes=hint(nbytes),
            kind=StorageKind.TEMPORARY,
            source="",
            first=len(self._program_points),
            last=last,
            size=nbytes,
        )
        self._lives.append(life)

    def on_free(self, state: int) -> None:
        life = self._lives[state]
        # A storage that is freed before any kernel runs is still alive at one program point.
        self._lives[state] = replace(life, last=max(life.first, len(self._program_points) - 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, torch.SymInt):
            # A size that is read from a tensor's data, hence not negative.
            torch._check(out >= 0)  # type: ignore[no-untyped-call]
        workspace = workspace_bytes(func, args, kwargs or {}, out)
        if workspace:
            nbytes = in_proportion(workspace, (args, kwargs, out))
            name = f"workspace of {func}"
            self._append(name, nbytes, len(self._program_points))
        return out


def _call_of(
    graph: CompiledGraph, ran: Callable[[str], None]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that runs the generated code of a graph without its kernels."""
    if not graph.code or "CppWrapper" in graph.code:
        raise NotImplementedError("the wrapper is not written in Python")
    code = ast.parse(graph.code)
    body = [new for statement in code.body if (new := _without_kernels(statement)) is not None]
    code.body = [
        _Ticking().visit(s) if isinstance(s, (ast.ClassDef, ast.FunctionDef)) else s for s in body
    ]
    namespace: dict[str, Any] = {**graph.constants, "__ran__": ran, "__kernel__": _Kernel()}
    exec(compile(ast.fix_missing_locations(code), "<compiled graph>", "exec"), namespace)
    for name in list(namespace):
        if name.startswith("empty_strided_"):
            namespace[name] = partial(_empty, name.split("_")[2])
        elif name.startswith("assert_"):
            namespace[name] = _Kernel()
    namespace |= {"reinterpret_tensor": _reinterpreted, "extern_kernels": _Extern()}
    return namespace["call"]  # type: ignore[no-any-return]


def _without_kernels(statement: ast.stmt) -> ast.stmt | None:
    """Rewrite a statement of the code that Inductor generated, so that no kernel is compiled or loaded."""
    if isinstance(statement, ast.If):  # ``if __name__ == "__main__"``
        return None
    if isinstance(statement, ast.FunctionDef) and statement.name in _BESIDE:
        return None
    if any(isinstance(x, ast.Name) and x.id == "async_compile" for x in ast.walk(statement)):
        value = statement.value if isinstance(statement, ast.Assign) else None
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return None
        statement.value = ast.Name("__kernel__", ast.Load())  # type: ignore[attr-defined]
    return statement


class _Ticking(ast.NodeTransformer):
    """Insert a call of the callback ``__ran__`` after every statement that runs a kernel."""

    def visit_Expr(self, node: ast.Expr) -> Any:
        return self._ticked(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        return self._ticked(node)

    def _ticked(self, statement: ast.Expr | ast.Assign) -> Any:
        value = statement.value
        if not isinstance(value, ast.Call):
            return statement
        name = ast.unparse(value.func)
        if name.startswith("torch.cuda."):  # removed, because the call would need a GPU
            return None
        if name.startswith(_QUIET) or name == "args.clear":
            return statement
        label = name.removesuffix(".run").removesuffix(".default")
        tick = ast.Expr(
            ast.Call(ast.Name("__ran__", ast.Load()), [ast.Constant(label)], keywords=[])
        )
        return [statement, tick]

    def visit_If(self, node: ast.If) -> Any:
        """Remove checks of tensor values from the generated code, because fake tensors have no values."""
        return None if all(isinstance(s, ast.Raise) for s in node.body) else node

    def visit_With(self, node: ast.With) -> Any:
        """Replace a ``with`` block that selects a device by the block's body, so that no device is needed."""
        self.generic_visit(node)
        return node.body


class _Kernel:
    """Replacement for a compiled kernel in the simulation; running the replacement does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    run = __call__


def _empty(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Allocate an empty tensor on a device, as Inductor's ``empty_strided_<device>`` does."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpreted(value: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return torch.as_strided(value, size, stride, value.storage_offset() + offset)


class _Extern:
    """Give the generated code PyTorch operators in place of Inductor's extern kernels."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return getattr(torch, name)(*args, **kwargs)
            op = getattr(torch, name, None)
            # The result is already allocated, so the operator runs only if it may allocate a workspace.
            if op is not None and may_allocate(f"aten.{name}.out", out.dtype):
                op(*args, **kwargs, out=out)
            return out

        return call
