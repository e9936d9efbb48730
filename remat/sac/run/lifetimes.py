"""When the memory of one training step is made and freed, and which module was running meanwhile."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat import torch_compat
from remat.graph.storages import storage_of
from remat.running.measure import run_backward, run_forward
from remat.sac.run.fakes import left_as_found
from remat.sac.run.module_calls import ModuleCall, in_backward, watching
from remat.sac.run.operators import (
    allocated_bytes,
    is_skipped,
    plain_parts,
    tensors_in,
    written,
)


@dataclass(slots=True, kw_only=True)
class Span:
    """One call of a module, on the clock of the step.

    Attributes:
        name: the module's, under the class of the outermost one.
        parent: the call it was made in, by position; -1 for the outermost.
        is_leaf: whether the module has no children.
        begin: first moment of its forward.
        end: first moment after its forward.
        back_begin: when backward first asks for a tensor that was saved in it; -1 if it never does.
        back_end: when backward last does.
        last_saved: when the last tensor was saved in it: running again stops there.
        inputs: memories that it was given.
        outputs: memories behind what it returned.
        ops: moment and name of each of its operators, children's included; those that
            checkpointing passes over are left out.
    """

    name: str
    parent: int
    is_leaf: bool
    begin: int
    end: int = -1
    back_begin: int = -1
    back_end: int = -1
    last_saved: int = -1
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    ops: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifetimes:
    """One training step: each memory with its size and its life, and all calls of modules.

    A moment is the return of an operator, or the first time that backward asks for what was saved
    in a module. A memory is alive at moment ``t`` if ``born <= t < died``.

    Attributes:
        moments: how many there are.
        born: by memory; -1 if it was there before.
        died: by memory; ``moments`` if it was there at the end.
        nbytes: by memory.
        resident: memories of parameters.
        gradients: memories of their gradients.
        spans: calls of modules in the order in which they began.
        forward_end: the first moment of backward.
        written: memory to the last moment at which an operator wrote to it.
    """

    moments: int
    born: list[int]
    died: list[int]
    nbytes: list[int]
    resident: frozenset[int]
    gradients: frozenset[int]
    spans: tuple[Span, ...]
    forward_end: int
    written: dict[int, int]


def record_step(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Lifetimes:
    """Runs forward and backward of one step and writes down the life of every memory.

    A loss that is called ``loss`` is what backward starts from, and everything else that forward
    returned stays alive; without one, it starts from all outputs (see `loss_only`).

    Raises:
        CaptureError: no output requires a gradient.
    """
    named = dict(kwargs or {})
    given = given_tensors(model, args, named)
    with left_as_found(given):
        recorder = _Recorder(given)
        with recorder.recording(model):
            result = run_forward(loss_only(model), args, named)
            forward_end = recorder.now
        with recorder:
            run_backward(result)
        return recorder.found(list(model.parameters()), forward_end)


def given_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that are there before a step: parameters, buffers and inputs."""
    return [*model.parameters(), *model.buffers(), *tensors_in((tuple(args), kwargs))]


def loss_only(model: Callable[..., Any]) -> Callable[..., Any]:
    """The same model; where its output has a ``loss``, nothing else of it requires a gradient."""

    def step(*args: Any, **kwargs: Any) -> Any:
        out = model(*args, **kwargs)
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return out
        return loss, [t.detach() for t in tensors_in(out)]

    return step


class _Recorder(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The clock, the memories, and the calls of modules."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.spans: list[Span] = []
        self.born: list[int] = []
        self.died: list[int] = []
        self.nbytes: list[int] = []
        self.written: dict[int, int] = {}
        self._alive: dict[int, int] = {}
        self._inside: list[int] = []
        for tensor in given:
            self._add(tensor, -1)

    @contextlib.contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Forward: modules are watched, and what autograd saves is known by its module."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with watching(self, model), hooks, self:
            yield

    def found(self, parameters: Sequence[nn.Parameter], forward_end: int) -> Lifetimes:
        grads = [p.grad for p in parameters if p.grad is not None]
        return Lifetimes(
            moments=self.now,
            born=self.born,
            died=[self.now if d < 0 else d for d in self.died],
            nbytes=self.nbytes,
            resident=self._of(parameters),
            gradients=self._of(grads),
            spans=tuple(self.spans),
            forward_end=forward_end,
            written=self.written,
        )

    def begin(self, call: ModuleCall) -> None:
        span = Span(
            name=call.name,
            parent=self._inside[-1] if self._inside else -1,
            is_leaf=call.is_leaf,
            begin=self.now,
            inputs=self._of(tensors_in((call.args, call.kwargs))),
        )
        self._inside.append(len(self.spans))
        self.spans.append(span)

    def end(self, call: ModuleCall, out: Any) -> None:
        span = self.spans[self._inside.pop()]
        span.end = self.now
        span.outputs = self._of(tensors_in(out))

    def _pack(self, x: torch.Tensor) -> tuple[int, torch.Tensor]:
        for k in self._inside:
            self.spans[k].last_saved = self.now
        return (self._inside[-1] if self._inside else -1), x

    def _unpack(self, packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        k, x = packed
        first = False
        while k >= 0:
            span = self.spans[k]
            if span.back_begin < 0:
                span.back_begin, first = self.now, True
            span.back_end = self.now
            k = span.parent
        self.now += first
        return x

    def _of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        keys = [torch_compat.storage_id(s) for t in tensors for s in _storages(t)]
        return frozenset(self._alive[k] for k in keys if k in self._alive)

    def _add(self, tensor: torch.Tensor, moment: int) -> None:
        for storage in _storages(tensor):
            key = torch_compat.storage_id(storage)
            if key not in self._alive:
                self._alive[key] = len(self.born)
                self.born.append(moment)
                self.died.append(-1)
                self.nbytes.append(allocated_bytes(storage.nbytes(), tensor.device))
                weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.died[self._alive.pop(key)] = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._add(tensor, self.now)
        if torch_compat.schema(func).is_mutable and not in_backward():
            self.written.update(
                dict.fromkeys(self._of(written(func, args, kwargs or {})), self.now)
            )
        if not is_skipped(func):
            for k in self._inside:
                self.spans[k].ops.append((self.now, str(func)))
        self.now += 1
        return out


def _storages(x: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor; of all in a tensor subclass."""
    for part in plain_parts(x):
        storage = storage_of(part)
        if storage is not None:
            yield storage
