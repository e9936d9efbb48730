"""Fixtures of several folders."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPoolExecutor]:
    """One process for the tests that plan in another one: it takes seconds to import PyTorch."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as started:
        yield started


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget all compiled functions before the test, and after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
