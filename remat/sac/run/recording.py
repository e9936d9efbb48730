"""One recording of a step: operators, the life of every storage, and the calls of modules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.storages import hint, storage_of
from remat.sac.run.fakes import check_fake
from remat.sac.run.module_calls import ModuleCall, in_backward, watching
from remat.sac.run.operators import allocated_bytes, is_skipped, storages, tensors_in, written
from remat.torch_compat import pytree

#: When a storage was made that was there before and that nothing counts: no operator returned it.
_UNCOUNTED = -2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One operator that ran in forward. Storages are numbers: positions in the lists of `StepRecorder`.

    Attributes:
        op: the operator.
        node: the call as a node, for cost models.
        parts: what really runs: the call itself, or what the tensor subclasses it is given do.
        results: what stands for the tensors of its result in the arguments of later nodes.
        moment: when it returned.
        reads: storages of its arguments.
        writes: those that it writes to.
        returns: storages of its results.
        made: storages that it allocates, with their bytes.
        skipped: whether checkpointing passes over it.
        view: for what returns nothing but views of its arguments, what they show of which storage; else None.
        is_random: whether it draws random numbers.
        is_opaque: whether it is not known to be a function of its inputs, and may draw too.
    """

    op: Any
    node: fx.Node
    parts: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    moment: int
    reads: frozenset[int]
    writes: tuple[int, ...]
    returns: tuple[int, ...]
    made: tuple[tuple[int, int], ...]
    skipped: bool
    view: Hashable | None
    is_random: bool
    is_opaque: bool

    @property
    def name(self) -> str:
        """As in ``aten.mm.default``."""
        return str(self.op)


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleSpan:
    """One call of a module, on the clock of the step.

    Attributes:
        name: the module's, under the class of the outermost one.
        parent: the call it was made in, by position; -1 for the outermost.
        is_leaf: whether the module has no children.
        begin: first moment of its forward.
        end: first moment after its forward.
        first: position of its first operator.
        last: position after its last operator.
        back_begin: when backward first asks for a tensor that was saved in it; -1 if it never does.
        back_end: when backward last does.
        last_saved: when the last tensor was saved in it: running again stops there.
        inputs: storages that it was given.
        outputs: storages behind what it returned.
        returned: what stands for the tensors that it returned in the arguments of nodes.
        no_tensor: whether it was given no tensor.
        failed: whether it ended in an exception.
    """

    name: str
    parent: int
    is_leaf: bool
    begin: int
    first: int
    inputs: frozenset[int]
    end: int = -1
    last: int = -1
    back_begin: int = -1
    back_end: int = -1
    last_saved: int = -1
    outputs: frozenset[int] = frozenset()
    returned: frozenset[fx.Node] = frozenset()
    no_tensor: bool = False
    failed: bool = False


class StepRecorder(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs. It keeps no tensor alive: fake ones stand for them in the nodes of calls.

    A moment is the return of an operator, or the first time that backward asks for what was saved in a
    module. A storage is alive at moment ``t`` if ``born <= t < died``.

    Args:
        given: tensors that are there before.
        concluded: is called at the end of each outermost module that did not fail, with this and the
            position of its span.

    Attributes:
        now: the current moment.
        calls: the operators of forward, in order; those that backward runs again are left out.
        spans: calls of modules in the order in which they began.
        born: by storage; below 0 if it was there before.
        died: by storage; -1 as long as it lives.
        nbytes: by storage.
        saved: storages that autograd kept.
        written: storage to the last moment at which an operator of forward wrote to it.
    """

    def __init__(
        self,
        given: Iterable[torch.Tensor] = (),
        concluded: Callable[[StepRecorder, int], None] = lambda recorder, position: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.calls: list[Call] = []
        self.spans: list[ModuleSpan] = []
        self.born: list[int] = []
        self.died: list[int] = []
        self.nbytes: list[int] = []
        self.saved: set[int] = set()
        self.written: dict[int, int] = {}
        self._concluded = concluded
        self._alive: dict[int, int] = {}
        self._inside: list[int] = []
        self._device: torch.device | None = None
        mode = torch_compat.active_fake_mode()
        self._nodes = _Nodes(mode or torch_compat.FakeTensorMode())
        self._converts = mode if mode is not None and mode.allow_non_fake_inputs else None
        self._converted: dict[int, torch.Tensor] = {}
        self._number(given, born=-1)

    @contextlib.contextmanager
    def forward(self, *models: nn.Module) -> Iterator[None]:
        """Records what runs forward, all modules included; see `watching` for those that are named."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with watching(self, *models), hooks, self:
            yield

    def begin(self, call: ModuleCall) -> None:
        """A module begins (see `remat.sac.run.module_calls.Watcher`)."""
        if not self._inside:
            check_fake(call.name, call.module)
        self.spans.append(
            ModuleSpan(
                name=call.name,
                parent=self._inside[-1] if self._inside else -1,
                is_leaf=call.is_leaf,
                begin=self.now,
                first=len(self.calls),
                inputs=self.known(tensors_in((call.args, call.kwargs))),
            )
        )
        self._inside.append(len(self.spans) - 1)

    def end(self, call: ModuleCall, out: Any) -> None:
        """A module ends."""
        position, returned = self._inside.pop(), tensors_in(out)
        span = self.spans[position]
        span.end, span.last, span.failed = self.now, len(self.calls), call.failed
        span.outputs = self.known(returned)
        span.returned = frozenset(map(self._nodes.of, returned))
        span.no_tensor = not tensors_in((call.args, call.kwargs))
        if not self._inside and not call.failed:
            self._concluded(self, position)

    def known(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """Storages behind tensors, as far as an operator has met them or they were given."""
        keys = (key for t in tensors for key, _ in storages(t))
        return frozenset(self._alive[key] for key in keys if key in self._alive)

    def _number(self, tensors: Iterable[torch.Tensor], born: int) -> tuple[int, ...]:
        """Storages behind tensors, each once; those not met before, or not counted, are born."""
        found: dict[int, None] = {}
        for key, part in (s for t in tensors for s in storages(t)):
            number = self._alive.get(key)
            if number is None:
                number = self._alive[key] = len(self.born)
                self.born.append(_UNCOUNTED)
                self.died.append(-1)
                self.nbytes.append(0)
                weakref.finalize(storage_of(part) or part, self._freed, key).atexit = False
            if self.born[number] == _UNCOUNTED != born:
                self.born[number], self.nbytes[number] = born, _bytes(part)
            found[number] = None
        return tuple(found)

    def _freed(self, key: int) -> None:
        self.died[self._alive.pop(key)] = self.now

    def _pack(self, x: torch.Tensor) -> tuple[int, torch.Tensor]:
        self.saved |= self.known([self._fake(x)])
        for position in self._inside:
            self.spans[position].last_saved = self.now
        return (self._inside[-1] if self._inside else -1), x

    def _unpack(self, packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        position, x = packed
        first = False
        while position >= 0:
            span = self.spans[position]
            if span.back_begin < 0:
                span.back_begin, first = self.now, True
            span.back_end = self.now
            position = span.parent
        self.now += first
        return x

    def _fake(self, x: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor in a fake mode that takes real ones; the same every time."""
        if self._converts is None or torch_compat.is_fake(x):
            return x
        fake = self._converts.from_tensor(x)
        return self._converted.setdefault(id(fake), fake)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, skipped, again = kwargs or {}, is_skipped(func), in_backward()
        if self._converts is not None and not skipped and not again:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        parts: list[fx.Node] | None = None
        if not again and any(map(torch_compat.is_traceable_wrapper_subclass_type, types)):
            with _Parts(self._nodes) as inner:
                out = func(*args, **kwargs)
            parts = inner.found
        else:
            out = func(*args, **kwargs)
        results = tensors_in(out)
        if skipped and not results:
            return out  # a question about metadata
        if again:
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
        writes = self._number(written(op, args, kwargs), _UNCOUNTED)
        self.written.update(dict.fromkeys(writes, self.now))
        returns = self._number(results, self.now)
        node = self._nodes.call(op, args, kwargs, out)
        is_view = not writes and bool(returns) and reads.issuperset(returns)
        self.calls.append(
            Call(
                op=op,
                node=node,
                parts=(node,) if parts is None else tuple(parts),
                results=tuple(map(self._nodes.of, results)),
                moment=self.now,
                reads=reads,
                writes=writes,
                returns=returns,
                made=tuple((k, self.nbytes[k]) for k in returns if k not in reads),
                skipped=is_skipped(op),
                view=(str(op), returns, tuple(map(_shown, results))) if is_view else None,
                is_random=ops.is_random(node),
                is_opaque=ops.is_opaque(node),
            )
        )

    def _check_device(self, op: Any, results: Sequence[torch.Tensor]) -> None:
        for result in results:
            if result.dim() == 0 and result.device.type == "cpu":
                continue  # a number that comes along
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
    """What tensor subclasses do when they are given an operator."""

    def __init__(self, nodes: _Nodes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[fx.Node] = []
        self._nodes = nodes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(torch_compat.is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_skipped(func):
            self.found.append(self._nodes.call(func, args, kwargs, out))
        return out


class _Nodes:
    """Calls as nodes of a graph. Nothing in it is connected: tensors are placeholders, with fake values."""

    def __init__(self, mode: torch_compat.FakeTensorMode) -> None:
        self._graph = fx.Graph()
        self._mode = mode
        self._of = WeakIdKeyDictionary()
        self._values: dict[Hashable, torch.Tensor] = {}

    def call(self, op: Any, args: Any, kwargs: Any, out: Any) -> fx.Node:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.of, (tuple(args), kwargs))
        node = self._graph.call_function(op, args, kwargs)
        if isinstance(out, torch.Tensor):  # most do; a tree takes longer
            node.meta["val"] = self._value(out)
        else:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, self._value, out)
        return node

    def of(self, x: torch.Tensor) -> fx.Node:
        """The placeholder of a tensor."""
        known: fx.Node | None = self._of.get(x)  # type: ignore[no-untyped-call]
        if known is None:
            known = self._of[x] = self._graph.placeholder("x")
            known.meta["val"] = self._made(x)
        return known

    def _value(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.of(x).meta["val"]
        return value

    def _made(self, x: torch.Tensor) -> torch.Tensor:
        """A fake tensor that looks like this one, one for all that look alike."""
        if x.layout is not torch.strided or x.is_quantized:
            return x
        kind = (str(x.size()), str(x.stride()), x.dtype, x.device)
        if kind not in self._values:
            with torch_compat.disable_current_modes(), self._mode:
                self._values[kind] = torch.empty_strided(
                    x.size(), x.stride(), dtype=x.dtype, device=x.device
                )
        return self._values[kind]


def _bytes(x: torch.Tensor) -> int:
    """Bytes of the storage behind a plain tensor; without one, none are counted."""
    storage = storage_of(x)
    return 0 if storage is None else allocated_bytes(hint(storage.nbytes()), x.device)


def _shown(x: torch.Tensor) -> Hashable:
    """What a tensor shows of its storage."""
    return str(x.size()), str(x.stride()), str(x.storage_offset())


def without_replays(calls: Sequence[Call], returned: Iterable[fx.Node]) -> list[Call]:
    """The same calls, with those that fake tensors alone take marked as skipped.

    After a write to its memory, autograd makes a view again, for its place in the graph of the
    gradient. For plain tensors it works that out without running anything; for tensor subclasses, and
    fake tensors are one, it runs the view's operators on the new base and drops the result. Where the
    model's own tensors are plain, no policy is ever asked about these, so they may not be counted.
    Such a call makes a view that was there before, of memory that was written since, and nobody
    uses it.

    Args:
        calls: what ran, in order.
        returned: what stands for the tensors that modules returned.
    """
    suspects = _made_again(calls)
    used = set(returned)
    found = list(calls)
    for i, call in reversed(list(enumerate(calls))):
        if i in suspects and used.isdisjoint(call.results):
            found[i] = replace(call, skipped=True)
        else:
            used.update(call.node.all_input_nodes)
    return found


def _made_again(calls: Sequence[Call]) -> set[int]:
    """Calls that make a view of written memory as an earlier call did before that was written."""
    first: dict[Hashable, int] = {}
    written: dict[int, int] = {}
    again: set[int] = set()
    for i, call in enumerate(calls):
        written.update(dict.fromkeys(call.writes, i))
        if call.view is None or call.parts != (call.node,):
            continue
        since = first.setdefault(call.view, i)
        if any(written.get(key, -1) > since for key in call.returns):
            again.add(i)
    return again
