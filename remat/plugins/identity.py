"""Where a plugin's code comes from, for the keys of caches: another version is another key."""

from __future__ import annotations

import functools


def identity(thing: object) -> str:
    """Where a solver or cost model comes from, with the version of the distribution it is in."""
    kind = type(thing)
    package = kind.__module__.partition(".")[0]
    return f"{kind.__module__}:{kind.__qualname__} {_versions_of(package)}"


@functools.cache
def _versions_of(package: str) -> str:
    """The distributions that a top-level package comes from; finding them reads all that are installed."""
    from importlib.metadata import packages_distributions, version

    return " ".join(
        f"{d}=={version(d)}" for d in sorted(set(packages_distributions().get(package, [])))
    )
