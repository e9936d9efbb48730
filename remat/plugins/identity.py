"""Parts of cache keys: code, versions and options."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import uuid4

from remat.solvers.isolation import Isolated

#: Stands for what no other process can know.
_OF_THIS_PROCESS = f"process-{uuid4().hex}"
#: Libraries that may decide, by the names of their distributions.
_LIBRARIES = ("highspy", "networkx", "numpy", "ortools", "pulp", "scipy")


def identity(thing: object) -> str:
    """Where a solver or cost model comes from, in which version, with which options."""
    if isinstance(thing, Isolated):  # a process of its own changes no answer
        thing = thing.inner
    kind = type(thing)
    state = json.dumps([[name, described(value)] for name, value in _state(thing)])
    return f"{kind.__module__}:{kind.__qualname__} {state} {_origin(kind.__module__)}"


def described(value: Any) -> Any:
    """A value as JSON can hold it; equal descriptions mean the same in every process.

    Functions and instances of classes outside of remat are described for this process alone, as their
    state cannot be read; see `is_known_elsewhere`.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Path, Fraction)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, Mapping):
        return [[described(k), described(v)] for k, v in value.items()]
    if isinstance(value, Set):
        return sorted(json.dumps(described(v)) for v in value)
    if isinstance(value, (tuple, list)):
        return [described(v) for v in value]
    kind = type(value)
    called = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__.partition(".")[0] != "remat":
        return f"{called} {_OF_THIS_PROCESS} {id(value)}"
    if isinstance(value, Enum):
        return f"{called} {value.name}"
    for method in ("to_json", "key"):
        if hasattr(value, method):
            return [called, getattr(value, method)()]
    return [called, [[name, described(state)] for name, state in _state(value)]]


def is_known_elsewhere(description: Any) -> bool:
    """Whether a description means the same in another process."""
    return _OF_THIS_PROCESS not in json.dumps(description)


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an instance, in slots or not."""
    if is_dataclass(value):
        yield from ((f.name, getattr(value, f.name)) for f in fields(value))
        return
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


def surroundings() -> dict[str, Any]:
    """Inputs of a plan besides graph and options: code, library versions and declarations.

    Every module of ours that keeps what users declare about operators has a function ``declared()``.
    """
    from remat.graph.ops import default_taxonomy
    from remat.plugins.registry import registry

    known = registry()
    known.learn_operators()
    declarations = {
        name: described(list(module.declared()))
        for name, module in sorted(sys.modules.items())
        if name.startswith("remat.") and callable(getattr(module, "declared", None))
    }
    taxonomy = default_taxonomy()
    offered = (known.solvers, known.passes, known.analyses, known.cost_models)
    classes = {kind for found in offered for kind in found.values()}
    modules = {*known.plugin_modules(), *(kind.__module__ for kind in classes)}
    return {
        "code": _origin("remat"),
        "libraries": _versions(),
        "solvers": known.solver_names(),
        "classes": sorted(f"{kind.name}={kind.__module__}:{kind.__qualname__}" for kind in classes),
        "plugins": {module: _origin(module) for module in sorted(modules)},
        "operators": {
            f.name: sorted(map(_operator, getattr(taxonomy, f.name))) for f in fields(taxonomy)
        },
        "declared": declarations,
    }


def _operator(target: Any) -> str:
    text = str(target)
    if " at 0x" not in text:
        return text
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"


def _origin(module: str) -> str:
    """The code of the top-level package that a module is in."""
    return _origin_of(module.partition(".")[0])


@functools.cache
def _origin_of(package: str) -> str:
    """A digest of a package's code and tables: a version would not tell edits.

    For this process alone where there is no file to read, as for what was typed in.
    """
    loaded = sys.modules.get(package)
    file = getattr(loaded, "__file__", None)
    files = {Path(file).name: Path(file)} if file else {}
    for folder in map(Path, getattr(loaded, "__path__", ())):
        for kind in ("*.py", "*.so", "*.pyd", "*.toml"):
            files |= {str(path.relative_to(folder)): path for path in folder.rglob(kind)}
    if not files:
        return _OF_THIS_PROCESS
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"\n{name}\n".encode())
        digest.update(files[name].read_bytes())
    return digest.hexdigest()


@functools.cache
def _versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
