"""Bytes alive at once, against counting by hand."""

from __future__ import annotations

import torch

import remat
from remat.graph.liveness import saved_storages, simulate_peak
from tests.graphs import joint_of, weight


def test_peak_of_one_product() -> None:
    """Every matrix has 64 bytes, the loss and its gradient 4.

    Forward: two inputs (128), cos (192), mm (256), sum (260). Backward: inputs and loss (132), cos and
    the tangent (200), the gradient of w (264, then cos goes: 200), mm_2 (264, then the tangent goes:
    260), sin (324), neg (388): the most. Then sin goes, and the product takes its place.
    """
    joint = joint_of(lambda x, w: torch.mm(x.cos(), w).sum(), weight(4, 4), weight(4, 4))
    plan = remat.plan(joint, 1)
    peak = simulate_peak(plan.forward, plan.backward, joint.num_fwd_outputs)
    assert (peak.nbytes, peak.node, peak.in_backward) == (388, "neg", True)
    assert plan.peak_bytes == 388


def test_peak_in_forward() -> None:
    """Backward of a sum is a view of the tangent: forward decides.

    Forward: the input (64), big (64 + 16,384) and its exponential, together 32,832, then big goes and
    the sum (4) comes.
    """

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        big = torch.zeros(64, 64)
        return x.sum(), (big + 1).exp().sum()

    joint = joint_of(f, weight(4, 4))
    plan = remat.plan(joint, 1)
    peak = simulate_peak(plan.forward, plan.backward, joint.num_fwd_outputs)
    assert not peak.in_backward
    assert peak.nbytes == 64 + 4 + 2 * 4 * 64 * 64


def test_saved_storages_leave_out_inputs_and_outputs() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (x @ w).tanh()
        return h, (h @ w).exp().sum()

    joint = joint_of(f, weight(4, 4), weight(4, 4))
    plan = remat.plan(joint, 1)
    n = joint.num_fwd_outputs
    assert "tanh" in plan.saved
    assert {"mm_1", "exp"} & set(plan.saved)
    assert list(saved_storages(plan.forward, n).values()) == [64]
    assert list(saved_storages(plan.forward, n, count_outputs=True).values()) == [64, 64]
    assert plan.saved_bytes == 64
    assert remat.plan(joint, 1, count_outputs=True).saved_bytes == 128
