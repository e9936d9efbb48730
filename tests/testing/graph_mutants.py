"""Solvers of the graph problem that are wrong, each in one way."""

from __future__ import annotations

import dataclasses
import random
import time

from remat.solvers import Answer, Solver
from remat.solvers.lagrangian import Lagrangian


class SoundGraphs(Solver):
    """No mutant: what the others are made of. Proves nothing."""

    name = "sound-graphs"

    def solve_graph(self, problem, *, time_limit=None):
        found = Lagrangian().solve_graph(self.seen(problem), time_limit=time_limit)
        return list(found.saved)

    def seen(self, problem):
        return problem


class OverweightGraphs(SoundGraphs):
    """Rounds the capacity up to whole KiB."""

    name = "overweight-graphs"

    def seen(self, problem):
        return (
            problem
            if problem.capacity is None
            else problem.within(-(-problem.capacity // 1024) * 1024)
        )


class SavesWhatCannotBeSaved(SoundGraphs):
    """Takes every value for savable."""

    name = "saves-what-cannot-be-saved"

    def seen(self, problem):
        return dataclasses.replace(problem, savable=(True,) * len(problem))


class SavesTheLeast(SoundGraphs):
    """Recomputes all it can, whatever room there is."""

    name = "saves-the-least"

    def solve_graph(self, problem, *, time_limit=None):
        return [
            i for i in range(len(problem)) if problem.savable[i] and not problem.recomputable[i]
        ]


class OptimalGraphsByItsWord(SoundGraphs):
    """Calls whatever it found the least."""

    name = "optimal-graphs-by-its-word"

    def solve_graph(self, problem, *, time_limit=None):
        found = Lagrangian(work=0).solve_graph(problem.within(problem.capacity * 9 // 10))
        from remat.solvers.graph_problem import evaluate

        return Answer(found.saved, evaluate(problem, found.saved).recompute_cost)


class DrawsGraphsAnew(SoundGraphs):
    """Leaves something out, another node every time."""

    name = "draws-graphs-anew"

    def solve_graph(self, problem, *, time_limit=None):
        found = super().solve_graph(problem)
        free = [i for i in found if problem.recomputable[i]]
        return [i for i in found if not free or i != random.choice(free)]


class GraphsIgnoreTheClock(SoundGraphs):
    """Comes back when it is done."""

    name = "graphs-ignore-the-clock"

    def solve_graph(self, problem, *, time_limit=None):
        if time_limit is not None and len(problem) > 100:
            time.sleep(3_600.0)
        return super().solve_graph(problem)
