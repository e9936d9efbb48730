"""Build a schedule that evicts values when memory runs out, and recomputes evicted values before they are read."""

from __future__ import annotations

from remat.solvers.schedule.problem import MOST_RUNS_PER_NODE, ScheduleProblem


def evicting(problem: ScheduleProblem) -> list[int] | None:
    """Build a schedule that runs nodes in the problem's order and evicts values if memory runs out.

    Large values, values that are cheap to recompute, and values whose next read is far ahead are evicted
    first. The score of a value is that of "Dynamic tensor rematerialization" (Kirisame et al., ICLR
    2021), except that future reads are known here. Return None if no schedule within the capacity is found.
    """
    order = problem.order
    if problem.capacity is None:
        return list(order)
    maker = [problem.maker(i) for i in range(len(problem))]
    results, given = problem.results, problem.given
    fixed = {*problem.once, *given}  # their values cannot be recomputed, so they are never evicted
    stays, size = set(problem.to_end), problem.size
    uses: list[list[int]] = [
        [] for _ in maker
    ]  # for each node, the positions in `order` that read it, last first
    for position in reversed(range(len(order))):
        for u in problem.inputs[order[position]]:
            uses[u].append(position)
    read = problem.used
    alive = {i for i in problem.at_start if i in read}
    now = problem.resident + sum(size[i] for i in alive)
    backward, crossed = set(problem.backward), False
    runs: list[int] = []
    most = MOST_RUNS_PER_NODE * len(problem)  # `ScheduleProblem.read` refuses longer schedules
    gone = set(given)  # nodes that cannot run: given ones, and those of `once` after their run

    # `position` is that of the node in `order` for which runs are needed; `pinned` values must not be evicted.
    def room(bytes_wanted: int, pinned: set[int], position: int) -> bool:
        nonlocal now
        over = now + bytes_wanted - problem.capacity  # type: ignore[operator]
        if over <= 0:
            return True

        def rank(i: int) -> float:
            ahead = (uses[i][-1] - position) if uses[i] else 0
            return (1 + ahead) * size[i] / (1 + problem.cost[maker[i]])

        free = [i for i in alive if i not in pinned and i not in stays and maker[i] not in fixed]
        for i in sorted((i for i in free if size[i]), key=lambda i: (-rank(i), i)):
            alive.discard(i)
            now -= size[i]
            over -= size[i]
            if over <= 0:
                return True
        return False

    def run(v: int, position: int, pinned: set[int]) -> bool:
        """Append runs that recompute a node's evicted inputs, then a run of the node; return whether all can run."""
        nonlocal now
        mine = pinned | set(problem.inputs[v])
        for u in problem.inputs[v]:
            if u in alive:
                continue
            if maker[u] in gone or len(runs) > most or not run(maker[u], position, mine):
                return False
        fresh = [i for i in results[v] if i not in alive]
        if not room(
            sum(size[i] for i in fresh) + problem.extra[v], mine | set(results[v]), position
        ):
            return False
        runs.append(v)
        if v in fixed:
            gone.add(v)
        for i in fresh:
            alive.add(i)
            now += size[i]
        drop([*results[v], *problem.inputs[v]], position, pinned)
        return True

    def drop(values: list[int], position: int, pinned: set[int]) -> None:
        """Free the values that are neither pinned nor in ``to_end``, and that no later run reads."""
        nonlocal now
        for i in values:
            if i in alive and i not in stays and i not in pinned and not uses[i]:
                alive.discard(i)
                now -= size[i]

    for position, v in enumerate(order):
        if v in backward and not crossed:
            # Values of `at_boundary` take memory from here on, so make room for them first.
            crossed = True
            fresh = [i for i in problem.at_boundary if i in read]
            if not room(sum(size[i] for i in fresh), set(problem.inputs[v]), position):
                return None
            alive.update(fresh)
            now += sum(size[i] for i in fresh)
        for u in problem.inputs[v]:
            uses[u].pop()
        try:
            has_room = run(v, position, set())
        except RecursionError:  # a chain of recomputations deeper than Python's stack
            return None
        if not has_room:
            return None
    return runs
