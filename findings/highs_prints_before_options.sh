#!/usr/bin/env bash
# highspy 1.16 prints two lines when a solver object is created, before any option can turn its output off.
#
# Version: highspy 1.16.0. Seen on 2026-11-30. highspy 1.13.1 prints nothing there.
# Guess: Highs() is silent, or setOptionValue("output_flag", False) right after it keeps standard output clean.
# Seen: the constructor prints the version and the licence to file descriptor 1, so sys.stdout cannot catch them, and a program
# that writes JSON to standard output has two other lines in front.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"

printed() {
    "$folder/venv/bin/pip" install --quiet "highspy==$1"
    "$folder/venv/bin/python" - <<'PY'
import contextlib, io
import highspy

with contextlib.redirect_stdout(io.StringIO()):
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    x = solver.addVariable(lb=0, ub=1)
    solver.maximize(x)
PY
}

old=$(printed 1.13.1)
new=$(printed 1.16.0)
printf '1.13.1: "%s"\n1.16.0: "%s"\n' "$old" "$new"
test -z "$old"
test "$(wc -l <<<"$new")" -eq 2
