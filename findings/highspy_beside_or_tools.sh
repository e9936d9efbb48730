#!/usr/bin/env bash
# highspy 1.15 and OR-Tools 9.15 cannot be imported in one process: the second import is an ImportError, in either order.
#
# Version: highspy 1.15.1, ortools 9.15.6755. Seen on 2026-11-30. highspy 1.13.1 and 1.16.0 do not clash.
# Guess: two wheels bring their own copies of HiGHS, and do not see each other.
# Seen: both ship a shared library named libhighs.so.1, of different versions. The loader gives the second wheel the library
# that the first one loaded, which lacks symbols that the second wheel needs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ortools==9.15.6755 highspy==1.15.1

second_import() {
    "$folder/venv/bin/python" - "$1" "$2" <<'PY'
import importlib, sys

first, second = sys.argv[1:]
importlib.import_module(first)
try:
    importlib.import_module(second)
except ImportError as error:
    print(f"{second} after {first}: {type(error).__name__}: …{str(error)[-70:]}")
else:
    raise SystemExit(f"{second} after {first} is imported: this changed")
PY
}

second_import highspy ortools.sat.python.cp_model
second_import ortools.sat.python.cp_model highspy
"$folder/venv/bin/pip" install --quiet highspy==1.16.0
"$folder/venv/bin/python" -c "import highspy; from ortools.sat.python import cp_model; print('1.16.0: both imported')"
