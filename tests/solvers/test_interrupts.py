"""Ctrl-C ends a search of the compiled kernel, of CP-SAT and of HiGHS."""

from __future__ import annotations

import subprocess
import sys

import pytest

from remat.solvers.kernel import kernel

pytestmark = pytest.mark.skipif(kernel() is None, reason="the kernel is not compiled here")

ANNEALING = """
from remat.solvers.schedule.problem import evaluate_schedule
from remat.testing.steps import layered
problem = layered(400, width=0.2, seed=1)
capacity = evaluate_schedule(problem, range(400)).peak_bytes * 7 // 10
def search(): remat.solve(problem.within(capacity))
"""
FRONTIER = """
from remat.solvers.knapsack.frontier import knapsack_frontier
from remat.testing.families import family
problem = family("strongly-correlated", items=9_000, span=10**9, share=50, seed=3)
def search(): knapsack_frontier(problem, most_points=5_000_000)
"""
CP_SAT = """
from remat.testing.families import family
# A solver that replaces the handler of signals would kill the process, or lose the signal, at the second problem.
remat.solve(family("weakly-correlated", items=3, span=1_000, share=50, seed=1), "cpsat")
problem = family("inverse-strongly-correlated", items=1_000, span=10**7, share=50, seed=1)
def search(): remat.solve(problem, "cpsat")
"""
HIGHS = """
from remat.testing.families import family
# Imports SciPy, so that the signal does not come during an import.
remat.solve(family("weakly-correlated", items=3, span=1_000, share=50, seed=1), "milp")
problem = family("strongly-correlated", items=5_000, span=10**9, share=50, seed=1)
def search(): remat.solve(problem, "milp", time_limit=300)
"""
RUN = """
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try: search()
except KeyboardInterrupt: print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "search", [ANNEALING, FRONTIER, CP_SAT, HIGHS], ids=["annealing", "frontier", "cpsat", "milp"]
)
def test_an_interrupt_ends_a_search(search: str) -> None:
    code = f"import os, signal, threading, remat\n{search}{RUN}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
