"""The device of the cost model, by PyTorch's name for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.errors import ProblemError
from remat.sac import SACEstimator


def test_runtimes_are_of_the_named_gpu() -> None:
    def runtime(estimator: SACEstimator) -> float:
        with FakeTensorMode():
            model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
            with estimator("operator-level-cost-model"):
                model(torch.randn(4096, 4))
        return sum(estimator.sac_mod_stats["Sequential"].runtimes)

    default = runtime(SACEstimator())
    assert runtime(SACEstimator("NVIDIA H100")) == default
    assert runtime(SACEstimator(gpu_type="NVIDIA B200")) < default
    with pytest.raises(ProblemError, match="unknown device; known: a100"):
        SACEstimator("NVIDIA Voodoo")
