#!/usr/bin/env bash
# A compiled function that calls backward() and optimizer.step() is three graphs; fullgraph=True is refused.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: with trace_autograd_ops = True, a whole training step is one graph, because torch.compile(optimizer.step) is one.
# Seen: PyTorch's own wrapper of step() calls torch._dynamo.graph_break(), before and after the update. The message calls the
# break "user-inserted". The function behind the optimizer, torch.optim.adamw.adamw, leaves the step one graph.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch.optim.adamw import adamw

count = 0
weight = torch.nn.Parameter(torch.ones(4))
moments, steps = [torch.zeros(4), torch.zeros(4)], torch.tensor(1.0)
numbers = dict(beta1=0.9, beta2=0.99, lr=0.1, weight_decay=0.1, eps=1e-8)
flags = dict(amsgrad=False, maximize=False, foreach=False)


def counting(graph, inputs):
    global count
    count += 1
    return graph


def train(update):
    def step(x):
        loss = (weight * x).sum()
        loss.backward()
        update()
        return loss.detach()

    return step


@torch.no_grad()
def functional():
    adamw([weight], [weight.grad], [moments[0]], [moments[1]], [], [steps], **numbers, **flags)


def graphs(update, **how):
    global count
    torch.compiler.reset()
    count, weight.grad = 0, torch.zeros(4)
    try:
        torch.compile(train(update), backend=counting, **how)(torch.ones(4))
    except torch._dynamo.exc.Unsupported as error:
        return str(error).splitlines()[0]
    return count


with torch._dynamo.config.patch(trace_autograd_ops=True):
    for optimizer in (torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight])):
        found, refused = graphs(optimizer.step), graphs(optimizer.step, fullgraph=True)
        print(f"{type(optimizer).__name__}.step: {found} graphs; fullgraph: {refused}")
        assert found == 3
        assert refused == "Call to `torch._dynamo.graph_break()`"
    whole = graphs(functional, fullgraph=True)
    print(f"adamw(): {whole} graph")
    assert whole == 1
PY
