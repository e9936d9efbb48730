#!/usr/bin/env bash
# PyTorch's solver for selective checkpointing asks to install PuLP if PuLP 4 is installed.
#
# Version: torch 2.13.0 with PuLP 4.2.0 on Python 3.12; with PuLP 3.3.2 the solver is imported. Seen on 2026-11-30.
# Guess: torch.distributed._tools.sac_ilp takes the newest PuLP, since it names no upper bound and PyTorch does not pin PuLP.
# Seen: "Please install pulp package". The module imports LpStatus and PULP_CBC_CMD by name. PuLP 4 has neither, and any ImportError
# is taken for a missing package, so the message sends the reader to install what is there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
PYENV_VERSION=3.12.1 python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy pulp==3.3.2
solver="import torch.distributed._tools.sac_ilp"
"$folder/venv/bin/python" -W ignore -c "$solver"
"$folder/venv/bin/pip" install --quiet pulp==4.2.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import pulp

try:
    import torch.distributed._tools.sac_ilp
except ImportError as error:
    message = str(error)
else:
    message = "imported"
missing = [name for name in ("LpProblem", "LpStatus", "LpVariable", "PULP_CBC_CMD", "lpDot") if not hasattr(pulp, name)]
print(f"PuLP {pulp.__version__}: {message} It lacks {missing}.")
assert message.startswith("Please install pulp package.")
assert missing == ["LpStatus", "PULP_CBC_CMD"]
PY
