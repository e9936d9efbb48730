#!/usr/bin/env bash
# A copy of a module that model.compile() compiled runs in eager mode, without a message.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: copy.deepcopy(model), an average of weights (AveragedModel) and torch.load of the saved module compile as the model does.
# Seen: none of them does, because nn.Module leaves the compiled call out of copies and pickles. A copy of torch.compile(model)
# compiles. A direct call of model.forward(x) is eager too after model.compile(), and compiled after torch.compile(model).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/copies.py" <<'PY'
import copy
import io

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

count = 0


def counting(graph, inputs):
    global count
    count += 1
    return graph


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sin()


def graphs(call):
    global count
    torch.compiler.reset()
    count = 0
    call(torch.ones(2, 4))
    return count


def loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


in_place, wrapped = Net(), torch.compile(Net(), backend=counting)
in_place.compile(backend=counting)
found = {
    "model.compile()": graphs(in_place),
    "its deep copy": graphs(copy.deepcopy(in_place)),
    "its AveragedModel": graphs(AveragedModel(in_place)),
    "saved and loaded": graphs(loaded(in_place)),
    "its forward": graphs(in_place.forward),
    "torch.compile(model)": graphs(wrapped),
    "its deep copy (2)": graphs(copy.deepcopy(wrapped)),
    "its AveragedModel (2)": graphs(AveragedModel(wrapped)),
    "its forward (2)": graphs(wrapped.forward),
}
print(found)
assert list(found.values()) == [1, 0, 0, 0, 0, 1, 1, 1, 1]
PY
"$folder/venv/bin/python" -W ignore "$folder/copies.py"
