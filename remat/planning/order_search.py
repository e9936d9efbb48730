"""Search node orders and further runs for a schedule that is cheaper within a peak, or has a lower peak."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from remat.errors import BudgetError, RefusalError
from remat.graph import ops
from remat.graph.costs import CostModel
from remat.graph.lowering import Decision, Lowered, SavedKind
from remat.graph.step_lowering import LoweredStep, lower_step
from remat.graph.writes import written_by
from remat.passes.core.state import Costs, State
from remat.passes.split.arrangement import arrange
from remat.planning.candidates import Candidate
from remat.solvers.annealing import improve
from remat.solvers.base import Solver
from remat.solvers.copies import Copy, with_copies
from remat.solvers.kernel import kernel
from remat.solvers.run import run
from remat.solvers.schedule_problem import ScheduleProblem, evaluate_schedule

#: Edits of a schedule that are tried in one turn, for each run, and at most.
MOVES_PER_RUN, MOST_MOVES = 6_000, 2_000_000
#: Runs beyond which fewer are tried, since each takes longer.
_MANY_RUNS = 25_000
#: How often a lower peak is looked for, each time with this share of the edits: with all, peaks were within 0.5 % of
#: those, and once 4 % lower, in four times the time.
_LOWER, _LOWER_SHARE = 3, 0.25


class OrderSearch:
    """Searches the schedules of one prepared graph, from one that is given.

    Args:
        state: the prepared graph.
        lowered: its graph problem, with costs.
        cost: the cost model.
    """

    def __init__(self, state: State, lowered: Lowered, cost: CostModel) -> None:
        self._state, self._lowered, self._cost = state, lowered, cost
        self._problem = lowered.problem

    @cached_property
    def step(self) -> LoweredStep:
        """The step problem: every copy of an input and every generator state may be kept."""
        state, problem, lowered = self._state, self._problem, self._lowered
        random = [
            problem.names[i].split(":")[0]
            for i, kind in enumerate(lowered.kind)
            if kind is SavedKind.GENERATOR_STATE
        ]
        late, at = state.roles.tangent_closure, lowered.of_position
        return lower_step(
            state.joint,
            state.index,
            state.roles,
            state.get(Costs(self._cost)),
            problem.unit,
            self._snapshots,
            recomputed=random,
            once=[
                i
                for i in range(len(at))
                if late[i] or (at[i] >= 0 and not problem.recomputable[at[i]])
            ],
        )

    @cached_property
    def _snapshots(self) -> Decision:
        """A decision that keeps all copies of inputs there can be, and nothing else."""
        kinds = enumerate(self._lowered.kind)
        return self._lowered.decision(i for i, kind in kinds if kind is SavedKind.SNAPSHOT)

    @cached_property
    def _free(self) -> ScheduleProblem:
        """The step problem without further runs of what stays to the end: they would stand for it."""
        problem = self.step.problem
        stay = {problem.maker(i) for i in problem.to_end}.intersection(problem.runnable)
        return replace(problem, once=tuple(sorted(stay.union(problem.once))))

    @cached_property
    def is_possible(self) -> bool:
        """Whether the native kernel exists and its schedules can be executed."""
        return kernel() is not None and self.can_be_ordered

    @cached_property
    def can_be_ordered(self) -> bool:
        """Whether every order of a schedule can be executed.

        Not where memory is written to, unless by forward to an input and nobody reads it afterwards, nor
        where something must not be kept.
        """
        state, problem, index = self._state, self._problem, self._state.index
        if state.storages.rewritten:
            return False
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
        runs = {index.by_name[n] for n in self.step.of_name if n in index.by_name}
        return all(
            problem.savable[i] or isinstance(index.values[at], (tuple, list)) or at not in runs
            for i, at in enumerate(self._lowered.position)
            if self._lowered.kind[i] is SavedKind.VALUE and at not in writing
        )

    def within(
        self, sequence: Sequence[int], boundary: int, peak_bytes: int, *, share: float = 1.0
    ) -> Candidate | None:
        """The cheapest schedule found within a peak, or the lowest one above it.

        Args:
            sequence: a schedule to start from, also one above the peak.
            boundary: position of its first run of backward.
            peak_bytes: the peak.
            share: of the usual number of edits.

        Returns:
            None where that cannot be carried out, or none can.
        """
        found = self.improved(sequence, boundary, peak_bytes, share=share)
        return found and self._decided(*found)

    def solved(
        self,
        solver: Solver,
        sequence: Sequence[int],
        peak_bytes: int,
        time_limit: float | None = None,
    ) -> Candidate | None:
        """A solver's own schedule within a peak; None if it finds none, refuses, or its schedule cannot be executed.

        Args:
            solver: has `solve_schedule`.
            sequence: a schedule that it may start from, also one above the peak.
            peak_bytes: the peak.
            time_limit: seconds for the solver.

        Raises:
            SolverError: it answers wrongly, or raises.
        """
        if not self.can_be_ordered:
            return None
        problem = self._free.within(peak_bytes).knowing([sequence])
        try:
            found = run(solver, problem, time_limit=time_limit)
        except (BudgetError, RefusalError):
            return None
        made = self._decided(found.sequence, found.boundary)
        if made is None:
            return None
        choice = replace(made.choice, deterministic=found.deterministic)
        return replace(made, choice=choice)

    def lowest(self, sequence: Sequence[int], boundary: int) -> Candidate | None:
        """The schedule of the least peak found from another one; None as in `within`."""
        best: Candidate | None = None
        low = 0
        for _ in range(_LOWER):
            high = evaluate_schedule(self.step.problem, sequence, boundary).peak_bytes
            found = self.improved(sequence, boundary, (low + high) // 2, share=_LOWER_SHARE)
            decided = found and self._decided(*found)
            if not found or not decided or (best and decided.peak_bytes >= best.peak_bytes):
                break
            best, (sequence, boundary) = decided, found
            low = max(low, 2 * decided.peak_bytes - high)
        return best

    def improved(
        self,
        sequence: Sequence[int],
        boundary: int,
        peak_bytes: int,
        copies: Sequence[Copy] = (),
        *,
        share: float = 1.0,
    ) -> tuple[Sequence[int], int] | None:
        """A cheaper or lower schedule within a peak, and its boundary; None if no schedule can be executed.

        Args:
            sequence: the schedule to start from.
            boundary: position of its first run of backward.
            peak_bytes: the peak.
            copies: what is away between forward and backward, by positions of that schedule.
            share: of the usual number of edits.
        """
        compiled = kernel()
        if compiled is None or not self.is_possible:
            return None
        problem = self._free.within(peak_bytes)
        # An operator of which one result stays to the end and another is made again is kept whole.
        once = {*problem.once}
        first = {v: p for p, v in reversed([*enumerate(sequence)])}
        kept = [p for p, v in enumerate(sequence) if first[v] == p or v not in once]
        start, boundary = [sequence[p] for p in kept], bisect_left(kept, boundary)
        copied = [
            replace(c, sent=bisect_left(kept, c.sent), fetched=bisect_left(kept, c.fetched))
            for c in copies
        ]
        changed = with_copies(problem, start, boundary, copied)
        moves = min(MOST_MOVES, MOVES_PER_RUN * len(start))
        moves = int(share * moves * min(1.0, _MANY_RUNS / max(1, len(start))) ** 2)
        better = improve(compiled, changed.problem, changed.sequence, changed.boundary, moves=moves)
        return changed.invert(*better)

    def _decided(self, sequence: Sequence[int], boundary: int) -> Candidate | None:
        decision = self.decision_of(sequence, boundary)
        done = evaluate_schedule(self.step.problem, sequence, boundary)
        cost = done.cost - sum(self.step.problem.cost)
        if decision is None:
            return None
        made = Candidate.of(self._lowered, decision, cost)
        return replace(made, peak_bytes=done.peak_bytes, schedule=(sequence, boundary))

    def decision_of(self, sequence: Sequence[int], boundary: int) -> Decision | None:
        """Convert a schedule of the step problem to a decision; None if it cannot be executed."""
        forward, backward = self.step.orders(sequence, boundary)
        state, index, lowered = self._state, self._state.index, self._lowered
        orders = Decision(
            saved=(),
            snapshots=self._snapshots.snapshots,
            forward_order=forward,
            backward_order=backward,
        )
        arranged = arrange(state, orders)
        savable = self._problem.savable
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
        """Whether forward reads an input after writing to it."""
        index, owner = self._state.index, self._state.storages.owner
        gone: set[int] = set()
        for i in forward:
            if gone.intersection(owner[j] for j in index.inputs[i]):
                return True
            if not index.plain[i]:
                gone.update(owner[index.position[w]] for w in written_by(index.nodes[i]))
        return False
