"""Inductor's kernels on a CPU: built while backward is lowered, and without two faults of PyTorch's."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import torch

from remat import torch_compat


@contextlib.contextmanager
def kernels_at_end(inputs: Iterable[Any]) -> Iterator[None]:
    """Builds kernels while other graphs are traced, planned and lowered, and waits for them at the end.

    Inductor gives kernels to workers when the code of a graph is loaded, and waits for them there. What is
    compiled in here within `run_at_end` can be run when this ends, and not before. Which vector instructions the machine has,
    which the first kernel needs to know, is tried in a thread from the beginning on. On a GPU, where
    it is untried, nothing changes.

    Args:
        inputs: what is compiled for.

    Raises:
        Exception: what Inductor raises of a kernel that cannot be built.
    """
    compiling: Any = torch_compat.AsyncCompile
    if any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in inputs):
        yield
        return
    loaded: list[tuple[Any, dict[str, Any]]] = []
    outer = getattr(_WAITING, "loaded", None)

    def note(wait: Callable[..., Any], self: Any, scope: dict[str, Any]) -> None:
        if getattr(_WAITING, "notes", False):
            loaded.append((self, scope))
        else:
            wait(self, scope)

    with _for_thread(compiling, "wait").instead(note):
        _WAITING.loaded = loaded
        try:
            with _trying_vector_instructions():
                yield
        finally:
            _WAITING.loaded = outer
    for self, scope in loaded:
        if outer is None:
            compiling.wait(self, scope)
        else:
            outer.append((self, scope))


@contextlib.contextmanager
def run_at_end() -> Iterator[None]:
    """What is compiled in here is run when `kernels_at_end` ends; all else that compiles meanwhile may be run at once."""
    _WAITING.notes = True
    try:
        yield
    finally:
        _WAITING.notes = False


#: The kernels that a thread waits for later; other threads wait for theirs at once.
_WAITING = threading.local()


class _ForThread:
    """A method of PyTorch's that threads may replace for themselves, as long as any does."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._lock, self._inside = threading.Lock(), 0
        self._own = threading.local()

    @contextlib.contextmanager
    def instead(self, replacement: Callable[..., Any]) -> Iterator[None]:
        """Has this thread call another function, which is given the method before its arguments."""
        with self._lock:
            if not self._inside:
                self._theirs = theirs = getattr(self._owner, self._name)

                def call(*args: Any, **kwargs: Any) -> Any:
                    own = getattr(self._own, "called", None)
                    return theirs(*args, **kwargs) if own is None else own(theirs, *args, **kwargs)

                setattr(self._owner, self._name, call)
            self._inside += 1
        outer = getattr(self._own, "called", None)
        self._own.called = replacement
        try:
            yield
        finally:
            self._own.called = outer
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    setattr(self._owner, self._name, self._theirs)


_for_thread = functools.cache(_ForThread)


@contextlib.contextmanager
def sound_kernels() -> Iterator[None]:
    """Leaves out two faults of Inductor's kernels on a CPU, which PyTorch 2.13 to 2.15 have.

    Where a kernel is tiled in two axes, the second of which is summed over, they look at the loop behind the
    first axis to see whether the end of that axis needs a shorter write. If a third loop stands between both, the
    write is a whole vector: next to the end of a row, or of the buffer (pytorch/pytorch issue 196681). Such kernels are
    tiled in the first axis alone in here.

    A kernel that reads a buffer which an operator has written to (a scatter) waits for that operator. Where its loops are
    formed anew to fit those of another kernel, that is forgotten, and whatever moves kernels afterwards may move it ahead
    (Inductor's ``SchedulerNode.recompute_size_and_body``).
    """

    def select(theirs: Callable[..., Any], self: Any, functions: Any, sizes: Any) -> Any:
        factors, axes, stats = theirs(self, functions, sizes)
        loops = len(max(sizes, key=lambda pair: len(pair[1]))[0])  # those that are not summed over
        if len(axes) == 2 and axes[0] + 1 < loops <= axes[1]:
            return factors[:1], axes[:1], stats
        return factors, axes, stats

    def form(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    selecting: Any = torch_compat.TilingSelect
    forming: Any = torch_compat.SchedulerNode
    with (
        _for_thread(selecting, "select_tiling").instead(select),
        _for_thread(forming, "recompute_size_and_body").instead(form),
    ):
        yield


@contextlib.contextmanager
def _trying_vector_instructions() -> Iterator[None]:
    """Tries in a thread which vector instructions a compiler and this machine have, once in a process.

    Inductor builds and loads a small library for each kind, which takes seconds; whoever asks meanwhile waits.
    """
    module: Any = torch_compat.cpu_vec_isa
    found = module.valid_vec_isa_list
    if not hasattr(found, "cache_info") or found.cache_info().currsize:
        yield
        return
    with ThreadPoolExecutor(1) as aside:
        module.valid_vec_isa_list = aside.submit(copy_context().run, found).result
        try:
            yield
        finally:
            module.valid_vec_isa_list = found
