"""Compute the schedule that follows from a decision, in the node order of the passes, and its bytes alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from remat.graph.joint import split_outputs
from remat.graph.problems.forward_order import forward_sorted
from remat.graph.problems.lowering import SavedKind
from remat.graph.problems.schedule_lowering import LoweredSchedule, lower_schedule
from remat.planning.context import GraphContext
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT
from remat.planning.search.pool import CandidatePool
from remat.solvers.graph.problem import GraphProblem, always_saved, evaluate
from remat.solvers.schedule.problem import ScheduleEvaluator

#: Key of saved bytes among prices and bytes alive. All other keys are program points: positions in the joint graph.
SAVED = -1


class Schedules:
    """Decisions on one prepared graph, each with its schedule and the schedule's peak.

    Args:
        context: the prepared graph.
        step: the schedule problem by which peaks are computed; None: the graph's own schedule problem.

    Attributes:
        context: the prepared graph.
        problem: the graph problem.
        seen: the candidates that `candidate` returned.
        is_given: whether the caller gave the schedule problem, in which peaks are not the simulated peaks.
    """

    def __init__(self, context: GraphContext, step: LoweredSchedule | None = None) -> None:
        self.context, self._given = context, step
        self._state, self._lowered = context.state, context.lowered
        self.problem: GraphProblem = context.lowered.problem
        self.is_given = step is not None
        self.seen = CandidatePool[Candidate]()
        self._always = always_saved(self.problem)
        self._uses: dict[frozenset[int], tuple[list[int], list[int], list[int]]] = {}

    @cached_property
    def lowered_schedule(self) -> LoweredSchedule:
        """The schedule problem, and the map from its nodes to those of the joint graph."""
        state = self._state
        return self._given or lower_schedule(state.joint, state.index, state.roles, self._lowered)

    @cached_property
    def least_possible(self) -> int:
        """Lower bound, in bytes, on the peak of every schedule of the step."""
        return self.lowered_schedule.least_peak

    def start(self, candidate: Candidate) -> tuple[Sequence[int], int]:
        """Return the schedule of a candidate, and the position where backward begins."""
        if candidate.schedule is not None:
            return candidate.schedule
        sequence, _, boundary = self.schedule(candidate.saved)
        return sequence, boundary

    @cached_property
    def _runs_of(self) -> list[tuple[int, ...]]:
        """For each node of the joint graph: the nodes of the schedule problem that stand for the node's first run."""
        # Two nodes for a random operator whose generator state is saved, and none for a view.
        return [self.lowered_schedule.runs_of(node.name) for node in self._state.index.nodes]

    @cached_property
    def _evaluator(self) -> ScheduleEvaluator:
        """Evaluator that computes the bytes alive over a schedule of the schedule problem."""
        return ScheduleEvaluator(self.lowered_schedule.problem)

    @cached_property
    def _roots(self) -> tuple[int, ...]:
        """Positions in the joint graph of the nodes that backward runs under every decision."""
        closure = self._state.roles.tangent_closure
        return tuple(i for i, late in enumerate(closure) if late)

    def schedule(self, saved: Iterable[int]) -> tuple[list[int], list[int], int]:
        """Return the schedule of a decision, in the node order of the passes.

        Args:
            saved: nodes of the graph problem that the decision saves.

        Returns:
            Three items: for each run in order, its node of the schedule problem; for each run, its program point; and
            the position among the runs where backward begins. A run's program point is the position in the joint graph
            of the node itself, or of the node of backward for which a recomputation runs.
        """
        lowered, index, roles = self._lowered, self._state.index, self._state.roles
        keep = {lowered.position[i] for i in saved if lowered.kind[i] is SavedKind.VALUE}
        inputs, runs_of = index.inputs, self._runs_of
        forward = bytearray(roles.required_forward)
        stack = [i for i in keep if not forward[i]]
        while stack:
            i = stack.pop()
            if not forward[i]:
                forward[i] = 1
                stack.extend(inputs[i])
        sequence = [*self.lowered_schedule.copies]  # copies of inputs run first
        program_points = [0] * len(sequence)
        for i in self.forward_order:
            if forward[i]:
                sequence += runs_of[i]
                program_points += [i] * len(runs_of[i])
        boundary = len(sequence)
        placed = bytearray(len(index))
        for i in (*keep, *roles.placeholders):
            placed[i] = 1

        def place(i: int, program_point: int) -> None:
            placed[i] = 1
            missing, todo = [i], [j for j in inputs[i] if not placed[j]]
            while todo:
                j = todo.pop()
                if not placed[j]:
                    placed[j] = 1
                    missing.append(j)
                    todo.extend(k for k in inputs[j] if not placed[k])
            for j in sorted(missing) if len(missing) > 1 else missing:
                # The last entry is the operator. An entry before it saves the generator state, which was saved already.
                if runs_of[j]:
                    sequence.append(runs_of[j][-1])
                    program_points.append(program_point)

        for i in self._roots:
            if not placed[i]:
                place(i, i)
        for i in self._outputs:  # what is recomputed for a returned gradient alone comes last
            if not placed[i]:
                place(i, len(index))
        return sequence, program_points, boundary

    @cached_property
    def forward_order(self) -> list[int]:
        """Positions in the joint graph of all nodes that forward may run, in the order in which it runs them."""
        state = self._state
        early = (i for i, late in enumerate(state.roles.tangent_closure) if not late)
        return forward_sorted(early, state.index, state.roles, state.storages)

    @cached_property
    def _outputs(self) -> tuple[int, ...]:
        """Positions in the joint graph of the gradients that backward returns."""
        _, gradients, _, _ = split_outputs(self._state.joint)
        position = self._state.index.position
        return tuple(position[v] for v in gradients if v in position)

    def candidate(self, saved: Iterable[int]) -> Candidate:
        """Return a decision as a candidate with its saved bytes, cost and bytes alive; results are cached.

        Args:
            saved: nodes of the graph problem that the decision saves.

        Raises:
            ProblemError: a node that backward needs is neither saved nor recomputable.
        """
        solution = evaluate(self.problem, {*saved, *self._always})
        candidate = self.seen.cached(solution.saved)
        if candidate is None:
            sequence, program_points, boundary = self.schedule(solution.saved)
            # Several runs share a program point, whose bytes are the most bytes alive at any of the runs.
            bytes_alive = self._evaluator.evaluate(sequence, boundary).bytes_alive
            most = {SAVED: solution.saved_bytes}
            for program_point, nbytes in zip(program_points, bytes_alive, strict=True):
                if nbytes > most.get(program_point, 0):
                    most[program_point] = nbytes
            candidate = Candidate(
                lowered=self._lowered,
                saved=solution.saved,
                saved_bytes=solution.saved_bytes,
                cost=solution.recompute_cost,
                alive=most,
                peak_bytes=max(bytes_alive, default=0),
            )
            self.seen.add(candidate)
        return candidate

    def highest(self, candidate: Candidate) -> tuple[int, ...]:
        """Divide backward into up to `Effort.stretches` parts; return where each part has the most bytes alive.

        The candidate must come from the method `candidate`, which computes the bytes alive.
        """
        late = self._state.roles.tangent_closure
        runs = [m for m in candidate.alive if 0 <= m < len(late) and late[m]]
        length = max(1, -(-len(runs) // DEFAULT.stretches))
        stretches = (runs[i : i + length] for i in range(0, len(runs), length))
        return tuple(max(stretch, key=lambda m: candidate.alive[m]) for stretch in stretches)

    def uses(
        self, checkpoints: frozenset[int] = frozenset()
    ) -> tuple[list[int], list[int], list[int]]:
        """Return where each node of the graph problem is computed, and where backward uses it first and last.

        Recomputation counts as a use: a value is also used where backward first uses a value computed from it.

        Args:
            checkpoints: nodes of the graph problem that are saved in any case, so that their inputs are not used to
                recompute them.

        Returns:
            Three lists of positions in the joint graph, with one entry per node of the graph problem. First, where the
            value is computed; for a value that forward does not need itself, this is the start of backward. Second and
            third, the first and the last use in backward. For a value that backward never uses, the first use is the
            length of the graph, and the last use is -1.
        """
        if checkpoints in self._uses:
            return self._uses[checkpoints]
        lowered, index, roles = self._lowered, self._state.index, self._state.roles
        owner = self._state.storages.owner
        checkpointed = {lowered.position[i] for i in checkpoints}
        end = len(index)
        first, last = [end] * end, [-1] * end
        # Readers come after the node, so their uses are known. A reader of forward that is recomputed uses its inputs where
        # it is used first itself; a saved one is not recomputed.
        for i in range(end - 1, -1, -1):
            for u in index.users[i]:
                if roles.tangent_closure[u]:
                    first[i], last[i] = min(first[i], u), max(last[i], u)
                elif u not in checkpointed:
                    first[i], last[i] = (
                        min(first[i], first[u]),
                        max(last[i], first[u] if first[u] < end else -1),
                    )
            if owner[i] != i:  # a view keeps its base alive
                first[owner[i]] = min(first[owner[i]], first[i])
                last[owner[i]] = max(last[owner[i]], last[i])
        begin = [p if roles.required_forward[p] else roles.first_late for p in range(end)]
        position = lowered.position
        uses = self._uses[checkpoints] = (
            [begin[p] for p in position],
            [first[p] for p in position],
            [last[p] for p in position],
        )
        return uses
