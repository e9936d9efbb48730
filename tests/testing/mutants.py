"""Solvers that are wrong, each in one way: three of PyTorch's, and faults that we planted."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any, ClassVar

from remat.errors import BudgetError
from remat.solvers import Answer, KnapsackProblem, Solver, Status
from remat.solvers.graph.lagrangian import Lagrangian
from remat.solvers.knapsack.dp import DynamicProgram
from remat.solvers.knapsack.native import Native
from remat.solvers.solution import ScheduleAnswer


class FromTorch(Solver):
    """One of PyTorch's knapsacks, called as its partitioner calls it: sizes and room in shares.

    Source: ``torch/_functorch/_activation_checkpointing/knapsack.py``.
    """

    function: ClassVar[str]
    time_limit = False

    def solve(self, problem, **kwargs):
        from torch._functorch._activation_checkpointing import knapsack

        total = problem.total_weight or 1
        memory = [weight / total for weight in problem.weights]
        runtimes = [float(value) for value in problem.values]
        room = min(1.0, problem.capacity / total)
        return getattr(knapsack, self.function)(memory, runtimes, room)[1]


class TorchGreedy(FromTorch):
    name, function = "torch-greedy", "greedy_knapsack"


class TorchIlp(FromTorch):
    name, function, exact = "torch-ilp", "ilp_knapsack", True


class TorchDp(FromTorch):
    name, function = "torch-dp", "dp_knapsack"


class Sound(Solver):
    """No mutant: what the others are made of. Proves nothing, and is quick."""

    name = "sound"

    def solve(self, problem, *, time_limit=None):
        return self.choose(problem)

    def choose(self, problem):
        return list(DynamicProgram().solve(problem).saved)


def without(problem: KnapsackProblem, *, capacity: int) -> KnapsackProblem:
    return KnapsackProblem(problem.weights, problem.values, capacity)


class StrictRoom(Sound):
    """Takes "at most" for "less than"."""

    name, exact = "strict-room", True

    def choose(self, problem):
        return super().choose(without(problem, capacity=max(0, problem.capacity - 1)))


class Int32(Sound):
    """Keeps weights in 32 bits."""

    name = "int32"

    def choose(self, problem):
        weights = [weight % 2**32 for weight in problem.weights]
        return super().choose(KnapsackProblem(weights, problem.values, problem.capacity))


class RoundsToDoubles(Sound):
    """OR-Tools' SAT, called through its linear solver, which compares within a tolerance."""

    name = "rounds-to-doubles"

    def choose(self, problem):
        from ortools.linear_solver import pywraplp

        model = pywraplp.Solver.CreateSolver("SAT")
        picks = [model.BoolVar(f"x{i}") for i in range(len(problem))]
        weight, value = (
            sum(number * pick for number, pick in zip(numbers, picks, strict=True))
            for numbers in (problem.weights, problem.values)
        )
        model.Add(weight <= problem.capacity)
        model.Maximize(value)
        model.Solve()
        return [i for i, pick in enumerate(picks) if pick.solution_value() > 0.5]


class DropsWeightless(Sound):
    """Takes what weighs nothing for worthless, and calls the rest optimal."""

    name, exact = "drops-weightless", True

    def choose(self, problem):
        return [i for i in super().choose(problem) if problem.weights[i]]


class GreedyCalledOptimal(Sound):
    """Fills up in order of efficiency and says that nothing is better."""

    name = "greedy-called-optimal"

    def solve(self, problem, **kwargs):
        order = sorted(
            range(len(problem)), key=lambda i: (-problem.values[i] / (problem.weights[i] or 0.5), i)
        )
        saved, room = [], problem.capacity
        for i in order:
            if problem.weights[i] <= room:
                saved.append(i)
                room -= problem.weights[i]
        value = problem.value_of(saved)
        return Answer(saved, value, value=value, status=Status.OPTIMAL)


class OptimalOfTheFirst(Sound):
    """Right as long as the items come in order of weight: it never looks at the last ones."""

    name, exact = "optimal-of-the-first", True

    def choose(self, problem):
        order = list(range(len(problem)))
        heavy = [i for i in order[4:] if problem.weights[i] < problem.weights[0]]
        kept = [i for i in order if i not in heavy] if len(order) < 100 else order
        inner = KnapsackProblem(
            [problem.weights[i] for i in kept], [problem.values[i] for i in kept], problem.capacity
        )
        return [kept[i] for i in super().choose(inner)]


class HashOrder(Sound):
    """Walks a set of text, so the answer follows the hash seed."""

    name = "hash-order"

    def choose(self, problem):
        saved, room = [], problem.capacity
        for label in {str(i) for i in range(len(problem))}:
            if problem.weights[int(label)] <= room:
                saved.append(int(label))
                room -= problem.weights[int(label)]
        return saved


class Remembers(Sound):
    """Keeps state between calls."""

    name = "remembers"
    calls = 0

    def choose(self, problem):
        type(self).calls += 1
        chosen = super().choose(problem)
        return chosen[1:] if self.calls % 2 else chosen


class IgnoresTheClock(Sound):
    """Comes back when it is done."""

    name = "ignores-the-clock"

    def solve(self, problem, *, time_limit=None):
        if time_limit is not None and len(problem) >= 1_000:
            time.sleep(3_600.0)
        return self.choose(problem)


class Chatty(Sound):
    """Prints its progress."""

    name = "chatty"

    def choose(self, problem):
        print("searching")
        return super().choose(problem)


class Recursive(Sound):
    """Calls itself once per item."""

    name = "recursive"

    def choose(self, problem):
        def take(i: int, room: int) -> list[int]:
            if i == len(problem):
                return []
            weight = problem.weights[i]
            return [i, *take(i + 1, room - weight)] if weight <= room else take(i + 1, room)

        return take(0, problem.capacity)


class RefusesEverything(Sound):
    """Cannot be wrong."""

    name = "refuses-everything"

    def refuses(self, problem):
        return "not my kind of problem"


class LiesAboutItsLimit(Sound):
    """Says that it holds 62 bits, and refuses what has 60."""

    name = "lies-about-its-limit"
    integer_limit = 2**62

    def refuses(self, problem):
        return "too large for me" if problem.total_weight > 2**59 else None


# Of graphs ---------------------------------------------------------------------------------------


class SoundGraphs(Solver):
    """No mutant: what the others are made of. Proves nothing."""

    name = "sound-graphs"

    def solve_graph(self, problem, *, time_limit=None):
        found = Lagrangian().solve_graph(self.seen(problem), time_limit=time_limit)
        return list(found.saved)

    def seen(self, problem):
        return problem


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


# Of steps ----------------------------------------------------------------------------------------


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


class Forgets(SoundSteps):
    """Sees other fields than those of the problem."""

    fields: ClassVar[dict[str, Any]] = {}

    def seen(self, problem):
        return dataclasses.replace(problem, **self.fields)


class ForgetsExtra(Forgets):
    name, fields = "forgets-extra", {"extra": ()}


class ForgetsResident(Forgets):
    name, fields = "forgets-resident", {"resident": 0}


class ForgetsOrder(Forgets):
    name, fields = "forgets-order", {"ordered": ()}


class ForgetsOnce(Forgets):
    name, fields = "forgets-once", {"once": ()}


class ForgetsTheEnd(Forgets):
    name, fields = "forgets-the-end", {"to_end": ()}


class ForgetsTheBoundary(SoundSteps):
    """Takes forward and backward for one."""

    name = "forgets-the-boundary"

    def seen(self, problem):
        given = (*problem.at_start, *problem.at_boundary)
        return dataclasses.replace(problem, forward=(), backward=(), at_boundary=(), at_start=given)


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
