"""Every step is compiled from scratch; what PyTorch warns of when it is imported or traces is ignored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

WARNINGS = (
    "ignore:.torch.jit:DeprecationWarning",  # importing Inductor imports a deprecated corner of it
    "ignore:The .grad attribute:UserWarning",  # Dynamo looks at .grad of what a graph is given
    "ignore:.*should not be instantiated:DeprecationWarning",  # Dynamo does, each autograd.Function
    "ignore:Dynamo detected a call to a .functools.lru_cache.:UserWarning",  # in transformers
    "ignore:flex_attention called without torch.compile:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("e2e", "hard"):
            for text in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
