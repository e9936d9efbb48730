"""A draw that a plan repeats in the half that it was drawn in, as Inductor compiles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import remat
from remat.graph import ops
from remat.integrations import torch_compile
from remat.torch_compat import functorch_config

T = torch.Tensor


@pytest.mark.slow
def test_gradients_are_those_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    wide, narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def f(x: T) -> T:
        for _ in range(3):
            x = x + F.dropout(narrow(F.gelu(F.dropout(wide(x), 0.2))), 0.3)
        return x

    def gradients(f: Callable[[T], T]) -> list[T | None]:
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for layer in (wide, narrow):
            layer.zero_grad()
        torch.manual_seed(5)
        f(x).sum().backward()
        return [x.grad, *(p.grad for layer in (wide, narrow) for p in layer.parameters())]

    inner, replayed = torch_compile._compile_as_planned, []

    def noting(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        replayed.extend(
            n.name
            for n in gm.graph.nodes
            if ops.is_drawn_from_state(n) and getattr(n.args[0], "op", "") == "call_function"
        )
        return inner(gm, inputs, **kwargs)

    monkeypatch.setattr(torch_compile, "_compile_as_planned", noting)
    options: dict[str, Any] = {
        "budget": remat.Peak(0.6),
        "cost": "roofline:h100",
        "offload": "2000GB/s",
        "fallback_random": True,
    }
    compiled = torch.compile(f, backend="remat", options=options)
    expected = gradients(f)
    with functorch_config.patch(enable_autograd_cache=False):
        found = gradients(compiled)
    assert replayed, "no plan draws again in the same half; the test needs another program"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
