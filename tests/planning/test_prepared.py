"""One prepared graph: what is computed once for all of its decisions."""

from __future__ import annotations

from typing import Any

import pytest

import remat
from remat.graph.lowering import Decision
from remat.passes.core.state import State
from remat.planning import prepared
from tests.models import build


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("budget", [0.3, remat.Peak(0.3)], ids=str)
def test_each_decision_is_partitioned_once(
    lower: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = build("randn_like")
    joint = remat.capture(step.model, step.args, step.kwargs, lower=lower)
    partitioned: list[Decision | None] = []
    split = prepared.split

    def counted(state: State) -> State:
        partitioned.append(state.decision)
        return split(state)

    monkeypatch.setattr(prepared, "split", counted)
    remat.plan(joint, budget, cost="roofline:h100")
    assert len(partitioned) == len(set(partitioned))
    if budget == 0.3:
        assert len(partitioned) == 2  # budget 1's, to compare with, and the plan's
