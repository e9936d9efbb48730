"""Being told when the forward of any module runs, and what the module is called."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One call of a module's ``forward``, about to run.

    Attributes:
        name: what the module is called; see `watching`.
        module: the module.
        forward: its ``forward``, as it was before it was watched.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Runs it."""
        return self.forward(*self.args, **self.kwargs)

    @property
    def is_leaf(self) -> bool:
        """Whether the module has no children."""
        return next(self.module.children(), None) is None


#: What is called in place of a module's ``forward``; it returns what running the call does.
Around = Callable[[ModuleCall], Any]


def in_backward() -> bool:
    """Whether it is backward that runs what runs now: a checkpointed module, once more."""
    return int(torch._C._current_graph_task_id()) != -1


@contextlib.contextmanager
def watching(around: Around) -> Iterator[None]:
    """Calls ``around`` for every module that runs within the ``with`` block.

    A module is called after its place below the first module that was called: ``Model.layers.0``, as
    PyTorch's tools do; the second module of one class that is called by itself gets a number. What
    forward hooks do is outside of ``forward``, as it is for checkpointing. Unlike hooks, ``around``
    sees keyword arguments and exceptions.
    """
    watch = _Watch(around)
    plain = nn.Module.__call__

    @functools.wraps(plain)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watch.adopt(module)
        return plain(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]
        watch.release()


class _Watch:
    """The modules that are watched."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._roots: dict[str, nn.Module] = {}
        self._known: dict[int, nn.Module] = {}  # keeps them alive: identities stay theirs
        self._put: list[tuple[nn.Module, Any, Any]] = []

    def adopt(self, module: nn.Module) -> None:
        """Watches a module, and all below it, from its next call on."""
        if id(module) in self._known:
            return
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

    def release(self) -> None:
        """Leaves every module as it was."""
        for module, wrapped, before in reversed(self._put):
            if module.__dict__.get("forward") is not wrapped:
                continue  # somebody else's by now
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before

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
        forward, before = module.forward, module.__dict__.get("forward")

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._around(
                ModuleCall(name=name, module=module, forward=forward, args=args, kwargs=kwargs)
            )

        module.__dict__["forward"] = watched
        self._put.append((module, watched, before))
