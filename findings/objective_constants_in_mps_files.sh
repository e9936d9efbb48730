#!/usr/bin/env bash
# An MPS file with a constant in its objective has three optimal values: one for HiGHS and SCIP, one for GLPK, one for python-mip.
#
# Version: highspy 1.16.0, PySCIPOpt 6.3.0, swiglpk 5.0.13, mip 2.0.0. Seen on 2026-11-30.
# Guess: a knapsack that one solver writes to a file has the same optimum in every solver that reads the file.
# Seen: of a program with the optimum 5 and the constant 10, HiGHS's file is 5 for HiGHS and SCIP, -15 for GLPK, -5 for python-mip.
# The constant goes into the right-hand side of the objective row. HiGHS and SCIP give the number the sign that a right-hand side has,
# GLPK takes it as the constant itself, and python-mip, which reads by CBC, reports none. No reader warns, and all choose the same
# items. GLPK's own file, in turn, is -15 for HiGHS and SCIP.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet highspy==1.16.0 pyscipopt==6.3.0 swiglpk==5.0.13 mip==2.0.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import highspy
import mip
import pyscipopt
import swiglpk as glpk

glpk.glp_term_out(glpk.GLP_OFF)


def silent():
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    return model


def highs(path):
    model = silent()
    model.readModel(path)
    model.run()
    return model.getObjectiveValue()


def scip(path):
    model = pyscipopt.Model()
    model.hideOutput()
    model.readProblem(path)
    model.optimize()
    return model.getObjVal()


def glpk_problem(path):
    problem = glpk.glp_create_prob()
    assert glpk.glp_read_mps(problem, glpk.GLP_MPS_FILE, None, path) == 0
    return problem


def glpk_optimum(path):
    problem, options = glpk_problem(path), glpk.glp_iocp()
    glpk.glp_init_iocp(options)
    options.presolve = glpk.GLP_ON
    glpk.glp_intopt(problem, options)
    return glpk.glp_mip_obj_val(problem)


def python_mip(path):
    model = mip.Model()
    model.verbose = 0
    model.read(path)
    model.optimize()
    return model.objective_value


def optima(path):
    found = [read(path) for read in (highs, scip, glpk_optimum, python_mip)]
    print(path, dict(zip(("HiGHS", "SCIP", "GLPK", "python-mip"), found)))
    return [round(value) for value in found]


program = silent()
x, y = program.addBinary(name="x"), program.addBinary(name="y")
program.addConstr(2 * x + 3 * y <= 5)
program.minimize(10 - 3 * x - 2 * y)
assert round(program.getObjectiveValue()) == 5
program.writeModel("highs.mps")
assert optima("highs.mps") == [5, 5, -15, -5]

problem = glpk_problem("highs.mps")
glpk.glp_set_obj_coef(problem, 0, 10)
glpk.glp_write_mps(problem, glpk.GLP_MPS_FILE, None, "glpk.mps")
assert optima("glpk.mps") == [-15, -15, 5, -5]
PY
