"""Trace a whole training step as one graph, and run it while its memory is watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat.integrations.backend import boxed
from remat.running.measure import StorageWatch
from remat.torch_compat import aot_autograd, dynamo_config, mark_boxed


class PeakWatch(StorageWatch):
    """The most bytes alive while it is entered."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self.now = self.most = 0
        for value in given:
            if isinstance(value, torch.Tensor):
                self.add(value)

    def on_storage(self, state: int | None, nbytes: int, source: str) -> int:
        self.now += nbytes - (state or 0)
        self.most = max(self.most, self.now)
        return nbytes

    def on_free(self, state: int) -> None:
        self.now -= state


def traced(step: Callable[..., Any], batch: Mapping[str, Any]) -> tuple[fx.GraphModule, list[Any]]:
    """The one graph that a step is, with its inputs."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        run = boxed(gm)

        def call(arguments: list[Any]) -> Any:
            found.append((gm, [*arguments]))
            return run(arguments)

        mark_boxed(call)
        return call

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
    with dynamo_config.patch(trace_autograd_ops=True):
        torch.compile(step, backend=backend, fullgraph=True)(**batch)
    ((gm, inputs),) = found
    return gm, inputs


def run(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], int]:
    """Results and inputs after a run of a graph on copies of its inputs, and the most bytes alive in it."""
    given = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.manual_seed(3)
    watch, call = PeakWatch(given), boxed(gm)
    with watch, torch.no_grad():
        results = call([*given])
    tensors = [x for x in (*results, *given) if isinstance(x, torch.Tensor)]
    return [*tensors, torch.rand(1)], watch.most
