"""Search for the cheapest decision within a peak: by prices per program point, then value by value.

The peak is first replaced by prices (Lagrange multipliers): each byte that is alive at a program point costs the price
of this point. Under given prices, the best decision is a minimum cut. A subgradient search with Polyak's step size
raises the prices at the points where the step exceeds the peak. Then further values are saved, one at a time, in the
best decision that fits. Each value must make the decision cheaper, and the decision must still fit.

The cut assumes that a value is recomputed where backward first needs anything computed from it. If no value between
this value and the loss is saved, that is the start of backward, so recomputing seems to free no memory. If the search
finds no decision within the peak, it is repeated with checkpoints: values that divide forward into segments, and that
every cut saves. A value is then recomputed where backward first needs anything of its segment.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from remat.errors import ProblemError
from remat.graph.forward_order import forward_sorted
from remat.graph.joint import split_outputs
from remat.graph.lowering import Lowered, SavedKind
from remat.graph.step_lowering import LoweredStep
from remat.passes.core.state import State
from remat.planning.candidates import Candidate
from remat.planning.order_search import OrderSearch
from remat.solvers.flow import Network
from remat.solvers.graph_problem import GraphProblem, always_saved, evaluate, worth_saving
from remat.solvers.prices import price_between, search_by_prices
from remat.solvers.schedule_problem import ScheduleEvaluator

#: Maximum number of cuts of a search by prices: without checkpoints, and with checkpoints.
_CUTS, _CHECKPOINTED_CUTS = 40, 20
#: Most segments into which checkpoints divide forward.
_SEGMENTS = 256
#: Work of a search: number of its evaluations of decisions, times the number of nodes of the graph.
_WORK = 800_000
#: A search may always make this number of evaluations, even if the graph is so large that `_WORK` allows fewer.
_LEAST = 120
#: Key of saved bytes among prices and bytes alive. All other keys are program points: positions in the joint graph.
_SAVED = -1
#: Number of random changes that `_repaired` tries for each value that may be saved.
_DRAWS = 4
#: On graphs of more nodes, `within` does not call `_filled` if node orders can be searched.
_LARGE = 2_000
#: `_filled` tries at most this number of values in a row in vain if the step problem is the caller's: `FusedSearch` makes
#: many such searches, and a search of node orders follows each.
_MISSES = 6
#: Most parts into which `highest` divides backward.
_STRETCHES = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a decision: its peak in bytes and, unless ``capacity`` is None, its saved bytes."""

    peak_bytes: int
    capacity: int | None

    def at(self, moment: int) -> float:
        """Return the most bytes that may be alive at a program point.

        For the key `_SAVED`, which stands for no program point, return the most bytes that may be saved.
        """
        if moment != _SAVED:
            return self.peak_bytes
        return math.inf if self.capacity is None else self.capacity

    def excess(self, tried: Candidate) -> int:
        """Return the bytes by which a candidate exceeds the two limits, summed; 0 if it is within both."""
        over = max(0, tried.peak_bytes - self.peak_bytes)
        return over if self.capacity is None else over + max(0, tried.saved_bytes - self.capacity)

    def rank(self, tried: Candidate) -> tuple[int, int]:
        """Return a sort key that is least for the best candidate: (excess bytes, cost)."""
        return self.excess(tried), tried.cost


class PeakSearch:
    """Search over the decisions of one prepared graph, by the peaks of their schedules.

    The *graph problem* asks which nodes to save. The *step problem* asks which node runs when, and how often; its
    solution is a schedule. A decision names saved nodes; `schedule` makes a schedule of it.

    Args:
        state: the prepared graph, as `remat.planning.pipelines.prepare` returns it.
        lowered: the graph problem of ``state``, with costs.
        step: the step problem; None: that of ``state``. Peaks are those of this problem's schedules.
    """

    def __init__(self, state: State, lowered: Lowered, step: LoweredStep | None = None) -> None:
        self._state, self._lowered, self._step = state, lowered, step
        self.problem: GraphProblem = lowered.problem
        self._always = always_saved(self.problem)
        self._evaluations = 0
        self._seen: dict[tuple[int, ...], Candidate] = {}
        self._uses: dict[frozenset[int], tuple[list[int], list[int], list[int]]] = {}

    @cached_property
    def orders(self) -> OrderSearch:
        """The search over node orders and recomputations. It starts from schedules that this search has found."""
        return OrderSearch(self._state, self._lowered, self._step)

    def reordered(
        self, decided: Candidate, peak_bytes: int, *, share: float = 1.0
    ) -> list[Candidate]:
        """Search for cheap schedules within a peak, from a candidate's schedule; see `OrderSearch.within`."""
        if decided.schedule is not None:
            sequence, boundary = decided.schedule
        else:
            sequence, _, boundary = self.schedule(decided.saved)
        return self.orders.within(sequence, boundary, peak_bytes, share=share)

    def lowest(
        self, starts: Iterable[Iterable[int]], capacity: int | None = None
    ) -> list[Candidate]:
        """Search for the decision with the least peak.

        Args:
            starts: decisions to start from, each as its saved nodes of the graph problem; at least one.
            capacity: most bytes that the first candidate may save; None: no such limit.

        Returns:
            One or two candidates. First, the best one in the node order of the passes. Second, if one was found, the
            best one with node orders of its own, which may save more than ``capacity`` bytes.
        """
        # No schedule has a peak of 0 bytes, so under this limit the search returns the lowest peaks that it reaches.
        allowed = Limits(0, capacity)
        reached = self._reached(allowed, starts)
        begun = {tried.saved: self.schedule(tried.saved) for tried in reached}
        lower = self.orders.lowest(
            [(sequence, boundary) for sequence, _, boundary in begun.values()]
        )
        return [min(reached, key=allowed.rank), *([lower] if lower else [])]

    @property
    def step(self) -> LoweredStep:
        """The step problem, and the map from its nodes to the joint graph."""
        return self.orders.step

    @cached_property
    def least_possible(self) -> int:
        """Lower bound on the peak of every schedule of the step, in bytes."""
        return self.step.least_peak

    @cached_property
    def _network(self) -> Network:
        """The flow network of the graph problem, on which minimum cuts are computed."""
        return Network(self.problem)

    # ---- from a decision to its schedule ------------------------------------------------------------
    @cached_property
    def _runs_of(self) -> list[tuple[int, ...]]:
        """For each position in the joint graph: the nodes of the step problem that stand for the node's first run.

        These are two nodes for a random operator whose generator state is saved, and none for a view.
        """
        return [self.step.runs_of(node.name) for node in self._state.index.nodes]

    @cached_property
    def _evaluator(self) -> ScheduleEvaluator:
        """Evaluator that computes the bytes alive over a schedule of the step problem."""
        return ScheduleEvaluator(self.step.problem)

    @cached_property
    def _roots(self) -> tuple[int, ...]:
        """Positions in the joint graph of the nodes that backward runs under every decision."""
        closure = self._state.roles.tangent_closure
        return tuple(i for i, late in enumerate(closure) if late)

    @cached_property
    def _first_late(self) -> int:
        """Position in the joint graph of the first node that reads an input of backward only, such as a tangent."""
        index, roles = self._state.index, self._state.roles
        tangents = (i for i, role in roles.placeholders.items() if role.in_backward)
        return min((u for i in tangents for u in index.users[i]), default=len(index))

    def schedule(self, saved: Iterable[int]) -> tuple[list[int], list[int], int]:
        """Return the schedule of a decision, in the node order of the passes.

        Args:
            saved: nodes of the graph problem that the decision saves.

        Returns:
            Three items: for each run in order, its node of the step problem; for each run, its moment; and the
            position where backward begins among the runs. A *moment* is a position in the joint graph. The moment of
            a forward run is the position of its own node. A node that only backward runs, such as one that reads a
            tangent, has its own position, too; the recomputations right before it share this position. Recomputations
            for a returned gradient come last; their moment is the length of the graph.
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
        sequence = [*self.step.copies]  # copies of inputs run first
        moments = [0] * len(sequence)
        for i in self._forward_order:
            if forward[i]:
                sequence += runs_of[i]
                moments += [i] * len(runs_of[i])
        boundary = len(sequence)
        placed = bytearray(len(index))
        for i in (*keep, *roles.placeholders):
            placed[i] = 1

        def place(i: int, moment: int) -> None:
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
                    moments.append(moment)

        for i in self._roots:
            if not placed[i]:
                place(i, i)
        for i in self._outputs:
            if not placed[i]:
                place(i, len(index))
        return sequence, moments, boundary

    @cached_property
    def _forward_order(self) -> list[int]:
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

    def tried(self, saved: Iterable[int]) -> Candidate:
        """Evaluate a decision; return it as a candidate with saved bytes, cost, and bytes alive, cached.

        Args:
            saved: nodes of the graph problem that the decision saves.

        Raises:
            ProblemError: a node that backward needs is neither saved nor recomputable.
        """
        done = evaluate(self.problem, {*saved, *self._always})
        found = self._seen.get(done.saved)
        if found is None:
            sequence, moments, boundary = self.schedule(done.saved)
            bytes_alive = self._evaluator.evaluate(sequence, boundary).bytes_alive
            most = {_SAVED: done.saved_bytes}
            for moment, nbytes in zip(moments, bytes_alive, strict=True):
                if nbytes > most.get(moment, 0):
                    most[moment] = nbytes
            found = self._seen[done.saved] = Candidate(
                lowered=self._lowered,
                saved=done.saved,
                saved_bytes=done.saved_bytes,
                cost=done.recompute_cost,
                alive=most,
                peak_bytes=max(bytes_alive, default=0),
            )
        return found

    def highest(self, tried: Candidate) -> tuple[int, ...]:
        """Divide backward into at most `_STRETCHES` parts; return, for each part, the node with most bytes alive.

        Args:
            tried: a candidate that the method `tried` returned, so that its bytes alive are known.

        Returns:
            Positions in the joint graph of nodes that backward runs under every decision.
        """
        late = self._state.roles.tangent_closure
        runs = [m for m in tried.alive if 0 <= m < len(late) and late[m]]
        length = max(1, -(-len(runs) // _STRETCHES))
        stretches = (runs[i : i + length] for i in range(0, len(runs), length))
        return tuple(max(stretch, key=lambda m: tried.alive[m]) for stretch in stretches)

    def seen_within(self, peak_bytes: int) -> Candidate | None:
        """Return the cheapest candidate evaluated so far whose peak is within a limit; None if there is none."""
        fits = (tried for tried in self._seen.values() if tried.peak_bytes <= peak_bytes)
        return min(fits, key=lambda tried: (tried.cost, tried.peak_bytes), default=None)

    def _spent(self) -> bool:
        """Return whether the current search has used up its number of evaluations."""
        return len(self._seen) > self._evaluations

    # ---- search -------------------------------------------------------------------------------------
    def within(
        self, peak_bytes: int, starts: Iterable[Iterable[int]], capacity: int | None = None
    ) -> Candidate:
        """Search for the cheapest decision within a peak.

        Args:
            peak_bytes: limit on the peak, in bytes.
            starts: decisions to start from, each as its saved nodes of the graph problem; at least one. Their
                peaks may exceed the limit.
            capacity: most bytes that the decision may save; None: no such limit.

        Returns:
            The cheapest decision found within both limits; if there is none, the decision that exceeds them least.
        """
        allowed = Limits(peak_bytes, capacity)
        best = min(self._reached(allowed, starts), key=allowed.rank)
        if allowed.excess(best) or (len(self._state.index) > _LARGE and self.orders.is_possible):
            return best  # `reordered` saves further values, too, and is faster on large graphs
        return self._filled(best, allowed)

    def _reached(self, allowed: Limits, starts: Iterable[Iterable[int]]) -> list[Candidate]:
        """Search by prices, and again with checkpoints if no decision is within the limits.

        Returns the best candidate of each search.

        Args:
            allowed: the limits.
            starts: decisions to start from, each as its saved nodes of the graph problem; at least one.
        """
        # Only new evaluations count against the limit, because cached ones take no time.
        self._evaluations = len(self._seen) + max(_LEAST, _WORK // max(1, len(self._state.index)))
        begun = [self.tried(start) for start in starts]
        found = [self._by_prices(allowed, min(begun, key=allowed.rank))]
        if allowed.excess(found[0]):
            found += [self._by_prices(allowed, b, c) for c, b in self._checkpointed(allowed)]
        if allowed.capacity is not None and all(map(allowed.excess, found)):
            found += [self._repaired(b, allowed) for b in begun]
        return found

    def _by_prices(
        self, allowed: Limits, best: Candidate, checkpoints: frozenset[int] = frozenset()
    ) -> Candidate:
        """Search for a better candidate by minimum cuts under prices; return the best candidate.

        Args:
            allowed: the limits.
            best: the best candidate so far, which is returned if no cut is better.
            checkpoints: nodes of the graph problem that every cut saves.
        """
        # Polyak's step needs the optimal cost, which is unknown. The cost of the best candidate is used instead, or
        # twice this cost if the candidate exceeds the limits.
        most = max(1, best.cost if not allowed.excess(best) else 2 * best.cost)
        prices: dict[int, float] = {}

        def cheapest() -> Candidate:
            return self.tried(self._cut(prices, checkpoints))

        def move(found: Candidate, most: int, step: float) -> bool:
            nonlocal prices
            moved = self._moved(prices, found, allowed, most, step)
            prices = moved or {}
            return moved is not None and not self._spent()

        cuts = _CHECKPOINTED_CUTS if checkpoints else _CUTS
        return search_by_prices(best, allowed.rank, cheapest, move, most=most, cuts=cuts)

    def _checkpointed(self, allowed: Limits) -> list[tuple[frozenset[int], Candidate]]:
        """Return up to two sets of checkpoints to search with.

        Each set comes with a candidate that saves the checkpoints and little else. The last set is the one with the
        fewest segments whose candidate is within the limits; if there is none, the set whose candidate exceeds the
        limits least. Before it comes the set with the next fewer segments, if any, which restricts cuts less.
        """
        # At this price, saving a value of 1 KiB costs as much as recomputing everything.
        prices = {_SAVED: sum(self.problem.cost) / 1024}
        made = [(c, self.tried(self._cut(prices, c))) for c in self._checkpoints]
        if not made:
            return []
        ranks = [allowed.rank(tried) for _, tried in made]
        fits = (k for k, (excess, _) in enumerate(ranks) if not excess)
        chosen = next(fits, min(range(len(made)), key=ranks.__getitem__))
        return made[max(0, chosen - 1) : chosen + 1]

    @cached_property
    def _checkpoints(self) -> list[frozenset[int]]:
        """Sets of checkpoints, as nodes of the graph problem: one set for 2, 4, 8, … segments of forward.

        Segments compute about equal bytes. In each segment, the position is found at which the fewest bytes are alive:
        bytes of values that forward computes before this position and reads after it. These values are checkpoints.
        """
        problem, index, owner = self.problem, self._state.index, self._state.storages.owner
        order = [i for i in self._forward_order if self._state.roles.required_forward[i]]
        rank = {p: k for k, p in enumerate(order)}
        last = [-1] * len(index)
        for p in order:
            last[owner[p]] = max([last[owner[p]], *(rank[u] for u in index.users[p] if u in rank)])
        spans = {
            i: (rank[p], last[p])
            for i, p in enumerate(self._lowered.position)
            if p in rank and problem.savable[i] and problem.recomputable[i] and problem.size[i]
        }
        changes, computed = [0] * (len(order) + 1), [0] * len(order)
        for i, (first, end) in spans.items():
            computed[first] += problem.size[i]
            if end > first:
                changes[first] += problem.size[i]
                changes[end] -= problem.size[i]
        crossing, before = list(accumulate(changes)), list(accumulate(computed))
        found: dict[frozenset[int], None] = {}
        segments = 2
        while before and segments <= min(_SEGMENTS, len(order)):
            ends = [bisect_left(before, k * before[-1] // segments) for k in range(segments + 1)]
            at = [min(range(a, max(a + 1, b)), key=crossing.__getitem__) for a, b in pairwise(ends)]
            found[frozenset(i for i, (a, b) in spans.items() if any(a <= k < b for k in at))] = None
            segments *= 2
        return list(found)

    @staticmethod
    def _moved(
        prices: dict[int, float], found: Candidate, allowed: Limits, most: int, step: float = 1.0
    ) -> dict[int, float] | None:
        """Return prices (Lagrange multipliers) after a subgradient step of Polyak's length.

        Args:
            prices: price of one byte at each program point; at `_SAVED`, of one saved byte.
            found: the best decision at these prices.
            allowed: the limits.
            most: estimate of the optimal cost: the cost of the best decision found within the limits, or a higher
                number if no such decision was found.
            step: factor by which the step length is multiplied.

        Returns:
            The new prices. None if the subgradient is zero, such as when the decision exceeds no limit and no
            price is set.
        """
        slope = {
            m: over
            for m, b in found.alive.items()
            if (over := b - allowed.at(m)) > 0 or m in prices
        }
        length = float(sum(s * s for s in slope.values()))
        if not length:
            return None
        value = found.cost + sum(prices.get(m, 0.0) * s for m, s in slope.items())
        # `most` only estimates the optimum, so the step must not vanish when `value` reaches it.
        move = step * max(most - value, 0.02 * most) / length
        return {m: p for m, s in slope.items() if (p := prices.get(m, 0.0) + move * s) > 0}

    def _repaired(self, best: Candidate, allowed: Limits) -> Candidate:
        """Save or drop one or two random values at a time until a candidate is within the limits; return the result.

        A change that increases the excess is undone. The search also ends after `_DRAWS` changes per value, or when
        the evaluations are used up, so the result may exceed the limits. The random numbers have a fixed seed, so the
        result is deterministic.
        """
        problem, draw = self.problem, random.Random(0)
        free = [i for i in range(len(problem)) if problem.savable[i] and problem.recomputable[i]]
        free = [i for i in free if problem.size[i]]
        for _ in range(_DRAWS * len(free)):
            if self._spent() or not allowed.excess(best):
                break
            some = {draw.choice(free)}
            if draw.random() < 0.5:
                some.add(draw.choice([i for i in free if i in best.saved] or free))
            try:
                found = self.tried({*best.saved} ^ some)
            except ProblemError:
                # The dropped value cannot be recomputed: an input of it no longer exists.
                continue
            if allowed.excess(found) <= allowed.excess(best):
                best = found
        return best

    def uses(
        self, checkpoints: frozenset[int] = frozenset()
    ) -> tuple[list[int], list[int], list[int]]:
        """Return where each node of the graph problem is computed, and where backward first and last uses it; cached.

        Recomputation counts as a use: a value is also used where backward first uses a value computed from it.

        Args:
            checkpoints: nodes of the graph problem that are saved in any case, so that their inputs are not used to
                recompute them.

        Returns:
            Three lists of positions in the joint graph, with one entry per node of the graph problem. First, where the
            value is computed; for a value that forward does not need itself, this is the start of backward. Second and
            third, the first and the last use in backward. If backward never uses the value, its first use is the length
            of the graph, and its last use is -1.
        """
        if checkpoints in self._uses:
            return self._uses[checkpoints]
        lowered, index, roles = self._lowered, self._state.index, self._state.roles
        owner = self._state.storages.owner
        kept = {lowered.position[i] for i in checkpoints}
        end = len(index)
        first, last = [end] * end, [-1] * end
        for i in range(end - 1, -1, -1):
            for u in index.users[i]:
                if roles.tangent_closure[u]:
                    first[i], last[i] = min(first[i], u), max(last[i], u)
                elif u not in kept:
                    first[i], last[i] = (
                        min(first[i], first[u]),
                        max(last[i], first[u] if first[u] < end else -1),
                    )
            if owner[i] != i:
                first[owner[i]] = min(first[owner[i]], first[i])
                last[owner[i]] = max(last[owner[i]], last[i])
        begin = [p if roles.required_forward[p] else self._first_late for p in range(end)]
        position = lowered.position
        found = self._uses[checkpoints] = (
            [begin[p] for p in position],
            [first[p] for p in position],
            [last[p] for p in position],
        )
        return found

    def _cut(
        self, prices: dict[int, float], checkpoints: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        """Return the saved nodes of the best decision under prices.

        The decision is a minimum cut: it minimises recompute cost plus, over all program points, price times bytes
        alive.

        Args:
            prices: price of one byte at each program point; at `_SAVED`, of one saved byte.
            checkpoints: nodes of the graph problem to save at any price.
        """
        problem = self.problem
        saving = prices.get(_SAVED, 0.0)
        priced = price_between({m: p for m, p in prices.items() if m != _SAVED})
        begin, first, last = self.uses(checkpoints)
        keep, again = [], []
        for i, nbytes in enumerate(problem.size):
            free = not (nbytes and prices) or i in checkpoints
            keep.append(0.0 if free else nbytes * (saving + priced(begin[i], last[i])))
            held = nbytes * priced(first[i], last[i]) if nbytes and prices else 0.0
            again.append((problem.cost[i] if problem.in_forward[i] else 0) + held)
        most = sum(again)
        for i in checkpoints:
            again[i] += most
        return self._network.cut_at(keep, again)

    def _filled(self, best: Candidate, allowed: Limits) -> Candidate:
        """Lower the cost of a candidate within the limits; return the resulting candidate.

        First, further values are saved, highest cost per byte first. Then saved values are exchanged for values
        that cost more to recompute. Both steps are repeated until the cost no longer falls. If node orders can be
        searched, the result is that of the first step, because `reordered` lowers the cost further. If the caller gave
        the step problem, the first step ends after `_MISSES` values in a row that lower no cost.
        """
        problem = self.problem

        def better(saved: tuple[int, ...]) -> bool:
            nonlocal best
            try:
                found = self.tried(saved)
            except ProblemError:
                # The dropped value cannot be recomputed: an input of it no longer exists.
                return False
            if allowed.excess(found) or found.cost >= best.cost:
                return False
            best = found
            return True

        while True:
            before = best
            again = worth_saving(problem, best.saved)
            failed = 0
            for i in again:
                if self._spent():
                    return best
                failed = 0 if better((*best.saved, i)) else failed + 1
                if failed == _MISSES and self._step is not None:
                    break
            if self.orders.is_possible:
                return best
            if best is not before:
                continue
            kept = [i for i in best.saved if problem.size[i] and problem.recomputable[i]]
            kept.sort(key=lambda i: (problem.cost[i] / (1 + problem.size[i]), i))
            for i, j in ((i, j) for i in again for j in kept if problem.cost[j] < problem.cost[i]):
                if self._spent():
                    return best
                if better((*(k for k in best.saved if k != j), i)):
                    break
            if best is before:
                return best
