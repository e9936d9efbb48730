#!/usr/bin/env bash
# A checkpointed torch.cond or map trains in eager mode, and is refused under torch.compile; so is a checkpointed scan.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: torch.cond exists for compiled code, so a compiled step with torch.utils.checkpoint around a torch.cond is its main use.
# Seen: "There was no rule registered for HigherOrderOperator cond and mode …_CachingTorchDispatchMode". To tag operators, a compiled
# checkpoint traces them under the mode of selective checkpointing, even without a policy. This mode knows invoke_subgraph, and
# neither cond, scan nor map. Without torch.utils.checkpoint each compiles; an associative_scan compiles with it too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as each
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint


def cell(state, row):
    state = torch.tanh(state + row)
    return state, state.clone()


parts = {
    "cond": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "map_impl": lambda x: each(torch.sin, x),
    "scan": lambda x: scan(cell, torch.zeros(8), x)[1],
    "associative_scan": lambda x: associative_scan(torch.mul, x, 0, combine_mode="generic"),
}


def train(part, checkpointed, compiled):
    """The error that one step ends in, or an empty text."""

    def step(x):
        y = torch.exp(x)
        return (checkpoint(part, y, use_reentrant=False) if checkpointed else part(y)).sum()

    torch.compiler.reset()
    try:
        (torch.compile(step, backend="aot_eager") if compiled else step)(torch.ones(4, 8, requires_grad=True)).backward()
    except torch._dynamo.exc.BackendCompilerFailed as error:
        return str(error.inner_exception)
    return ""


for name, part in parts.items():
    error = train(part, checkpointed=True, compiled=True)
    print(f"{name}: {error[:100] or 'compiled'}")
    assert train(part, checkpointed=False, compiled=True) == ""
    if name == "associative_scan":
        assert error == ""
    else:
        assert error.startswith(f"There was no rule registered for HigherOrderOperator {name} and mode")
    if name != "scan":  # which eager checkpointing refuses with another message
        assert train(part, checkpointed=True, compiled=False) == ""
PY
