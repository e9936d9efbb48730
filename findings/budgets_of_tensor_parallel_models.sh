#!/usr/bin/env bash
# A tensor-parallel model compiles at the activation_memory_budgets 1 and 0, and at no budget in between.
#
# Version: torch 2.13.0; 2.14.1 and 2.15.0 do the same. Seen on 2026-11-30.
# Guess: a model that parallelize_module has sharded takes any budget; its shards are tensors like others.
# Seen: "Cannot compute the size of … FakeScriptObject". The mesh of a DTensor is an input of the traced graph. Between 0 and 1, the
# partitioner adds up the bytes of all inputs, and refuses one that is no tensor. With
# torch._functorch.config.unsafe_treat_script_objects_as_zero_size, which the message calls unsound, the model compiles.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch import distributed as dist
from torch._functorch import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))


def train(budget, **how):
    """The error that one step ends in, or an empty text."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with config.patch(activation_memory_budget=budget, enable_autograd_cache=False, **how):
        try:
            torch.compile(model, backend="aot_eager_decomp_partition")(torch.randn(8, 16)).sum().backward()
        except torch._dynamo.exc.BackendCompilerFailed as error:
            return str(error.inner_exception)
    return ""


found = {budget: train(budget) for budget in (1, 0.99, 0.5, 0.01, 0)}
for budget, error in found.items():
    print(f"budget {budget}: {error[:90] or 'compiled'}")
for budget in (0.99, 0.5, 0.01):
    assert found[budget].startswith("Cannot compute the size of") and "FakeScriptObject" in found[budget]
assert found[1] == found[0] == train(0.5, unsafe_treat_script_objects_as_zero_size=True) == ""
dist.destroy_process_group()
PY
