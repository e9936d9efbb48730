"""Settings shared by all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

# A machine that is busy with something else is no fault of a test.
settings.register_profile("remat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("remat")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for no garbage while modules are imported, and never again in what they have made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
