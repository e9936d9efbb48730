"""Solvers of the step problem that are wrong, each in one way."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time

from remat.errors import BudgetError
from remat.solvers.base import Solver
from remat.solvers.native import Native
from remat.solvers.solution import ScheduleAnswer


class SoundSteps(Solver):
    """No mutant: what the others are made of. Proves nothing."""

    name = "sound-steps"

    def solve_schedule(self, problem, *, time_limit=None):
        found = Native().solve_schedule(self.seen(problem), time_limit=time_limit)
        return list(found.sequence)

    def seen(self, problem):
        return problem


class KeepsEverything(SoundSteps):
    """Runs all once, whatever that takes."""

    name = "keeps-everything"

    def solve_schedule(self, problem, *, time_limit=None):
        return problem.order


class ForgetsExtra(SoundSteps):
    """Knows of no bytes that a run takes besides."""

    name = "forgets-extra"

    def seen(self, problem):
        return dataclasses.replace(problem, extra=())


class ForgetsResident(SoundSteps):
    """Takes the whole capacity for itself."""

    name = "forgets-resident"

    def seen(self, problem):
        return dataclasses.replace(problem, resident=0)


class ForgetsOrder(SoundSteps):
    """Moves random draws past each other."""

    name = "forgets-order"

    def seen(self, problem):
        return dataclasses.replace(problem, ordered=())


class ForgetsOnce(SoundSteps):
    """Runs again what may run once."""

    name = "forgets-once"

    def seen(self, problem):
        return dataclasses.replace(problem, once=())


class ForgetsTheEnd(SoundSteps):
    """Drops what is to stay."""

    name = "forgets-the-end"

    def seen(self, problem):
        return dataclasses.replace(problem, to_end=())


class ForgetsTheBoundary(SoundSteps):
    """Takes forward and backward for one."""

    name = "forgets-the-boundary"

    def seen(self, problem):
        given = (*problem.at_start, *problem.at_boundary)
        return dataclasses.replace(problem, forward=(), backward=(), at_boundary=(), at_start=given)


class Backwards(SoundSteps):
    """Runs readers before what they read."""

    name = "backwards"

    def solve_schedule(self, problem, *, time_limit=None):
        return super().solve_schedule(problem)[::-1]


class LeavesOneOut(SoundSteps):
    """Never runs the last node."""

    name = "leaves-one-out"

    def solve_schedule(self, problem, *, time_limit=None):
        return super().solve_schedule(problem)[:-1]


class RunsForEver(SoundSteps):
    """Returns a sequence without an end."""

    name = "runs-for-ever"

    def solve_schedule(self, problem, *, time_limit=None):
        return itertools.cycle(super().solve_schedule(problem))


class OptimalByItsWord(SoundSteps):
    """Calls whatever it found the least."""

    name = "optimal-by-its-word"

    def solve_schedule(self, problem, *, time_limit=None):
        found = super().solve_schedule(problem)
        twice = [i for i in found if i not in problem.once and problem.cost[i]][:1]
        # A run more than it takes, right after the first, still is a schedule.
        at = found.index(twice[0]) + 1 if twice else 0
        found[at:at] = twice
        return ScheduleAnswer(found, bound=sum(problem.cost[i] for i in found))


class FindsNothing(SoundSteps):
    """Cannot be wrong."""

    name = "finds-nothing"

    def solve_schedule(self, problem, *, time_limit=None):
        raise BudgetError("no schedule was found")


class DrawsAnew(SoundSteps):
    """Another answer every time."""

    name = "draws-anew"

    def solve_schedule(self, problem, *, time_limit=None):
        found = super().solve_schedule(problem)
        free = [i for i in range(len(found)) if not problem.inputs[found[i]]]
        at = random.choice(free)
        return [*found[:at], *[found[at]] * (1 + random.randrange(50)), *found[at + 1 :]]


class StepsBySetOrder(SoundSteps):
    """Walks a set of text, so the answer follows the hash seed."""

    name = "steps-by-set-order"

    def solve_schedule(self, problem, *, time_limit=None):
        found = super().solve_schedule(problem)
        labels = {str(v) for v in found if not problem.inputs[v]}
        at = found.index(int(next(iter(labels))))
        return [*found[: at + 1], *found[at:]]


class StepsIgnoreTheClock(SoundSteps):
    """Comes back when it is done."""

    name = "steps-ignore-the-clock"

    def solve_schedule(self, problem, *, time_limit=None):
        if time_limit is not None and len(problem) > 100:
            time.sleep(3_600.0)
        return super().solve_schedule(problem)


class ChattySteps(SoundSteps):
    """Prints its progress."""

    name = "chatty-steps"

    def solve_schedule(self, problem, *, time_limit=None):
        print("searching")
        return super().solve_schedule(problem)
