"""Record the operators, the module calls, and the lifetimes of storages in one training step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.memory.storages import hint, storage_of
from remat.running.measure import allocated_bytes
from remat.sac.run.module_calls import in_backward, watching
from remat.sac.run.operators import (
    is_skipped,
    storages,
    tensors_in,
    written_tensors,
)
from remat.torch_compat import pytree

#: Value of `StepRecorder.born` for a storage whose bytes are not counted. Such a storage existed before the step,
#: belongs to no tensor in `existing`, and was returned by no operator.
_UNCOUNTED = -2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One operator call in forward. The fields give each storage as an index into `StepRecorder.nbytes`.

    Attributes:
        node: the call as an FX node, for cost models.
        parts: nodes of the operators that really run: ``node`` alone, or the operators that a tensor
            subclass runs in its place.
        results: placeholder nodes for the tensors in the operator's result, which are arguments of
            the nodes of later calls.
        program_point: program point at which the operator returned.
        reads: storages of the operator's arguments.
        writes: storages that the operator writes to.
        returns: storages of the operator's results.
        allocated: (storage, bytes) of each storage that belongs to a result of the operator and to no argument.
        skipped: whether selective checkpointing ignores the operator.
        view: hashable key of the operator and of the results' storages and layouts, if all results are
            views of arguments; otherwise None.
    """

    node: fx.Node
    parts: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    program_point: int
    reads: frozenset[int]
    writes: tuple[int, ...]
    returns: tuple[int, ...]
    allocated: tuple[tuple[int, int], ...]
    skipped: bool
    view: Hashable | None


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleSpan:
    """One call of a module, with the program points at which it begins and ends.

    Attributes:
        name: name of the module, as described at `watching`.
        parent: position of the enclosing call in `StepRecorder.spans`; -1 for an outermost call.
        is_leaf: whether the module has no children.
        begin: first program point of the call's forward.
        end: first program point after the call's forward.
        first: position of the call's first operator in `StepRecorder.calls`.
        last: position in `StepRecorder.calls` after the call's last operator.
        back_begin: program point at which backward first reads a tensor saved in the call; -1 if never.
        back_end: program point at which backward last reads a tensor saved in the call; -1 if never.
        last_saved: program point at which the call saved its last tensor for backward; -1 if it saved none.
        inputs: storages of the call's arguments.
        outputs: storages of the call's result.
        returned: placeholder nodes of the tensors in the call's result; see `Call.results`.
        no_tensor: whether the call's arguments contain no tensor.
        failed: whether the call raised an exception.
    """

    name: str
    parent: int
    is_leaf: bool
    begin: int
    first: int
    end: int = -1
    last: int = -1
    back_begin: int = -1
    back_end: int = -1
    last_saved: int = -1
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    returned: frozenset[fx.Node] = frozenset()
    no_tensor: bool = False
    failed: bool = False


# The FX nodes of operators hold fake tensors, so the recorder extends no tensor's lifetime.
class StepRecorder(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the operators, storages and module calls of one step.

    The recorder measures time in program points. Each return of an operator is one program point. The first time
    that backward reads a tensor saved in a module call is a program point, too. A storage is alive at program point
    ``t`` if ``born <= t < died``. A storage's number is its index in ``born``, ``died`` and ``nbytes``.

    Args:
        existing: tensors that exist before the step.

    Attributes:
        now: number of the current program point.
        calls: operators of forward, in order, without operators that backward runs again.
        spans: module calls, in the order in which they begin.
        born: program point at which each storage is allocated; below 0 if it existed before the step.
        died: program point at which each storage is freed; -1 while it is alive.
        nbytes: bytes of each storage.
        saved: storages of the tensors that autograd saved for backward.
        last_write: dict from a storage to the last program point at which an operator of forward wrote to it.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.calls: list[Call] = []
        self.spans: list[ModuleSpan] = []
        self.born: list[int] = []
        self.died: list[int] = []
        self.nbytes: list[int] = []
        self.saved: set[int] = set()
        self.last_write: dict[int, int] = {}
        self._alive: dict[int, int] = {}
        self._inside: list[int] = []
        self._device: torch.device | None = None
        mode = torch_compat.active_fake_mode()
        self._nodes = _Nodes(mode or torch_compat.FakeTensorMode())
        self._converts = mode if mode is not None and mode.allow_non_fake_inputs else None
        self._converted: dict[int, torch.Tensor] = {}
        self._number(existing, born=-1)

    @contextlib.contextmanager
    def forward(self, *models: nn.Module) -> Iterator[None]:
        """Record the operators of the ``with`` block as the step's forward; `watching` explains ``models``."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with watching(self._begin, self._end, *models), hooks, self:
            yield

    def _begin(self, name: str, module: nn.Module) -> None:
        """Add a `ModuleSpan` for a module call that begins."""
        self.spans.append(
            ModuleSpan(
                name=name,
                parent=self._inside[-1] if self._inside else -1,
                is_leaf=next(module.children(), None) is None,
                begin=self.now,
                first=len(self.calls),
            )
        )
        self._inside.append(len(self.spans) - 1)

    def _end(self, inputs: Any, out: Any, failed: bool) -> None:
        """Set the fields of a module call's `ModuleSpan` that are known when the call ends."""
        span, given, returned = self.spans[self._inside.pop()], tensors_in(inputs), tensors_in(out)
        span.end, span.last, span.failed = self.now, len(self.calls), failed
        span.inputs, span.outputs = map(self.numbers_of, (given, returned))
        span.returned = frozenset(map(self._nodes.of, returned))
        span.no_tensor = not given

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """Return the numbers that this recorder gave to the storages of tensors; unnumbered storages are left out."""
        # Only tensors in `existing` and tensors that a recorded operator used have numbered storages.
        keys = (key for t in tensors for key, _ in storages(t))
        return frozenset(self._alive[key] for key in keys if key in self._alive)

    def _number(self, tensors: Iterable[torch.Tensor], born: int) -> tuple[int, ...]:
        """Return the numbers of tensors' storages; a new storage gets a number, and is allocated at ``born``."""
        numbers: dict[int, None] = {}
        for key, part in (s for t in tensors for s in storages(t)):
            number = self._alive.get(key)
            if number is None:
                number = self._alive[key] = len(self.born)
                self.born.append(_UNCOUNTED)
                self.died.append(-1)
                self.nbytes.append(0)
                # The storage is watched, not the tensor, because memory stays allocated as long as any view lives.
                weakref.finalize(storage_of(part) or part, self._freed, key).atexit = False
            if self.born[number] == _UNCOUNTED != born:
                self.born[number], self.nbytes[number] = born, _bytes(part)
            numbers[number] = None
        return tuple(numbers)

    def _freed(self, key: int) -> None:
        """Record that the storage with identity ``key`` has been freed; see `storages`."""
        self.died[self._alive.pop(key)] = self.now

    def _pack(self, x: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Record that autograd saves a tensor; return the innermost module call's position (or -1) and the tensor."""
        self.saved |= self.numbers_of([self._fake(x)])
        for position in self._inside:
            self.spans[position].last_saved = self.now
        return (self._inside[-1] if self._inside else -1), x

    def _unpack(self, packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        """Record that backward reads a saved tensor, given as the pair from `_pack`; return the tensor."""
        position, x = packed
        first = False
        while position >= 0:
            span = self.spans[position]
            if span.back_begin < 0:
                span.back_begin, first = self.now, True
            span.back_end = self.now
            position = span.parent
        # The read counts for the call that saved the tensor and for all enclosing calls, hence the loop above.
        # The first read takes a program point of its own, at which a checkpointed module would run again.
        self.now += first
        return x

    def _fake(self, x: torch.Tensor) -> torch.Tensor:
        """Return the fake copy of a real tensor, or the tensor itself if no active fake mode converts real tensors."""
        if self._converts is None or torch_compat.is_fake(x):
            return x
        fake = self._converts.from_tensor(x)
        # Keep the fake tensor alive, because the fake mode refers to it only weakly. Otherwise, the next call
        # with the same tensor would get another copy.
        return self._converted.setdefault(id(fake), fake)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, skipped, is_backward = kwargs or {}, is_skipped(func), in_backward()
        if self._converts is not None and not skipped and not is_backward:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        parts: list[fx.Node] | None = None
        if not is_backward and any(map(torch_compat.is_traceable_wrapper_subclass_type, types)):
            with _Parts(self._nodes) as inner:
                out = func(*args, **kwargs)
            parts = inner.nodes
        else:
            out = func(*args, **kwargs)
        results = tensors_in(out)
        if skipped and not results:
            return out  # a query of metadata takes no program point
        if is_backward:
            self._number(results, self.now)
        else:
            self._add(func, args, kwargs, out, results, parts)
        self.now += 1
        return out

    def _add(
        self,
        op: Any,
        args: Any,
        kwargs: dict[str, Any],
        out: Any,
        results: Sequence[torch.Tensor],
        parts: Sequence[fx.Node] | None,
    ) -> None:
        self._check_device(op, results)
        reads = frozenset(self._number(tensors_in((args, kwargs)), _UNCOUNTED))
        writes = self._number(written_tensors(op, args, kwargs), _UNCOUNTED)
        self.last_write.update(dict.fromkeys(writes, self.now))
        returns = self._number(results, self.now)
        node = self._nodes.call(op, args, kwargs, out)
        is_view = not writes and bool(returns) and reads.issuperset(returns)
        self.calls.append(
            Call(
                node=node,
                parts=(node,) if parts is None else tuple(parts),
                results=tuple(map(self._nodes.of, results)),
                program_point=self.now,
                reads=reads,
                writes=writes,
                returns=returns,
                allocated=tuple((k, self.nbytes[k]) for k in returns if k not in reads),
                skipped=is_skipped(op),
                view=(str(op), returns, tuple(map(_layout_key, results))) if is_view else None,
            )
        )

    def _check_device(self, op: Any, results: Sequence[torch.Tensor]) -> None:
        """Raise a ProblemError if an operator's result is on another device than earlier results."""
        for result in results:
            if result.dim() == 0 and result.device.type == "cpu":
                continue  # scalars on the CPU accompany every device
            if self._device is None:
                self._device = result.device
            elif result.device != self._device:
                where = "outside of all modules"
                if self._inside:
                    where = f"module '{self.spans[self._inside[-1]].name}'"
                raise ProblemError(
                    f"{where}: {op} makes a tensor on {result.device}, and those before it are on "
                    f"{self._device}; expected a model on one device: estimate each part by itself"
                )


class _Parts(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that collects the operators that tensor subclasses run on inner tensors."""

    def __init__(self, nodes: _Nodes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[fx.Node] = []
        self._nodes = nodes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(torch_compat.is_traceable_wrapper_subclass_type, types)):
            # The subclass then runs its inner operators, for which PyTorch calls this method again.
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_skipped(func):
            self.nodes.append(self._nodes.call(func, args, kwargs, out))
        return out


class _Nodes:
    """Converts operator calls to FX nodes, whose arguments are placeholder nodes with fake values."""

    def __init__(self, mode: torch_compat.FakeTensorMode) -> None:
        self._graph = fx.Graph()
        self._mode = mode
        self._of = WeakIdKeyDictionary()
        self._values: dict[Hashable, torch.Tensor] = {}

    def call(self, op: Any, args: Any, kwargs: Any, out: Any) -> fx.Node:
        """Return an FX node for a call of an operator, with a fake value of the result as metadata."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.of, (tuple(args), kwargs))
        node = self._graph.call_function(op, args, kwargs)
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, self._value, out)
        return node

    def of(self, x: torch.Tensor) -> fx.Node:
        """Return the placeholder node that stands for a tensor in arguments; each tensor has one such node."""
        node: fx.Node | None = self._of.get(x)  # type: ignore[no-untyped-call]
        if node is None:
            node = self._of[x] = self._graph.placeholder("x")
            node.meta["val"] = self._fake_of(x)
        return node

    def _value(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.of(x).meta["val"]
        return value

    def _fake_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor that stands for all tensors with the size, strides, dtype and device of ``x``."""
        if x.layout is not torch.strided or x.is_quantized:
            return x  # `empty_strided` cannot make such tensors
        kind = (str(x.size()), str(x.stride()), x.dtype, x.device)
        if kind not in self._values:
            with torch_compat.disable_current_modes(), self._mode:
                self._values[kind] = torch.empty_strided(
                    x.size(), x.stride(), dtype=x.dtype, device=x.device
                )
        return self._values[kind]


def _bytes(x: torch.Tensor) -> int:
    """Return the allocated bytes of the storage behind a plain tensor; 0 if it has no storage."""
    storage = storage_of(x)
    return 0 if storage is None else allocated_bytes(hint(storage.nbytes()), x.device)


def _layout_key(x: torch.Tensor) -> Hashable:
    """Return a hashable key of a tensor's size, strides, and offset within the tensor's storage."""
    return str(x.size()), str(x.stride()), str(x.storage_offset())


def without_replays(calls: Sequence[Call], returned: Iterable[fx.Node]) -> list[Call]:
    """Return a copy of a list of operator calls, with replays of views marked as skipped.

    A replay repeats an earlier view after a write to the viewed memory. The result of a replay is read by replays only.

    Args:
        calls: operators that ran, in order.
        returned: placeholder nodes of the tensors that modules return, which count as used.
    """
    # After an in-place write, autograd gives each view of the written tensor a new node in the backward graph.
    # For plain tensors, no operator runs. For subclasses, such as fake tensors, autograd runs the view's operators
    # again and drops the result. If the model's real tensors are plain, a real step has no replays.
    suspects = _repeated_views(calls)
    used = set(returned)
    marked = list(calls)
    # The loop starts at the last call, because only later replays use a replay, and later replays must be found first.
    for i, call in reversed(list(enumerate(calls))):
        if i in suspects and used.isdisjoint(call.results):
            marked[i] = replace(call, skipped=True)
        else:
            used.update(call.node.all_input_nodes)
    return marked


def _repeated_views(calls: Sequence[Call]) -> set[int]:
    """Return the positions of operator calls that repeat an earlier view after a write to the viewed memory."""
    first: dict[Hashable, int] = {}
    last_write: dict[int, int] = {}
    repeated: set[int] = set()
    for i, call in enumerate(calls):
        last_write.update(dict.fromkeys(call.writes, i))
        if call.view is None or call.parts != (call.node,):
            continue
        since = first.setdefault(call.view, i)
        if any(last_write.get(key, -1) > since for key in call.returns):
            repeated.add(i)
    return repeated
