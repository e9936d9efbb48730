#!/usr/bin/env bash
# nn.Sequential(...).compile() compiles no graph, without a message; torch.compile(nn.Sequential(...)) does.
#
# Version: torch 2.13.0; from 2.14.1 on both compile. Seen on 2026-11-29.
# Guess: `model.compile()` compiles what `torch.compile(model)` compiles.
# Seen: no graph is compiled if `forward` is PyTorch's own: nn.Sequential, nn.Linear, nn.TransformerEncoderLayer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch import nn

graphs = 0


def counting(graph, inputs):
    global graphs
    graphs += 1
    return graph


def sequential():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


found = []
for in_place in (False, True):
    model = sequential()
    graphs = 0
    if in_place:
        model.compile(backend=counting)
    else:
        model = torch.compile(model, backend=counting)
    model(torch.randn(8, 16)).sum().backward()
    found.append(graphs)
    print("model.compile():" if in_place else "torch.compile(model):", graphs, "graphs")
assert found == [1, 0]
PY
