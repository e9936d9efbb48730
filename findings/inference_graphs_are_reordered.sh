#!/usr/bin/env bash
# Inductor moves each operator of an inference to its first reader, which may keep large values alive; steps keep their order.
#
# Version: torch 2.13.0. Seen on 2026-11-30.
# Guess: without reorder_for_peak_memory, Inductor runs the operators of a graph in the order in which they were traced.
# Seen: without gradients, the pass reorder_for_locality first moves operators down to their first readers. Here, small sums that
# are read at the end move behind all layers, so every layer's wide value lives until then: 6.3 MB instead of 1.1 MB. With both
# settings off, or with both on, the peak is 1.1 MB. A graph whose author has chosen its order, such as one that computes values
# again, needs reorder_for_locality=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch._inductor import config

ROWS, WIDE, LAYERS = 64, 4096, 6


def infer(x, down, up):
    sums = []
    for narrowing, widening in zip(down, up):
        wide = x @ widening
        sums.append((wide @ wide.t()[:, :1]).sum(0))  # read at the end
        x = torch.tanh(wide @ narrowing)
    return x, torch.cat(sums)


def peak(**settings):
    torch.compiler.reset()
    with torch.no_grad(), config.patch(force_disable_caches=True, **settings):
        compiled = torch.compile(infer)
        compiled(x, down, up)
        with torch.profiler.profile(profile_memory=True) as profiled:
            compiled(x, down, up)
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


x = torch.randn(ROWS, ROWS)
up = [torch.randn(ROWS, WIDE) / ROWS for _ in range(LAYERS)]
down = [torch.randn(WIDE, ROWS) / WIDE for _ in range(LAYERS)]
default, moved = peak(), peak(reorder_for_peak_memory=False)
kept = peak(reorder_for_peak_memory=False, reorder_for_locality=False)
print(f"default {default}; without reorder_for_peak_memory {moved}; without both {kept}")
assert kept == default < 2 * 2**20
assert moved > 5 * kept
PY
echo "as described: operators of an inference run right before their first readers"
