"""The cheapest decision found whose step stays within a peak: prices on moments, then one value at a time.

With a price on every byte at every moment, instead of a capacity, what to keep is a minimum cut. The prices
follow the moments at which the step is over the peak (a subgradient search, its steps as Polyak's), and the
best decision that fits is then filled up: whatever is cheaper to keep, and fits, is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from remat.graph import ops
from remat.graph.costs import CostModel
from remat.graph.joint import split_outputs
from remat.graph.lowering import Decision, Lowered, SavedKind
from remat.graph.step_lowering import LoweredStep, lower_step
from remat.graph.writes import written_by
from remat.passes.core.state import Costs, State
from remat.passes.split.arrangement import arrange
from remat.solvers.annealing import improve
from remat.solvers.flow import Network
from remat.solvers.graph_problem import GraphProblem, evaluate
from remat.solvers.kernel import kernel
from remat.solvers.schedule_problem import ScheduleProblem, evaluate_schedule, least_peak

#: Cuts that the prices take at most.
_CUTS = 40
#: Nodes that all evaluations together may walk over.
_WORK = 800_000
#: Evaluations that there are at least.
_LEAST = 120
#: Prices and costs sum to less than this, so that every flow fits 64-bit integers.
_ROOM = 2**58
#: Stretches of backward in each of which a bound is looked for.
_STRETCHES = 12
#: Edits of a schedule that are tried in one turn, for each run, and at most.
MOVES_PER_NODE, MOST_MOVES = 3_000, 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A decision and what it comes to.

    Attributes:
        saved: positions in the graph problem.
        cost: cost of what runs twice.
        peak_bytes: of the schedule that it stands for.
        over: for each moment, bytes that are alive then.
    """

    saved: tuple[int, ...]
    cost: int
    peak_bytes: int
    over: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordered:
    """A decision with an order of its own.

    Attributes:
        decision: the decision.
        cost: cost of what runs again.
        peak_bytes: of its schedule.
    """

    decision: Decision
    cost: int
    peak_bytes: int


class PeakSearch:
    """Searches the decisions of one prepared graph by the peaks of their schedules.

    Args:
        state: the prepared graph.
        lowered: its graph problem, with costs.
        cost: the cost model.
    """

    def __init__(self, state: State, lowered: Lowered, cost: CostModel) -> None:
        self._state, self._lowered, self._cost = state, lowered, cost
        self.problem: GraphProblem = lowered.problem
        self._evaluations = 0
        self._seen: dict[tuple[int, ...], Tried] = {}

    @cached_property
    def _step(self) -> LoweredStep:
        state, problem = self._state, self.problem
        random = [
            problem.names[i].split(":")[0]
            for i, k in enumerate(self._lowered.kind)
            if k is SavedKind.GENERATOR_STATE
        ]
        costs = state.get(Costs(self._cost))
        return lower_step(
            state.joint,
            state.index,
            state.roles,
            costs,
            problem.unit,
            self._snapshots,
            recomputed=random,
            once=self._once,
        )

    @cached_property
    def _snapshots(self) -> Decision:
        """A decision that keeps all copies of inputs there can be, and nothing else."""
        kinds = enumerate(self._lowered.kind)
        return self._lowered.decision(i for i, kind in kinds if kind is SavedKind.SNAPSHOT)

    @cached_property
    def _once(self) -> frozenset[int]:
        """Positions that may not run again: as the graph problem says, and all that reads a tangent."""
        lowered, problem = self._lowered, self.problem
        at = lowered.of_position
        late = self._state.roles.tangent_closure
        return frozenset(
            i for i in range(len(at)) if late[i] or (at[i] >= 0 and not problem.recomputable[at[i]])
        )

    @cached_property
    def may_reorder(self) -> bool:
        """Whether a schedule of the step problem can be carried out whatever order it has.

        Not where memory is written to, unless by forward to an input and nobody reads it afterwards, or
        where something must not be kept.
        """
        state, lowered, problem = self._state, self._lowered, self.problem
        index = state.index
        if state.storages.rewritten or kernel() is None:
            return False
        writing = [i for i, p in enumerate(index.plain) if not p and ops.is_mutating(index.nodes[i])]
        if any(
            index.users[i]
            or state.roles.tangent_closure[i]
            or any(w.op != "placeholder" for w in written_by(index.nodes[i]))
            for i in writing
        ):
            return False
        runs = {index.by_name[n] for n in self._step.of_name if n in index.by_name}
        return all(
            problem.savable[i] or isinstance(index.values[at], (tuple, list)) or at not in runs
            for i, at in enumerate(lowered.position)
            if lowered.kind[i] is SavedKind.VALUE and at not in writing
        )

    @cached_property
    def _free(self) -> ScheduleProblem:
        """The step problem without further runs of what stays to the end: they would stand for it."""
        problem = self._step.problem
        stay = {problem.maker(i) for i in problem.to_end}.intersection(problem.runnable)
        return replace(problem, once=tuple(sorted(stay.union(problem.once))))

    def reordered(self, tried: Tried, peak_bytes: int) -> Reordered | None:
        """A cheaper schedule than that of a decision: other orders, further runs; None if none was found.

        Args:
            tried: the decision; its schedule may be above the peak.
            peak_bytes: the peak.
        """
        if not self.may_reorder:
            return None
        sequence, _, boundary = self.schedule(tried.saved)
        problem = self._free.within(peak_bytes)
        moves = min(MOST_MOVES, MOVES_PER_NODE * len(sequence))
        compiled = kernel()
        assert compiled is not None
        found, at = improve(compiled, problem, sequence, boundary, moves=moves)
        done = evaluate_schedule(problem, found, at)
        cost = done.cost - sum(problem.cost)
        over = tried.peak_bytes > peak_bytes
        if done.peak_bytes > peak_bytes or not (over or cost < tried.cost):
            return None
        decision = self.decision_of(found, at)
        return decision and Reordered(decision=decision, cost=cost, peak_bytes=done.peak_bytes)

    def decision_of(self, sequence: Sequence[int], boundary: int) -> Decision | None:
        """A schedule of the step problem as a decision; None where it cannot be carried out."""
        forward, backward = self._step.orders(sequence, boundary)
        state, index, lowered = self._state, self._state.index, self._lowered
        orders = Decision(
            saved=(),
            snapshots=self._snapshots.snapshots,
            forward_order=forward,
            backward_order=backward,
        )
        arranged = arrange(state.joint, index, state.roles, orders)
        savable = self.problem.savable
        if not all(savable[lowered.of_position[i]] for i in arranged.read) or self._reads_late(
            arranged.forward
        ):
            return None
        return replace(
            orders,
            saved=tuple(index.nodes[i].name for i in sorted(arranged.read)),
            snapshots=tuple(index.nodes[i].name for i in sorted(arranged.snapshots)),
        )

    def _reads_late(self, forward: Sequence[int]) -> bool:
        """Whether forward reads an input after it has written to it."""
        index, owner = self._state.index, self._state.storages.owner
        gone: set[int] = set()
        for i in forward:
            if gone.intersection(owner[j] for j in index.inputs[i]):
                return True
            if not index.plain[i]:
                gone.update(owner[index.position[w]] for w in written_by(index.nodes[i]))
        return False

    @property
    def least_possible(self) -> int:
        """Bytes that every schedule of the step has alive at some moment."""
        return least_peak(self._step.problem)[0]

    @cached_property
    def _network(self) -> Network:
        return Network(self.problem)

    # ---- from a decision to its schedule ------------------------------------------------------------
    @cached_property
    def _runs_of(self) -> list[tuple[int, ...]]:
        """Nodes of the step problem that run where a position of the joint graph does first."""
        return [self._step.runs_of(node.name) for node in self._state.index.nodes]

    @cached_property
    def _roots(self) -> tuple[int, ...]:
        """Positions that backward runs in any case."""
        closure = self._state.roles.tangent_closure
        return tuple(i for i, late in enumerate(closure) if late)

    @cached_property
    def _first_late(self) -> int:
        """The first position that reads a tangent."""
        index, roles = self._state.index, self._state.roles
        tangents = (i for i, role in roles.placeholders.items() if role.in_backward)
        return min((u for i in tangents for u in index.users[i]), default=len(index))

    def schedule(self, saved: Iterable[int]) -> tuple[list[int], list[int], int]:
        """The schedule of a decision, as the passes arrange it, the moment of each run, and the boundary.

        A moment is a position of the joint graph: of the run itself in forward, of the next run of
        backward's own in backward.
        """
        lowered, index, roles = self._lowered, self._state.index, self._state.roles
        keep = {lowered.position[i] for i in saved if lowered.kind[i] is SavedKind.VALUE}
        inputs, late, runs_of = index.inputs, roles.tangent_closure, self._runs_of
        forward = bytearray(roles.required_forward)
        stack = [i for i in keep if not forward[i]]
        while stack:
            i = stack.pop()
            if not forward[i]:
                forward[i] = 1
                stack.extend(inputs[i])
        sequence = self._step.copies
        moments = [0] * len(sequence)
        for i, runs in enumerate(runs_of):
            if forward[i] and not late[i]:
                sequence += runs
                moments += [i] * len(runs)
        boundary = len(sequence)
        placed = bytearray(len(index))
        for i in (*keep, *roles.placeholders):
            placed[i] = 1

        def place(i: int, moment: int) -> None:
            missing, todo = [], [i]
            while todo:
                j = todo.pop()
                if not placed[j]:
                    placed[j] = 1
                    missing.append(j)
                    todo.extend(inputs[j])
            for j in sorted(missing):
                if runs_of[j]:
                    sequence.append(runs_of[j][-1])
                    moments.append(moment)

        for i in self._roots:
            if i >= self._first_late and not placed[i]:
                place(i, i)
        for i in self._outputs:
            if not placed[i]:
                place(i, len(index))
        return sequence, moments, boundary

    @cached_property
    def _outputs(self) -> tuple[int, ...]:
        _, gradients, _, _ = split_outputs(self._state.joint)
        position = self._state.index.position
        return tuple(position[v] for v in gradients if v in position)

    @cached_property
    def _always(self) -> tuple[int, ...]:
        """What can only be saved, or costs nothing to save; where nobody reads it, it counts for nothing."""
        p = self.problem
        return tuple(
            i for i in range(len(p)) if p.savable[i] and (not p.recomputable[i] or not p.size[i])
        )

    def tried(self, saved: Iterable[int]) -> Tried:
        """What a decision comes to."""
        done = evaluate(self.problem, {*saved, *self._always})
        found = self._seen.get(done.saved)
        if found is None:
            sequence, moments, boundary = self.schedule(done.saved)
            bytes_alive = evaluate_schedule(self._step.problem, sequence, boundary).bytes_alive
            most: dict[int, int] = {}
            for moment, nbytes in zip(moments, bytes_alive, strict=True):
                if nbytes > most.get(moment, 0):
                    most[moment] = nbytes
            found = self._seen[done.saved] = Tried(
                saved=done.saved,
                cost=done.recompute_cost,
                peak_bytes=max(bytes_alive, default=0),
                over=most,
            )
        return found

    def highest(self, tried: Tried) -> tuple[int, ...]:
        """Runs of backward while which most is alive: the highest in each of `_STRETCHES` stretches of it."""
        late = self._state.roles.tangent_closure
        runs = [m for m in tried.over if m < len(late) and late[m]]
        length = max(1, -(-len(runs) // _STRETCHES))
        stretches = (runs[i : i + length] for i in range(0, len(runs), length))
        return tuple(max(stretch, key=lambda m: tried.over[m]) for stretch in stretches)

    def _spent(self) -> bool:
        return len(self._seen) > self._evaluations

    # ---- search -------------------------------------------------------------------------------------
    def within(self, peak_bytes: int, starts: Iterable[Iterable[int]]) -> Tried:
        """The cheapest decision found within a peak.

        Args:
            peak_bytes: the peak.
            starts: decisions that may or may not be within it; at least one.

        Returns:
            A decision; where none was found within the peak, the one of the least peak.
        """

        self._evaluations = len(self._seen) + max(_LEAST, _WORK // max(1, len(self._state.index)))

        def rank(tried: Tried) -> tuple[bool, int, int]:
            over = tried.peak_bytes > peak_bytes
            return over, tried.peak_bytes if over else tried.cost, tried.cost

        best = min(map(self.tried, starts), key=rank)
        fits = best.peak_bytes <= peak_bytes
        most = max(1, 2 * best.cost if not fits else best.cost)
        prices: dict[int, float] = {}
        step, idle = 1.0, 0
        for _ in range(_CUTS):
            found = self.tried(self._cut(prices))
            if rank(found) < rank(best):
                best, idle = found, 0
                if best.peak_bytes <= peak_bytes:
                    fits, most = True, max(1, best.cost)
            else:
                idle += 1
                if idle % 4 == 0:
                    step /= 2
            slope = {
                m: b - peak_bytes for m, b in found.over.items() if b > peak_bytes or m in prices
            }
            length = float(sum(s * s for s in slope.values()))
            if not length or self._spent():
                break
            value = found.cost + sum(prices.get(m, 0.0) * s for m, s in slope.items())
            move = step * max(most - value, 0.02 * most) / length
            prices = {m: p for m, s in slope.items() if (p := prices.get(m, 0.0) + move * s) > 0}
        return self._filled(best, peak_bytes) if fits else best

    @cached_property
    def _uses(self) -> tuple[list[int], list[int], list[int]]:
        """For each node of the graph problem: where its value begins, and its first and last use in backward.

        Where backward itself does not read it, that is where those that are computed from it are first used.
        """
        lowered, index, roles = self._lowered, self._state.index, self._state.roles
        owner = self._state.storages.owner
        end = len(index)
        first, last = [end] * end, [-1] * end
        for i in range(end - 1, -1, -1):
            for u in index.users[i]:
                if roles.tangent_closure[u]:
                    first[i], last[i] = min(first[i], u), max(last[i], u)
                else:
                    first[i], last[i] = (
                        min(first[i], first[u]),
                        max(last[i], first[u] if first[u] < end else -1),
                    )
            if owner[i] != i:
                first[owner[i]] = min(first[owner[i]], first[i])
                last[owner[i]] = max(last[owner[i]], last[i])
        begin = [p if roles.required_forward[p] else self._first_late for p in range(end)]
        position = lowered.position
        return (
            [begin[p] for p in position],
            [first[p] for p in position],
            [last[p] for p in position],
        )

    def _cut(self, prices: dict[int, float]) -> tuple[int, ...]:
        """The decision that is best at such prices of a byte at each moment."""
        problem = self.problem
        moments = sorted(prices)
        sums = [0.0]
        for m in moments:
            sums.append(sums[-1] + prices[m])

        def priced(low: int, high: int) -> float:
            return sums[bisect_left(moments, high + 1)] - sums[bisect_left(moments, low)]

        begin, first, last = self._uses
        keep, again = [], []
        for i, nbytes in enumerate(problem.size):
            keep.append(nbytes * priced(begin[i], last[i]) if nbytes and prices else 0.0)
            held = nbytes * priced(first[i], last[i]) if nbytes and prices else 0.0
            again.append((problem.cost[i] if problem.in_forward[i] else 0) + held)
        scale = min(2.0**20, _ROOM / max(1.0, sum(keep) + sum(again)))
        return self._network.cut(
            [int(x * scale) for x in keep], [int(x * scale) for x in again]
        ).saved

    def _filled(self, best: Tried, peak_bytes: int) -> Tried:
        """Keeps more, the dearest per byte first, as long as the peak holds; then one instead of another."""
        problem = self.problem
        rate = [problem.cost[i] / (1 + problem.size[i]) for i in range(len(problem))]

        def better(saved: tuple[int, ...]) -> bool:
            nonlocal best
            found = self.tried(saved)
            if found.peak_bytes > peak_bytes or found.cost >= best.cost:
                return False
            best = found
            return True

        while True:
            before = best
            again = [
                i
                for i in evaluate(problem, best.saved).recomputed
                if problem.savable[i] and problem.cost[i] and problem.in_forward[i]
            ]
            again.sort(key=lambda i: (-rate[i], i))
            for i in again:
                if self._spent():
                    return best
                if i not in best.saved:
                    better((*best.saved, i))
            if best is not before:
                continue
            kept = [i for i in best.saved if problem.size[i] and problem.recomputable[i]]
            kept.sort(key=lambda i: (rate[i], i))
            for i, j in ((i, j) for i in again for j in kept if problem.cost[j] < problem.cost[i]):
                if self._spent():
                    return best
                if better((*(k for k in best.saved if k != j), i)):
                    break
            if best is before:
                return best
