"""Report to a watcher when the forward of each module begins and ends, with a name for each module.

All code of `remat.sac` that replaces a module's ``forward`` calls `set_forward` of this file.
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
from remat.errors import ProblemError
from remat.graph.capture.calling import why_no_instance

Forward = Callable[..., Any]


def check_module(model: object) -> None:
    """Raise a ProblemError if ``model`` is not an instance of `torch.nn.Module`."""
    if not isinstance(model, nn.Module):
        raise ProblemError(
            why_no_instance(model)
            or f"model is a {type(model).__name__}; expected a torch.nn.Module: what is checkpointed are "
            "its modules"
        )


def own_forward(module: nn.Module) -> Forward | None:
    """Return the ``forward`` set on a module instance; None if the class's method is in use."""
    forward: Forward | None = module.__dict__.get("forward")
    return forward


def set_forward(module: nn.Module, forward: Forward | None) -> Callable[[], None]:
    """Set ``forward`` on a module instance; None removes the instance's ``forward``, so that the class's method runs.

    Returns:
        A function that restores the previous ``forward``, unless another one has been set since.
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
    """Whether this thread runs backward, in which checkpointed modules run forward again."""
    return int(torch_compat.current_graph_task_id()) != -1


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One call of a module's ``forward``; `watching` explains the module's ``name``.

    Attributes:
        kwargs: keyword arguments of the call. In the first call of a module that belongs to no model
            passed to `watching`, this dict is empty until the call ends.
        failed: whether the call raised an exception; not yet decided while the call runs.
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
    """Interface of an object to which `watching` reports module calls, outer calls before inner ones."""

    def begin(self, call: ModuleCall) -> None:
        """Called by `watching` when a module call begins."""

    def end(self, call: ModuleCall, out: Any) -> None:
        """Called by `watching` when a module call ends; ``out`` is the call's result, or None if the call raised."""


@contextlib.contextmanager
def watching(watcher: Watcher, *models: nn.Module) -> Iterator[None]:
    """Report every module forward of this thread to a watcher within the ``with`` block.

    The outermost module is named by its class, and a module inside of it by its path: ``Model.layers.0``.
    PyTorch's tools use the same names for modules. If several outermost modules share a class, the second
    is named ``Model_1``, and so on.

    Forward hooks run outside of the reported call, as they run outside of a checkpointed ``forward``.
    Calls in backward, in which checkpointed modules run again, are not reported.

    Within the block, the ``forward`` of each module is replaced on the instance. A module that is in
    none of ``models`` is detected at its first call, whose report includes the module's own pre-hooks.
    """
    watch = _Watch(watcher)
    try:
        for model in models:
            watch.adopt(model)
        handle = hooks.register_module_forward_pre_hook(watch.before_call)
        try:
            yield
        finally:
            handle.remove()
    finally:
        watch.release()


class _Watch:
    """Names the watched modules, wraps their ``forward``, and reports their calls to a watcher."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._thread: int | None = threading.get_ident()
        self._roots: dict[str, nn.Module] = {}
        # Modules whose calls are reported, by id. The dict keeps the modules alive, so that no id is reused.
        self._adopted: dict[int, nn.Module] = {}
        self._undo: list[Callable[[], None]] = []
        # For each module (by id) whose first call is running: number of its calls that have not ended.
        # Hooks report the first call of a module, and the module's ``forward`` reports later calls.
        self._depth: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []

    def adopt(self, module: nn.Module) -> str:
        """Wrap a module and all its submodules, so that future calls are reported; return the outer module's name."""
        name = self._place(module)
        if name is None:
            name = kind = type(module).__name__
            number = 0
            while name in self._roots:
                number += 1
                name = f"{kind}_{number}"
            self._roots[name] = module
        for path, part in module.named_modules(prefix=name):
            if id(part) not in self._adopted:
                self._adopted[id(part)] = part
                self._wrap(path, part)
        return name

    def release(self) -> None:
        """Restore the ``forward`` of every module and remove all hooks."""
        # A replaced ``forward`` that other code has wrapped since stays in place, but reports no more calls.
        self._thread = None
        for handle in self._handles:
            handle.remove()
        for undo in reversed(self._undo):
            undo()

    def before_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Global pre-hook, which PyTorch runs before each module call: wrap a new module, and report its first call."""
        if not self._sees():
            return
        key = id(module)
        if key in self._depth:
            self._depth[key] += 1
        elif key not in self._adopted:
            name = self.adopt(module)
            if not isinstance(module, torch.jit.ScriptModule):
                self._first_call(ModuleCall(name=name, module=module, args=args))

    def _first_call(self, call: ModuleCall) -> None:
        """Report the first call of a module that a pre-hook of the same call has wrapped."""
        # PyTorch looks up `forward` before it runs pre-hooks, so this call still runs the original `forward`,
        # which reports nothing. A hook on the module reports the end.
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
        # prepend: the end of the call is reported before the user's forward hooks run. always_call: the hook runs even
        # after an exception. An exception that the caller handled before the call is no failure of the call.
        self._handles.append(
            module.register_forward_hook(ended, prepend=True, with_kwargs=True, always_call=True)
        )

    def _sees(self) -> bool:
        """Whether module calls are reported now: this is the watched thread, and backward does not run."""
        return threading.get_ident() == self._thread and not in_backward()

    def _place(self, module: nn.Module) -> str | None:
        """Return a module's name within a watched outermost module; None if no watched module contains it."""
        # The search starts anew, because a submodule may have been added to an outermost module after `adopt`.
        for name, root in self._roots.items():
            for path, part in root.named_modules(prefix=name):
                if part is module:
                    return str(path)
        return None

    def _wrap(self, name: str, module: nn.Module) -> None:
        """Replace the ``forward`` of a module by one that reports each call under ``name``."""
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
