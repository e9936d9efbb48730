"""Describe code, versions and options as text, for the keys of caches.

The caches contain plans and solvers' results.
"""

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

from remat.solvers.isolation.process import Isolated

#: Text that a description contains if the description is valid in this process only.
_OF_THIS_PROCESS = f"process-{uuid4().hex}"
#: Distribution names of the libraries whose version may change a solver's result.
_LIBRARIES = ("cbcbox", "highspy", "networkx", "numpy", "ortools", "pulp", "scipy")


def identity(subject: object) -> str:
    """Return text that identifies a solver or cost model by class, options and source code."""
    if isinstance(subject, Isolated):  # running in another process does not change results
        subject = subject.inner
    kind = type(subject)
    state = json.dumps([[name, described(value)] for name, value in _state(subject)])
    return f"{kind.__module__}:{kind.__qualname__} {state} {_origin(kind.__module__)}"


def described(value: Any) -> Any:
    """Return a JSON-compatible description of a value; equal descriptions mean equal values.

    The description of a function, or of an instance of a class outside remat, contains the object's ``id``, but none of
    the object's attributes. A description with an ``id`` is valid in this process only; see `is_known_elsewhere`.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Path, Fraction)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, Mapping):
        # Pairs, because keys in JSON can only be text.
        return [[described(k), described(v)] for k, v in value.items()]
    if isinstance(value, Set):
        # Sorted, because the order of a set differs from process to process.
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
    """Return whether a description from `described` is valid in other processes too."""
    return _OF_THIS_PROCESS not in json.dumps(description)


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each attribute of an instance, including attributes in slots."""
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
    """Return a description of what a plan depends on besides its graph and options, such as code and versions.

    Every module of remat that stores users' declarations about operators has a function ``declared()``. The entry
    ``declared`` of the result contains what the functions ``declared()`` of all modules return.

    Returns:
        A JSON-compatible dict with the keys ``code``, ``libraries``, ``solvers``, ``classes``,
        ``plugins``, ``operators`` and ``declared``.
    """
    # Imported here, because the module imports torch, and solvers are identified without torch.
    from remat.graph.ops import default_taxonomy, text_of
    from remat.plugins.registry import registry

    plugins = registry()
    plugins.learn_operators()
    declarations = {
        name: described(list(module.declared()))
        for name, module in sorted(sys.modules.items())
        if name.startswith("remat.") and callable(getattr(module, "declared", None))
    }
    taxonomy = default_taxonomy()
    offered = (plugins.solvers, plugins.passes, plugins.analyses, plugins.cost_models)
    classes = {kind for kinds in offered for kind in kinds.values()}
    modules = {*plugins.plugin_modules(), *(kind.__module__ for kind in classes)}
    return {
        "code": _origin("remat"),
        "libraries": _versions(),
        "solvers": plugins.solver_names(),
        "classes": sorted(f"{kind.name}={kind.__module__}:{kind.__qualname__}" for kind in classes),
        "plugins": {module: _origin(module) for module in sorted(modules)},
        "operators": {
            f.name: sorted(map(text_of, getattr(taxonomy, f.name))) for f in fields(taxonomy)
        },
        "declared": declarations,
    }


def _origin(module: str) -> str:
    """Return a digest of the files of the top-level package that contains ``module``."""
    return _origin_of(module.partition(".")[0])


@functools.cache
def _origin_of(package: str) -> str:
    """Return a digest of a package's Python, compiled and TOML files."""
    # Unlike a version number, the digest changes with every edit of a file. Code that was typed into an interpreter has
    # no files, so its text is unique to this process.
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
    """Return the installed version of each library in `_LIBRARIES`, or None if it is missing, as a dict by name."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions
