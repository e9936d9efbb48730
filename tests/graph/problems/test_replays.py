"""States of generators: as many bytes as PyTorch's, and none where PyTorch cannot run from one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from remat.errors import PlanError
from remat.graph.problems.replays import Replays, state_bytes
from remat.passes.split.functionalize_rng import _save_state
from remat.torch_compat import FakeTensorMode

aten = torch.ops.aten


def drawing(device: str, target: Any = aten.rand_like.default) -> fx.Node:
    """A random operator in a graph whose tensors are on a device that need not be here."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x,))
    with FakeTensorMode():
        x.meta["val"] = node.meta["val"] = torch.empty(4, device=device)
    graph.output(node)
    return node


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_a_state_has_the_bytes_that_pytorch_gives_it(device: str) -> None:
    module = torch if device == "cpu" else torch.get_device_module(device)
    if device != "cpu" and not module.is_available():
        expected = 16  # two integers of 8 bytes
    else:
        expected = module.get_rng_state().nbytes
    node = drawing(device)
    assert Replays([node])(node)
    assert state_bytes(node) == expected
    saved = _save_state(node)
    assert saved.meta["val"].nbytes == expected
    assert saved.meta["val"].device.type == "cpu"


@pytest.mark.parametrize("device", ["mps", "meta"])
def test_where_pytorch_cannot_run_from_a_state_it_is_not_guessed(device: str) -> None:
    node = drawing(device)
    assert not Replays([node])(node), "what it draws is saved"
    with pytest.raises(PlanError, match=f"random numbers on {device}, where PyTorch cannot replay"):
        _save_state(node)
