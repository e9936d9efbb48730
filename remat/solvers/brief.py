"""Instances of the search solvers, each limited to a twentieth of its usual work.

Tables that compare all solvers use these instances. A solver that searches until it has a proof may
take minutes for one graph of a few hundred nodes. With these limits a table takes seconds. The
limits count operations instead of seconds, so the same input always gives the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from remat.solvers.base import Solver
from remat.solvers.graph.lagrangian import Lagrangian
from remat.solvers.graph.milp import GraphMilp
from remat.solvers.knapsack.cpsat import CpSat
from remat.solvers.knapsack.milp import Milp
from remat.solvers.knapsack.pulp_cbc import PulpCbc

#: Number by which the usual work is divided; the help and tables of the command line show it.
PARTS = 20

#: The search solvers with less work, by name. A limit keeps its type: CP-SAT's limit in
#: deterministic seconds is a float, and the other limits are ints.
BRIEF: Mapping[str, Solver] = {
    solver.name: replace(solver, **{limit: type(of)(of / PARTS)})
    for solver, limit in (
        (Milp(), "nodes"),
        (PulpCbc(), "nodes"),
        (CpSat(), "work"),
        (Lagrangian(), "work"),
        (GraphMilp(), "nodes"),
    )
    for of in (getattr(solver, limit),)
}
