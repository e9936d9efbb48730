"""Build graph problems for tests: random ones, chains of layers, and wide graphs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from remat.solvers.graph.problem import GraphProblem


def random_graph(seed: int, *, nodes: int = 10, outside: bool = True) -> GraphProblem:
    """Build a random graph problem; the same arguments give the same problem.

    If ``outside`` is True, some nodes may have ``in_forward=False``, so that forward need not run them.
    """
    draw = random.Random(seed)
    inputs: list[tuple[int, ...]] = []
    cost, size, savable, again, forward = [], [], [], list[bool](), list[bool]()
    for i in range(nodes):
        count = min(i, draw.choice((0, 1, 1, 2, 2, 3)))
        inputs.append(tuple(sorted(draw.sample(range(max(0, i - 5), i), min(count, i, 5)))))
        cost.append(draw.choice((0, 0, 1, 2, 3, 5, 8, 40)))
        size.append(draw.choice((0, 1, 2, 3, 4, 8, 30)))
        savable.append(draw.random() < 0.8)
        # A node that cannot be saved can be recomputed, so that most problems are feasible.
        again.append(draw.random() < 0.85 or not savable[-1])
        forward.append(not outside or draw.random() < 0.8)
    for i in reversed(range(nodes)):  # inputs of nodes in forward must be in forward
        if forward[i]:
            for j in inputs[i]:
                forward[j] = True
    return GraphProblem(
        names=tuple(f"n{i}" for i in range(nodes)),
        inputs=tuple(inputs),
        cost=tuple(cost),
        size=tuple(size),
        savable=tuple(savable),
        recomputable=tuple(again),
        in_forward=tuple(forward),
        needed=tuple(sorted(draw.sample(range(nodes), draw.randint(1, 4)))),
        unit="ps",
    )


def layers(count: int, *, seed: int = 0) -> GraphProblem:
    """Build the graph problem of a chain of identical layers, each of six values of random cost and size."""
    draw = random.Random(seed)
    kinds = [(draw.randint(10, 99), draw.randint(1, 9) * 7) for _ in range(6)]
    inputs: list[tuple[int, ...]] = [()]
    cost, size, needed = [5], [64], list[int]()
    for _ in range(count):
        start = len(inputs) - 1
        for k, (price, nbytes) in enumerate(kinds):
            needed.append(len(inputs))
            inputs.append((start,) if k == 0 else (len(inputs) - 1, start))
            cost.append(price)
            size.append(nbytes)
    return _without_limits(inputs, cost, size, needed)


def wide(n: int) -> GraphProblem:
    """Build a graph problem with ``2 * n`` nodes and many skip connections, as in a U-Net."""
    draw = random.Random(3)
    inputs = [(), *((i - 1, draw.randrange(i)) if i > 1 else (0,) for i in range(1, n))]
    cost, size = ([draw.randrange(10**6, 10**7) for _ in range(2 * n)] for _ in range(2))
    backward = ((i, n - 1 - i) for i in range(n))
    return _without_limits([*inputs, *backward], cost, size, range(n, 2 * n))


def _without_limits(
    inputs: Sequence[tuple[int, ...]], cost: list[int], size: list[int], needed: Iterable[int]
) -> GraphProblem:
    """Build a graph problem in which every node runs in forward, and may be saved or recomputed."""
    n = len(inputs)
    return GraphProblem(
        names=tuple(f"n{i}" for i in range(n)),
        inputs=tuple(tuple(sorted(set(reads))) for reads in inputs),
        cost=tuple(cost),
        size=tuple(size),
        savable=(True,) * n,
        recomputable=(True,) * n,
        in_forward=(True,) * n,
        needed=tuple(needed),
    )
