"""Report when the forward of each module begins and ends, with a name for each module."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.capture.calling import why_no_instance

#: Function called when a module call begins, with the module's name and the module.
Begin = Callable[[str, nn.Module], None]
#: Function called when a module call ends, with its (args, kwargs), its result, and whether the call raised an
#: exception. The result of a call that raised is None.
End = Callable[[Any, Any, bool], None]


def check_module(model: object) -> None:
    """Raise a ProblemError if ``model`` is not an instance of `torch.nn.Module`."""
    if not isinstance(model, nn.Module):
        raise ProblemError(
            why_no_instance(model)
            or f"model is a {type(model).__name__}; expected a torch.nn.Module: what is checkpointed are "
            "its modules"
        )


def in_backward() -> bool:
    """Whether this thread runs backward, in which checkpointed modules run forward again."""
    return int(torch_compat.current_graph_task_id()) != -1


@contextlib.contextmanager
def watching(begin: Begin, end: End, *models: nn.Module) -> Iterator[None]:
    """Report every module call of this thread within the ``with`` block, outer calls before inner ones.

    The outermost module is named by its class, and a module inside by this class and its path: ``Model.layers.0``.
    PyTorch's tools use the same names for modules. If several outermost modules share a class, the second is named
    ``Model_1``, and so on.

    The user's forward hooks run outside of the reported call, as they run outside of a checkpointed ``forward``.
    Calls in backward, in which checkpointed modules run again, are not reported.

    A module that is in none of ``models`` is detected at its first call; the report of this call includes the module's
    pre-hooks.
    """
    watch = _Watch(begin, end)
    try:
        for model in models:
            watch.adopt(model)
        watch.handles.append(hooks.register_module_forward_pre_hook(watch.before_call))
        yield
    finally:
        for handle in watch.handles:
            handle.remove()


class _Watch:
    """Names the watched modules, and reports their calls by forward hooks, which it keeps in ``handles``."""

    def __init__(self, begin: Begin, end: End) -> None:
        self.handles: list[RemovableHandle] = []
        self._begin, self._end = begin, end
        self._thread = threading.get_ident()
        self._roots: dict[str, nn.Module] = {}
        self._names: dict[nn.Module, str] = {}
        # The running calls: the module, and the exception that its caller handles, which is no failure of the call.
        self._running: list[tuple[nn.Module, BaseException | None]] = []

    def adopt(self, module: nn.Module) -> None:
        """Name a module and all its submodules, and register hooks that report their future calls."""
        name = self._place(module)
        if name is None:
            name = kind = type(module).__name__
            number = 0
            while name in self._roots:
                number += 1
                name = f"{kind}_{number}"
            self._roots[name] = module
        for path, part in module.named_modules(prefix=name):
            if part in self._names or isinstance(part, torch.jit.ScriptModule):
                continue
            self._names[part] = path
            # The user's own hooks run outside of these: pre-hooks before, and forward hooks after them.
            self.handles += [
                part.register_forward_pre_hook(self._before),
                part.register_forward_hook(
                    self._after, prepend=True, with_kwargs=True, always_call=True
                ),
            ]

    def before_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Global pre-hook, run by PyTorch before each module call: adopt a new module, and report its first call."""
        if self._sees() and module not in self._names:
            self.adopt(module)
            # PyTorch has looked up the module's pre-hooks already, so the one registered now misses this call.
            if module in self._names:
                self._before(module, args)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._sees():
            self._begin(self._names[module], module)
            self._running.append((module, sys.exception()))

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        # The hook also runs if an earlier pre-hook raised an exception, before the call began.
        if self._sees() and self._running and self._running[-1][0] is module:
            failed = sys.exception() is not self._running.pop()[1]
            self._end((args, kwargs), None if failed else out, failed)

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
