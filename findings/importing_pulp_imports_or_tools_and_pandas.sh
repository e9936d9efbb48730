#!/usr/bin/env bash
# `import pulp` of PuLP 4 imports OR-Tools' CP-SAT, and pandas with it, if OR-Tools is installed.
#
# Version: PuLP 4.2.0 with OR-Tools 9.15.6755 on Python 3.12. Seen on 2026-11-29.
# Guess: PuLP imports a solver when the solver is asked for, so `import pulp` is as fast as in PuLP 3.3.2 (0.02 s).
# Seen: `import pulp` takes 0.5 s of processor time, 0.2 s without OR-Tools.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
PYENV_VERSION=3.12.1 python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pulp==4.2.0 ortools==9.15.6755
"$folder/venv/bin/python" - <<'PY'
import subprocess
import sys
import time

started = time.process_time()
import pulp

print(f"import pulp {pulp.__version__}: {time.process_time() - started:.1f} s of processor time")
imported = {"ortools.sat.python.cp_model", "pandas"} & set(sys.modules)
print("also imported:", sorted(imported))
assert len(imported) == 2
hidden = "import sys; sys.modules['ortools.sat.python.cp_model'] = None; import pulp; print('pandas' in sys.modules)"
without = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True)
assert without.stdout == "False\n"
PY
