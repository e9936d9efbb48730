"""Settings shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

# Test processes run beside each other, one for each core. It must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent / "tests"
#: What compiles whole steps, starts processes or lets every solver work: files and folders. What is
#: slow by itself has the mark. `make check` leaves both out, and lists what else takes a second.
SLOW = frozenset(
    TESTS / name
    for name in (
        "cli",
        "e2e",
        "experiments",
        "fitting",
        "fuzz",
        "graph/capture/test_step.py",
        "graph/test_branch_values.py",
        "graph/test_whole_graph.py",
        "graph/text/test_files.py",
        "hard",
        "integrations",
        "passes/decide/test_budgeted.py",
        "passes/hooks/test_tracing.py",
        "passes/joint/test_chunk_loss.py",
        "planning",
        "plugins",
        "reduction",
        "report/test_memory_plot.py",
        "report/test_page_in_chromium.py",
        "running",
        "sac/api/test_apply.py",
        "sac/api/test_distributed.py",
        "sac/solve/test_milp.py",
        "solvers/isolation",
        "solvers/test_conformance.py",
        "test_benchmarks.py",
        "test_corpus.py",
        "test_demo.py",
        "test_distributed.py",
        "test_docs.py",
        "test_site.py",
        "test_wheel.py",
        "testing",
        "upstream",
    )
)

# The conformance suite of an editable install runs with these settings too, and needs no Hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # A machine that is busy with something else is no fault of a test.
    settings.register_profile("remat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("remat")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the option ``timeout`` of pyproject.toml without pytest-timeout."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for each test, if pytest-timeout is installed")


def pytest_configure() -> None:
    """Turn vectorised loops off in Inductor: the compiler takes a third longer for each such kernel."""
    from torch._inductor import config

    config.cpp.simdlen = 1
    config.cpp.vec_isa_ok = None  # what it says is remembered, and tests with the mark need it
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # for processes that tests start


@pytest.fixture(autouse=True)
def _vectorised_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turn vectorised loops on for tests with the mark."""
    if request.node.get_closest_marker("vectorised") is None:
        yield
        return
    from torch._inductor import config

    with config.patch({"cpp.simdlen": None}), pytest.MonkeyPatch.context() as patched:
        patched.delenv("TORCHINDUCTOR_VEC_ISA_OK")
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the files in `SLOW` unimported for ``-m "not slow"``: importing them takes seconds."""
    return (collection_path in SLOW and config.getoption("markexpr") == "not slow") or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for no garbage while modules are imported, and never again in what they have made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what lies in `SLOW`."""
    for item in items:
        if not SLOW.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.slow)
