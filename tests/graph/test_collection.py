"""The garbage collector is paused where graphs are made, and only there."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import remat
from remat.graph.collection import paused_collection
from remat.passes.core.state import PassResult, State
from remat.passes.split.partition import Partition
from tests.graph.costs.pricing import products


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@paused_collection()
def nested(depth: int) -> list[bool]:
    """Whether collection is on, at each depth on the way down and up."""
    return [gc.isenabled(), *(nested(depth - 1) if depth else []), gc.isenabled()]


@paused_collection()
def failing() -> None:
    raise ValueError("no")


@pytest.mark.parametrize("on", [True, False])
def test_collection_is_paused_and_is_then_as_it_was(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    assert nested(2) == [False] * 6
    assert gc.isenabled() == on
    with pytest.raises(ValueError, match="no"):
        failing()
    assert gc.isenabled() == on


def test_planning_pauses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    run = Partition.run

    def watched(self: Partition, state: State) -> PassResult:
        seen.append(gc.isenabled())
        return run(self, state)

    monkeypatch.setattr(Partition, "run", watched)
    gc.enable()
    remat.plan(products(), 0.5)
    assert seen
    assert not any(seen)
    assert gc.isenabled()
