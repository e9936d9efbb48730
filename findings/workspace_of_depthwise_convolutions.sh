#!/usr/bin/env bash
# The stride of a weight's dimension of size 1 decides how much memory the backward of a depthwise convolution takes.
#
# Version: torch 2.13.0 on a CPU. Seen on 2026-11-29.
# Guess: no element has an index other than 0 in a dimension of size 1, so its stride changes nothing.
# Seen: aten.convolution_backward takes ten times the memory beside its results if the weight (32, 1, 7, 7) has the strides
# (49, 1, 7, 1) instead of (49, 49, 7, 1). Both describe the same numbers in the same places, and both are contiguous.
# The former are those of .to(memory_format=torch.channels_last). Results are equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PY'
import itertools

import torch
from torch.profiler import ProfilerActivity, profile


def beside_results(run):
    """Most bytes that are alive while a call runs, less the bytes that are alive when it returns."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        results = run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = [*itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))]
    del results
    return max(alive) - alive[-1]


x, gradient, weight = torch.randn(2, 32, 28, 28), torch.randn(2, 32, 28, 28), torch.randn(32, 1, 7, 7)
taken, results = [], []
for strides in ((49, 49, 7, 1), (49, 1, 7, 1)):
    same = weight.as_strided(weight.shape, strides)
    assert same.is_contiguous() and same.data_ptr() == weight.data_ptr() and torch.equal(same, weight)

    def backward():
        options = [32], [1, 1], [3, 3], [1, 1], False, [0, 0], 32, [True, True, True]
        return torch.ops.aten.convolution_backward(gradient, x, same, *options)

    taken.append(beside_results(backward))
    results.append(backward())
    print(f"strides {strides}: {taken[-1]:,} bytes beside the results")
assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(*results))
assert taken[1] > 5 * taken[0]
PY
