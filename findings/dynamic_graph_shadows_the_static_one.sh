#!/usr/bin/env bash
# After a batch of another size, batches of the first size run the graph of dynamic shapes, not their own.
#
# Version: torch 2.13.0; 2.14.1 and 2.15.0 do the same. Seen on 2026-11-30.
# Guess: for batches of 1024, 500 and 1024, the third runs the graph that was compiled for the first: its guards still hold.
# Seen: the third runs the dynamic graph. Dynamo tries the newest graph first, and its guards hold for 1024 too. The static graph
# stays in memory, and runs no more. torch._dynamo.reset_code does not help: the next graph of 1024 is dynamic from the start,
# until torch._dynamo.reset().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch

ran = []


def backend(graph, inputs):
    kind = "dynamic" if any(isinstance(value, torch.SymInt) for value in inputs) else "static"

    def run(*args):
        ran.append(kind)
        return graph(*args)

    return run


def model(x):
    return x.sin() + 1


step = torch.compile(model, backend=backend)
for batch in (1024, 500, 1024):
    step(torch.ones(batch, 4))
print("batches 1024, 500, 1024:", ran)
assert ran == ["static", "dynamic", "dynamic"]
torch._dynamo.reset_code(model.__code__)
step(torch.ones(1024, 4))
torch._dynamo.reset()
step(torch.ones(1024, 4))
print("1024 after reset_code, after reset:", ran[3:])
assert ran[3:] == ["dynamic", "static"]
PY
