"""Instances of the solvers that search, each limited to a twentieth of its usual work.

Tables that compare all solvers use these instances. A solver that searches until it has a proof may
take minutes for one plan of a few hundred nodes. With these limits a table takes seconds. The
limits count operations instead of seconds, so the same input always gives the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from remat.solvers.base import Solver
from remat.solvers.cpsat import CpSat
from remat.solvers.graph_milp import GraphMilp
from remat.solvers.lagrangian import Lagrangian
from remat.solvers.milp import Milp
from remat.solvers.pulp_cbc import PulpCbc

#: Divisor of the usual work; the command's help and its tables show this number.
PARTS = 20

#: The search solvers with less work, by name. Limits on nodes stay ints, and CP-SAT's limit in
#: seconds stays a float.
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
