#!/usr/bin/env bash
# A DistributedDataParallel with bucket_cap_mb below 1 trains in eager mode, and ends in an AssertionError under torch.compile.
#
# Version: torch 2.13.0; 2.14.1 and 2.15.0 do the same. Seen on 2026-11-29.
# Guess: a bucket size that DDP accepts and trains with also holds for the compiled model.
# Seen: "First bucket should be smaller/equal to other buckets": Dynamo splits graphs at DDP's buckets, and takes the first bucket to
# have 1 MB, whatever `bucket_cap_mb` is.
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


def outcome(compiled, cap):
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model = torch.compile(model, backend="eager") if compiled else model
    try:
        DistributedDataParallel(model, bucket_cap_mb=cap)(torch.randn(8, 16)).sum().backward()
    except AssertionError as error:
        return f"AssertionError: {error}"
    return "trains"


found = {(compiled, cap): outcome(compiled, cap) for compiled in (False, True) for cap in (1, 0.5)}
for (compiled, cap), said in found.items():
    print(f"{'compiled' if compiled else 'eager'}, bucket_cap_mb={cap}: {said}")
torch.distributed.destroy_process_group()
assert found[True, 0.5].startswith("AssertionError: First bucket should be smaller")
assert found[False, 0.5] == found[False, 1] == found[True, 1] == "trains"
PY
