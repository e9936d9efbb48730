"""The nine networks of the benchmarks: their Fourier layers, and the peak of eager PyTorch on fake tensors."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.networks import eager_peak, least_share
from benchmarks.nine_networks import NETWORKS, SMALL, Spectral, resized
from remat.running.measure import measure_step


def waves(points: int) -> torch.Tensor:
    """A field of few frequencies, also negative ones, at a number of points on each of two axes."""
    turns = 2 * math.pi * torch.arange(points, dtype=torch.float64) / points
    x, y = turns[:, None], turns[None, :]
    return (1 + torch.cos(2 * x - y) + torch.sin(x + 3 * y))[None, None]


@pytest.mark.parametrize("points", [10, 16, 24])
def test_a_resized_field_has_the_same_waves(points: int) -> None:
    torch.testing.assert_close(resized(waves(16), (points, points)), waves(points))


def test_a_spectral_layer_multiplies_low_frequencies_and_drops_the_others() -> None:
    layer = Spectral(1, 1, (3, 3)).double()
    with torch.no_grad():
        layer.weights.copy_(torch.tensor([2.0, 0.0]).double())
        torch.testing.assert_close(layer(waves(16)), 2 * (waves(16) - sine(16)))


def sine(points: int) -> torch.Tensor:
    """The wave of `waves` whose frequency on the last axis is 3, which three modes (0, 1 and 2) lack."""
    turns = 2 * math.pi * torch.arange(points, dtype=torch.float64) / points
    return torch.sin(turns[:, None] + 3 * turns[None, :])[None, None]


@pytest.mark.parametrize("name", SMALL)
def test_the_peak_of_eager_pytorch_on_fake_tensors_is_the_measured_one(name: str) -> None:
    work = SMALL[name]
    (batch,) = work.batches(1)
    measured = measure_step(work.build(), (), batch, by="storages")
    before, peak = eager_peak(work)
    assert before == measured.input_bytes
    # The loss's own gradient: `measure_step` also returns an empty tensor, whose backward makes it.
    assert peak == pytest.approx(measured.peak_bytes, abs=8)


@pytest.mark.parametrize("least", [0.0, 0.6])
def test_the_least_share_within_a_cost_is_found_by_bisection(least: float) -> None:
    found = [(1.0, 0.0), (0.7, 0.06), (0.2, 0.5)]

    def plan(share: float) -> None:
        """Costs rise as the share falls; below the least share there is no plan."""
        if share >= least:
            found.append((share, 0.2 * (1 - share)))

    share = least_share(0.1, found, plan)
    assert share == pytest.approx(max(0.5, least), abs=0.01)
    assert share >= max(0.5, least)


def test_there_are_nine_networks() -> None:
    assert len(NETWORKS) == 9
    assert SMALL.keys() < NETWORKS.keys()
