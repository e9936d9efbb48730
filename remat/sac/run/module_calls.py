"""Being told when the forward of a module begins and ends, and what the module is called.

This is also the one place that puts another ``forward`` on a module.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

from remat import torch_compat

Forward = Callable[..., Any]


def own_forward(module: nn.Module) -> Forward | None:
    """The ``forward`` that was put on a module itself; None where it has that of its class."""
    found: Forward | None = module.__dict__.get("forward")
    return found


def set_forward(module: nn.Module, forward: Forward | None) -> Callable[[], None]:
    """Puts a ``forward`` on a module itself; None gives it back that of its class.

    Returns:
        What puts back the one from before, unless it is somebody else's by then.
    """
    before = own_forward(module)

    def undo() -> None:
        if own_forward(module) is forward:
            set_forward(module, before)

    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
    return undo


def in_backward() -> bool:
    """Whether it is backward that runs what runs now: a checkpointed module, once more."""
    return int(torch_compat.current_graph_task_id()) != -1


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One call of a module's ``forward``.

    Attributes:
        name: what the module is called; see `watching`.
        module: the module.
        args: positional arguments.
        kwargs: keyword arguments; of the first call of a module that nobody named before, they are
            there when it ends.
        failed: whether it ended in an exception.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    @property
    def is_leaf(self) -> bool:
        """Whether the module has no children."""
        return next(self.module.children(), None) is None


class Watcher(Protocol):
    """Who is told about calls, the inner ones between begin and end of the outer one."""

    def begin(self, call: ModuleCall) -> None:
        """A call begins."""

    def end(self, call: ModuleCall, out: Any) -> None:
        """It ended, and returned this; None if it failed."""


@contextlib.contextmanager
def watching(watcher: Watcher, *models: nn.Module) -> Iterator[None]:
    """Tells a watcher of every module that runs forward in this thread within the ``with`` block.

    A module is called after its place below the first module that was called: ``Model.layers.0``, as
    PyTorch's tools do; the second module of one class that is called by itself gets a number. What
    forward hooks do is outside of ``forward``, as it is for checkpointing. Modules that run again in
    backward are not told of.

    Each module's ``forward`` is replaced on the instance, and passes other threads by. A module that
    is in none of the models is met in PyTorch's global pre-hooks when it is first called; what its own
    pre-hooks do belongs to that first call.
    """
    watch = _Watch(watcher)
    try:
        for model in models:
            watch.adopt(model)
        handle = hooks.register_module_forward_pre_hook(watch.met)
        try:
            yield
        finally:
            handle.remove()
    finally:
        watch.release()


class _Watch:
    """The modules that are watched."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._thread: int | None = threading.get_ident()
        self._roots: dict[str, nn.Module] = {}
        self._known: dict[int, nn.Module] = {}  # keeps them alive: identities stay theirs
        self._undo: list[Callable[[], None]] = []
        # Modules in their first call, which hooks tell of, and how deep in it they call themselves.
        self._depth: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []

    def adopt(self, module: nn.Module) -> str:
        """Watches a module, and all below it, from its next call on; returns its name."""
        name = self._place(module)
        if name is None:
            name = kind = type(module).__name__
            number = 0
            while name in self._roots:
                number += 1
                name = f"{kind}_{number}"
            self._roots[name] = module
        for path, part in module.named_modules(prefix=name):
            if id(part) not in self._known:
                self._known[id(part)] = part
                self._wrap(path, part)
        return name

    def release(self) -> None:
        """Leaves every module as it was."""
        self._thread = None
        for handle in self._handles:
            handle.remove()
        for undo in reversed(self._undo):
            undo()

    def met(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called, any module: one that is not known is watched from here on."""
        if not self._sees():
            return
        key = id(module)
        if key in self._depth:
            self._depth[key] += 1
        elif key not in self._known:
            name = self.adopt(module)
            if not isinstance(module, torch.jit.ScriptModule):
                self._first_call(ModuleCall(name=name, module=module, args=args))

    def _first_call(self, call: ModuleCall) -> None:
        """Tells of a call whose ``forward`` PyTorch has looked up already."""
        module, handled = call.module, sys.exception()

        def ended(_: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            if not self._sees() or id(module) not in self._depth:
                return
            self._depth[id(module)] -= 1
            if self._depth[id(module)] == 0:
                del self._depth[id(module)]
                call.kwargs, call.failed = kwargs, sys.exception() is not handled
                self._watcher.end(call, None if call.failed else out)

        self._watcher.begin(call)
        self._depth[id(module)] = 1
        self._handles.append(
            module.register_forward_hook(ended, prepend=True, with_kwargs=True, always_call=True)
        )

    def _sees(self) -> bool:
        return threading.get_ident() == self._thread and not in_backward()

    def _place(self, module: nn.Module) -> str | None:
        """Where a module stands that was added to a known one after that was first called."""
        for name, root in self._roots.items():
            for path, part in root.named_modules(prefix=name):
                if part is module:
                    return str(path)
        return None

    def _wrap(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        forward = module.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._sees():
                return forward(*args, **kwargs)
            call = ModuleCall(name=name, module=module, args=args, kwargs=kwargs, failed=True)
            out = None
            self._watcher.begin(call)
            try:
                out = forward(*args, **kwargs)
                call.failed = False
            finally:
                self._watcher.end(call, out)
            return out

        self._undo.append(set_forward(module, watched))
