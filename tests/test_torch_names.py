"""Names that PyTorch has too: whoever calls them by PyTorch's keywords is understood."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed._tools.sac_estimator as sac_estimator
from torch._functorch._activation_checkpointing import graph_info_provider, knapsack_evaluator

import remat
from remat.solvers.knapsack.pulp_cbc import load_pulp

METHODS = {
    remat.GraphInfoProvider: graph_info_provider.GraphInfoProvider,
    remat.KnapsackEvaluator: knapsack_evaluator.KnapsackEvaluator,
    remat.sac.SACEstimator: sac_estimator.SACEstimator,
}
PAIRS = [
    (getattr(remat.sac, name), getattr(sac_estimator, name))
    for name in ("SACStats", "MSPS", "SACTradeOffStats", "SACGreedyOrderMeta")
]
PAIRS += [
    (getattr(ours, name), method)
    for ours, theirs in METHODS.items()
    for name, method in inspect.getmembers(theirs, callable)
    if name in vars(theirs) and (name in ("__init__", "__call__") or not name.startswith("_"))
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda f: f.__qualname__)
def test_pytorchs_keywords_are_ours(ours: Any, theirs: Any) -> None:
    assert_keywords(ours, theirs)


@pytest.mark.skipif(
    not hasattr(load_pulp(), "LpStatus"),
    reason="PyTorch's module ILP imports LpStatus, which PuLP 4 no longer has",
)
def test_the_keywords_of_pytorchs_module_ilp_are_ours() -> None:
    from torch.distributed._tools import sac_ilp

    assert_keywords(
        remat.sac.get_optimal_checkpointing_policy_per_module,
        sac_ilp.get_optimal_checkpointing_policy_per_module,
    )


def assert_keywords(ours: Any, theirs: Any) -> None:
    mine = list(inspect.signature(ours).parameters)
    wanted = list(inspect.signature(theirs).parameters)
    assert mine[: len(wanted)] == wanted, "more of ours stand behind theirs"


def test_properties_are_there_too() -> None:
    for ours, theirs in METHODS.items():
        for name, _ in inspect.getmembers(theirs, lambda v: isinstance(v, property)):
            if name in vars(theirs):
                assert hasattr(ours, name)
