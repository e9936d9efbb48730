#!/usr/bin/env bash
# torch.compile(DistributedDataParallel(nn.Sequential(...))) compiles no graph, without a message.
#
# Version: torch 2.13.0; 2.14.1 and 2.15.0 do the same. Seen on 2026-11-29.
# Guess: the wrapped model is compiled, as it is with a `forward` of one's own, or as DistributedDataParallel(torch.compile(model)) is.
# Seen: the model runs in eager mode. torch.compile makes an exception for a bare nn.Sequential, but DDP calls its `forward`, which lies
# in a file of PyTorch's that Dynamo skips.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
FOLDER=$folder "$folder/venv/bin/python" - <<'PY'
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

store = f"file://{os.environ['FOLDER']}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
graphs = 0


def counting(graph, inputs):
    global graphs
    graphs += 1
    return graph


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = sequential()

    def forward(self, x):
        return self.layers(x)


def sequential():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def compiled(model):
    return torch.compile(model, backend=counting)


found = {}
for name, make in {
    "torch.compile(Sequential)": lambda: compiled(sequential()),
    "torch.compile(DDP(Own))": lambda: compiled(DistributedDataParallel(Own())),
    "DDP(torch.compile(Sequential))": lambda: DistributedDataParallel(compiled(sequential())),
    "torch.compile(DDP(Sequential))": lambda: compiled(DistributedDataParallel(sequential())),
}.items():
    torch.compiler.reset()
    graphs = 0
    make()(torch.randn(8, 16)).sum().backward()
    found[name] = graphs
    print(f"{name}: {graphs} graphs")
torch.distributed.destroy_process_group()
assert found.pop("torch.compile(DDP(Sequential))") == 0
assert all(found.values())
PY
