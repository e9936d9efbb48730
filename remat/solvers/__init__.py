"""This package contains solvers, the problems that they solve, and their verified solutions.

Each solver has its own module. Importing this package imports neither torch nor any solver back
end.
"""

from remat.solvers.base import Solver as Solver
from remat.solvers.base import unavailable as unavailable
from remat.solvers.problem import KnapsackProblem as KnapsackProblem
from remat.solvers.run import run as run
from remat.solvers.solution import Answer as Answer
from remat.solvers.solution import Solution as Solution
from remat.solvers.solution import Status as Status
from remat.solvers.verify import verify as verify
