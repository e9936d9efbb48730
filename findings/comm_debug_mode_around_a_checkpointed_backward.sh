#!/usr/bin/env bash
# CommDebugMode around the backward of a checkpointed tensor-parallel model ends in a KeyError; around the whole step it counts.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: to see what checkpointing costs, one counts the collectives of backward alone, as one does without checkpointing.
# Seen: KeyError: 'Block.down'. The mode files each collective under the parents of the module that runs. In recomputation, modules
# run whose forward the mode has not seen, and it has no entry for them. The same holds for FSDP2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import contextlib

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # a group whose collectives do nothing
mesh = init_device_mesh("cpu", (2,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + torch.tanh(self.down(torch.relu(self.up(x))))


def count(checkpointed, backward_alone):
    """The collectives of a step, or of its backward; the text of a KeyError."""
    model = Block()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(4, 16, requires_grad=True)
    mode = CommDebugMode()
    with contextlib.nullcontext() if backward_alone else mode:
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        if not backward_alone:
            y.sum().backward()
    if backward_alone:
        try:
            with mode:
                y.sum().backward()
        except KeyError as error:
            return str(error)
    return mode.get_total_counts()


found = {case: count(*case) for case in ((False, False), (False, True), (True, False), (True, True))}
for (checkpointed, backward_alone), result in found.items():
    print(f"checkpoint {checkpointed}, {'backward' if backward_alone else 'step'}: {result}")
assert found[False, False] == 2 and found[False, True] == 1
assert found[True, False] == 3 and found[True, True] == "'Block.down'"
dist.destroy_process_group()
PY
