#!/usr/bin/env bash
# After the backward of a custom operator was edited, torch.compile trains on with the old backward, without a message.
#
# Version: torch 2.13.0. Seen on 2026-11-30. Known upstream as issue 144344 of PyTorch.
# Guess: another backward is another step, so a new process compiles it anew.
# Seen: the second process has the gradient of the first. The key of AOTAutograd's cache names the operator, and not the
# function given to register_autograd.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/step.py" <<'PY'
import sys

import torch


@torch.library.custom_op("finding::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * float(sys.argv[1]))
x = torch.ones(4, requires_grad=True)
torch.compile(lambda x: twice(x).sum())(x).backward()
print(x.grad[0].item())
PY
run() {
    TORCHINDUCTOR_CACHE_DIR="$folder/$1" "$folder/venv/bin/python" -W ignore "$folder/step.py" "$2"
}
first=$(run cache 2) second=$(run cache 20) fresh=$(run another 20)
echo "gradient by 2: $first; edited to 20: $second; edited, with an empty cache: $fresh"
[ "$first" = 2.0 ] && [ "$second" = 2.0 ] && [ "$fresh" = 20.0 ]
