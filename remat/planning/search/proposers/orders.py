"""Propose cheaper schedules within a peak, or schedules with a lower peak.

A schedule lists the nodes of a step in the order in which they run, where some nodes run again. The search is simulated
annealing: it edits a schedule by moving, adding and removing runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from remat.errors import BudgetError, RefusalError
from remat.graph import ops
from remat.graph.memory.writes import written_by
from remat.graph.problems.lowering import Decision, SavedKind
from remat.graph.problems.replays import is_element, maker_of
from remat.graph.problems.schedule_lowering import LoweredSchedule
from remat.passes.split.arrangement import arrange
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT
from remat.planning.search.schedules import Schedules
from remat.solvers.base import Solver
from remat.solvers.kernel import kernel
from remat.solvers.run import run
from remat.solvers.schedule.annealing import improve
from remat.solvers.schedule.copies import Copy, with_copies
from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule


class Orders:
    """Search for schedules of one prepared graph that are cheaper within a peak, or that have a lower peak.

    Each search begins with a schedule that the caller gives.

    Args:
        schedules: the decisions of the graph, with the schedule problem. A schedule may save a copy of every input that
            may change, and the random generator's state for every random operator.
    """

    def __init__(self, schedules: Schedules) -> None:
        self._schedules, context = schedules, schedules.context
        self._state, self._lowered = context.state, context.lowered
        self._problem = schedules.problem

    @property
    def lowered_schedule(self) -> LoweredSchedule:
        """The schedule problem, and the map from its nodes to those of the joint graph."""
        return self._schedules.lowered_schedule

    @cached_property
    def _free(self) -> ScheduleProblem:
        """A copy of the schedule problem in which values that must stay alive are computed only once."""
        # In the schedule problem, the value of a later run replaces that of an earlier run.
        problem, index = self.lowered_schedule.problem, self._state.index
        # A second run of an operator that returns a tuple computes all elements again, even those that may only be
        # saved. So the rule includes such operators. Decisions without node orders may run them again, because the
        # passes keep the saved element.
        rows = zip(self._lowered.position, self._problem.recomputable, strict=True)
        again = {at for at, may_run_again in rows if may_run_again}
        elements = (n for i, n in enumerate(index.nodes) if is_element(n) and i not in again)
        makers = {
            v for node in elements for v in self.lowered_schedule.runs_of(maker_of(node).name)
        }
        stay = {problem.maker(i) for i in problem.to_end}.intersection(problem.runnable)
        return replace(problem, once=tuple(sorted(stay.union(makers, problem.once))))

    @cached_property
    def is_possible(self) -> bool:
        """Whether node orders can be searched, which requires the compiled C++ kernel and a true `can_be_ordered`."""
        return kernel() is not None and self.can_be_ordered

    @cached_property
    def can_be_ordered(self) -> bool:
        """Whether the graph's nodes can run in any order that respects the dependencies between their values."""
        state, problem, index = self._state, self._problem, self._state.index
        if state.storages.rewritten:
            return False
        # Forward may write to inputs that no node reads afterwards.
        writing = [
            i for i, p in enumerate(index.plain) if not p and ops.is_mutating(index.nodes[i])
        ]
        if any(
            index.users[i]
            or state.roles.tangent_closure[i]
            or any(w.op != "placeholder" for w in written_by(index.nodes[i]))
            for i in writing
        ):
            return False
        runs = {index.by_name[n] for n in self.lowered_schedule.of_name if n in index.by_name}
        return all(
            problem.savable[i] or isinstance(index.values[at], (tuple, list)) or at not in runs
            for i, at in enumerate(self._lowered.position)
            if self._lowered.kind[i] is SavedKind.VALUE and at not in writing
        )

    def search_within(
        self, start: Candidate, peak_bytes: int, *, share: float = 1.0
    ) -> list[Candidate]:
        """Search for cheap schedules within a limit on the peak.

        Args:
            start: the candidate whose schedule is edited. The candidate's peak may exceed the limit.
            peak_bytes: limit on the peak, in bytes.
            share: number of edits of the schedule to try, as a ratio of the usual number.

        Returns:
            The schedules of `improved`, in the same order, as candidates. Schedules that cannot be executed are left
            out. Peaks of the candidates may exceed the limit. The list may be empty.
        """
        schedules = self.improved(*self._schedules.start(start), peak_bytes, share=share)
        return [d for schedule in schedules if (d := self._candidate(*schedule))]

    def solved(
        self,
        solver: Solver,
        start: Candidate,
        peak_bytes: int,
        time_limit: float | None = None,
    ) -> Candidate | None:
        """Let a solver find a schedule within a limit on the peak; return the schedule as a candidate, or None.

        Args:
            solver: a solver that implements `solve_schedule`.
            start: a candidate whose schedule the solver may start from. The candidate's peak may exceed the limit.
            peak_bytes: limit on the peak, in bytes.
            time_limit: seconds for the solver; None: no limit.

        Returns:
            The solver's schedule as a candidate. None if the solver finds no schedule or refuses the problem, or if
            the schedule cannot be executed.

        Raises:
            SolverError: the solver raises an error, or its answer is wrong.
        """
        if not self.can_be_ordered or peak_bytes < self.lowered_schedule.least_peak:
            return None
        sequence, _ = self._schedules.start(start)
        first_runs = [sequence[p] for p in self._runs_once(sequence)]
        problem = self._free.within(peak_bytes).with_hints([first_runs])
        try:
            solution = run(solver, problem, time_limit=time_limit)
        except (BudgetError, RefusalError):  # the other proposers go on without this solver
            return None
        candidate = self._candidate(solution.sequence, solution.boundary)
        if candidate is None:
            return None
        return candidate.with_provenance(deterministic=solution.deterministic)

    def lowest(self, starts: Iterable[Candidate], per_run: int) -> Candidate | None:
        """Search for the schedule with the least peak, starting from given candidates and then from the best result.

        Args:
            starts: the candidates whose schedules are edited.
            per_run: edits that each search tries for each run of a schedule.

        Returns:
            The schedule as a candidate; None if no schedule was found that can be executed.
        """
        best: Candidate | None = None
        low = 0
        todo = [*map(self._schedules.start, starts)]
        for _ in range(DEFAULT.edits.lower):
            lowest: Candidate | None = None
            for sequence, boundary in todo:
                high = evaluate_schedule(
                    self.lowered_schedule.problem, sequence, boundary
                ).peak_bytes
                # `low` is 0 at first, then extrapolated from the peak that the last round reached.
                aim = (low + high) // 2
                moves = DEFAULT.edits.least(len(sequence), per_run)
                better = self.improved(sequence, boundary, aim, moves=moves)
                decided = next(
                    filter(None, (self._candidate(*schedule) for schedule in better)), None
                )
                if decided and (lowest is None or decided.peak_bytes < lowest.peak_bytes):
                    lowest, reached = decided, max(low, 2 * decided.peak_bytes - high)
            if lowest is None or (best and lowest.peak_bytes >= best.peak_bytes):
                break
            assert lowest.schedule is not None, "a decided schedule is kept"
            best, low, todo = lowest, reached, [lowest.schedule]
        return best

    def improved(
        self,
        sequence: Sequence[int],
        boundary: int,
        peak_bytes: int,
        copies: Sequence[Copy] = (),
        *,
        share: float = 1.0,
        moves: int | None = None,
    ) -> list[tuple[Sequence[int], int]]:
        """Search for cheap schedules within a peak or, if none is found, for schedules with a lower peak.

        Args:
            sequence: the schedule to start from: for each run in order, a node of the schedule problem.
            boundary: position in ``sequence`` where backward begins.
            peak_bytes: limit on the peak, in bytes.
            copies: offloaded values. Each offloaded value is off the device between two positions in ``sequence``.
            share: number of edits of the schedule to try, as a ratio of the usual number.
            moves: number of edits to try; None: the number that follows from ``share``.

        Returns:
            The given schedule and the schedules that were found. Schedules within the limit come first, cheapest first;
            the others follow, lowest peak first. Each schedule is returned as a pair: the schedule in the form of
            ``sequence``, and the position where backward begins. The list is empty if `is_possible` is False.
        """
        if not self.is_possible:
            return []
        # Estimates may lead a caller to a limit below 0. Like 0, such a limit asks for the schedule with the lowest
        # peak.
        problem = self._free.within(max(0, peak_bytes))
        allowed = self._runs_once(sequence)
        start, boundary = [sequence[p] for p in allowed], bisect_left(allowed, boundary)
        copied = [
            replace(c, freed=bisect_left(allowed, c.freed), fetched=bisect_left(allowed, c.fetched))
            for c in copies
        ]
        changed = with_copies(problem, start, boundary, copied)
        edits = DEFAULT.edits
        usual = edits.usual(len(start), share) if moves is None else moves
        count = edits.allowed(usual, len(start))
        better = improve(changed.problem, changed.sequence, changed.boundary, moves=count)
        return [changed.invert(*schedule) for schedule in better]

    def _runs_once(self, sequence: Sequence[int]) -> list[int]:
        """Return the positions of runs in a schedule, without repeated runs of nodes that must run only once."""
        # The passes may run an operator again although `_free` forbids it: one element of its tuple is needed again, and
        # another may only be saved.
        once = {*self._free.once}
        # In reverse order, so that the first run of each node is entered last.
        first = {v: p for p, v in reversed([*enumerate(sequence)])}
        return [p for p, v in enumerate(sequence) if first[v] == p or v not in once]

    def _candidate(self, sequence: Sequence[int], boundary: int) -> Candidate | None:
        """Convert a schedule to a candidate with its cost and peak; None if the schedule cannot be executed."""
        decision = self.decision_of(sequence, boundary)
        evaluation = evaluate_schedule(self.lowered_schedule.problem, sequence, boundary)
        # `done.cost` also counts the first run of every node, which is no recomputation.
        cost = evaluation.cost - sum(self.lowered_schedule.problem.cost)
        if decision is None:
            return None
        candidate = Candidate.of(self._lowered, decision, cost)
        return replace(candidate, peak_bytes=evaluation.peak_bytes, schedule=(sequence, boundary))

    def decision_of(self, sequence: Sequence[int], boundary: int) -> Decision | None:
        """Convert a schedule to a decision with node orders; None if the schedule cannot be executed."""
        forward, backward = self.lowered_schedule.orders(sequence, boundary)
        state, index, lowered = self._state, self._state.index, self._lowered
        kinds = zip(lowered.kind, lowered.position, strict=True)
        orders = Decision(
            saved=(),
            snapshots=tuple(index.nodes[i].name for kind, i in kinds if kind is SavedKind.SNAPSHOT),
            forward_order=forward,
            backward_order=backward,
        )
        arranged = arrange(state, orders)
        savable = self._problem.savable
        # Forward hands over what backward reads, so each of these values must be savable.
        if self._reads_late(arranged.forward) or not all(
            savable[lowered.of_position[i]] for i in arranged.read
        ):
            return None
        return replace(
            orders,
            saved=tuple(index.nodes[i].name for i in sorted(arranged.read)),
            snapshots=tuple(index.nodes[i].name for i in sorted(arranged.snapshots)),
        )

    def _reads_late(self, forward: Sequence[int]) -> bool:
        """Return whether forward reads an input after writing to it."""
        index, owner = self._state.index, self._state.storages.owner
        gone: set[int] = set()
        for i in forward:
            if gone.intersection(owner[j] for j in index.inputs[i]):
                return True
            if not index.plain[i]:
                gone.update(owner[index.position[w]] for w in written_by(index.nodes[i]))
        return False
