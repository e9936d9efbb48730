#!/usr/bin/env bash
# MathOpt's Python API ends in a ValueError if a search proves that no solution is better than the cutoff.
#
# Version: OR-Tools 9.15.6755 on Python 3.11. Seen on 2026-11-30.
# Guess: with SolveParameters(cutoff_limit=…), a search that finds nothing better ends with NO_SOLUTION_FOUND and a limit that says so.
# Seen: "12 is not a valid Limit", for CP-SAT and for SCIP. 12 is LIMIT_CUTOFF in MathOpt's own protocol, and the Python enum Limit
# ends at 11. A cutoff that leaves a solution works. So the proof that a branch is no better, which cutoffs are for, is an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ortools==9.15.6755
"$folder/venv/bin/python" - <<'PY'
from ortools.math_opt import result_pb2
from ortools.math_opt.python import mathopt

values, weights = (60, 100, 120), (10, 20, 30)
model = mathopt.Model()
taken = [model.add_binary_variable() for _ in values]
model.add_linear_constraint(sum(w * x for w, x in zip(weights, taken)) <= 50)
model.maximize(sum(v * x for v, x in zip(values, taken)))


def search(solver, cutoff):
    try:
        result = mathopt.solve(model, solver, params=mathopt.SolveParameters(cutoff_limit=cutoff))
    except ValueError as error:
        return str(error)
    return result.termination.reason.name, result.objective_value()


for solver in (mathopt.SolverType.CP_SAT, mathopt.SolverType.GSCIP):
    worse, better = search(solver, 200), search(solver, 230)
    print(f"{solver.name}: cutoff 200: {worse}; cutoff 230: {better}")
    assert worse == ("OPTIMAL", 220)
    assert better == "12 is not a valid Limit"
assert result_pb2.LIMIT_CUTOFF == 12 and 12 not in {limit.value for limit in mathopt.Limit}
PY
