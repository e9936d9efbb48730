"""Replace methods of PyTorch for single threads, for example to compile kernels later."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from remat import torch_compat


class ForThread:
    """Replace a PyTorch method, but only for the calls that chosen threads make."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._lock, self._inside = threading.Lock(), 0
        self._own = threading.local()

    @contextlib.contextmanager
    def instead(self, replacement: Callable[..., Any]) -> Iterator[None]:
        """Make this thread call ``replacement`` in place of the method within the ``with`` block."""
        with self._lock:
            if not self._inside:
                self._theirs = vars(self._owner)[self._name]
                theirs = getattr(self._owner, self._name)

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


#: Returns the only `ForThread` for a class and a method name, so that all threads share one patched method.
for_thread = functools.cache(ForThread)


class GeneratedCode:
    """Replacement for the Python module that Inductor generated for a graph.

    The generated module compiles its kernels when it is loaded. This object loads the module when `load` is
    first called, or when an attribute of the module is first used.

    Attributes:
        load: function that loads the module once, and returns it.
    """

    #: Attributes for CUDA graphs only. Inductor reads both immediately, and reading them must not load the module.
    runner = recursively_apply_fns = None

    def __init__(self, load: Callable[[], Any], path: str) -> None:
        self.load, self.__file__ = functools.cache(load), path

    def call(self, arguments: list[Any]) -> Any:
        """Run the graph: call the function ``call`` of the generated module."""
        return self.load().call(arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` asks for these before `load` is set
            raise AttributeError(name)
        return getattr(self.load(), name)


@contextlib.contextmanager
def deferred_kernels(unloaded: list[GeneratedCode]) -> Iterator[None]:
    """Make Inductor generate code without compiling its kernels; append the code of each graph to ``unloaded``."""
    # The generated code alone shows the memory of a step. If the step exceeds its budget, it is planned again, and
    # the kernels of this code are never needed. On a CPU, compiling kernels takes most of the compilation time: the
    # first step of an MLP of four blocks, planned twice, took 51 to 57 s instead of 72 s.

    def load(theirs: Callable[..., Any], key: str, path: str, *args: Any, **kwargs: Any) -> Any:
        single = not args and "attrs" not in kwargs  # a single kernel
        if single or torch_compat.inductor_config.cpp_wrapper:
            return theirs(key, path, *args, **kwargs)
        unloaded.append(GeneratedCode(functools.partial(theirs, key, path, *args, **kwargs), path))
        return unloaded[-1]

    owner: Any = torch_compat.PyCodeCache
    with for_thread(owner, "load_by_key_path").instead(load):
        yield
