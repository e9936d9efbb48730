"""Create instances of the search solvers, each with a twentieth of its usual work, for tables of all solvers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from remat.solvers.base import Solver
from remat.solvers.graph.lagrangian import Lagrangian
from remat.solvers.graph.milp import GraphMilp
from remat.solvers.knapsack.cpsat import CpSat
from remat.solvers.knapsack.milp import Milp
from remat.solvers.knapsack.pulp_cbc import PulpCbc

#: Number by which a solver's usual work is divided. A search until a proof may take minutes for one graph of a few
#: hundred nodes; with less work, a table of all solvers takes seconds. The command line shows the number.
PARTS = 20

#: The search solvers with a twentieth of their usual work, as a dict from names. A limit keeps its type: CP-SAT's
#: limit in deterministic seconds is a float, and the other limits are ints.
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
