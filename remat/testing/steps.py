"""Build schedule problems (`ScheduleProblem`) for tests: small named ones, random ones, and layered graphs."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from remat.solvers.schedule.problem import ScheduleProblem


def _step(
    inputs: tuple[tuple[int, ...], ...],
    cost: tuple[int, ...],
    size: tuple[int, ...],
    capacity: int | None,
    **more: Any,
) -> ScheduleProblem:
    names = tuple(f"n{i}" for i in range(len(cost)))
    return ScheduleProblem(
        names=names, inputs=inputs, cost=cost, size=size, capacity=capacity, **more
    )


#: Inputs of each node. Nodes 0 to 3 are a forward, and nodes 4 to 6 a backward that reads nodes 2, 1 and 0 again.
_CHAIN = ((), (0,), (1,), (2,), (2, 3), (1, 4), (0, 5))

#: Named schedule problems, each with its capacity.
NAMED: Mapping[str, ScheduleProblem] = {
    "empty-step": _step((), (), (), 0),
    "one-node": _step(((),), (3,), (5,), 5),
    "no-capacity": _step(_CHAIN, (1,) * 7, (4,) * 7, None),
    "all-fits": _step(_CHAIN, (1,) * 7, (4,) * 7, 20),
    "one-layer-again": _step(_CHAIN, (5, 4, 3, 2, 9, 9, 9), (4,) * 7, 12),
    "the-cheap-layer-again": _step(_CHAIN, (50, 1, 30, 2, 9, 9, 9), (4, 4, 4, 2, 4, 4, 4), 16),
    "order-alone-does": _step(
        ((), (0,), (0,), (1,), (2,), (3, 4)), (1, 9, 9, 1, 1, 1), (1, 8, 8, 1, 1, 1), 10
    ),
    "long-skip": _step(
        ((), (0,), (1,), (2,), (3,), (0, 4)), (2, 1, 1, 1, 1, 1), (6, 3, 3, 3, 3, 1), 10
    ),
    "free-to-run-again": _step(
        ((), (0,), (1,), (2,), (1, 3)), (4, 0, 5, 6, 1), (1, 8, 6, 6, 1), 15
    ),
    "once-only": _step(_CHAIN, (5, 1, 3, 2, 9, 9, 9), (4,) * 7, 16, once=(1,)),
    "bytes-while-running": _step(
        ((), (0,), (0,), (1, 2)), (3, 1, 1, 1), (4, 2, 2, 1), 9, extra=(0, 0, 3, 0)
    ),
    "fixed-order": _step(
        ((), (0,), (0,), (1,), (2,), (3, 4)),
        (3, 2, 2, 1, 1, 1),
        (1, 8, 8, 1, 1, 1),
        10,
        ordered=(1, 2, 3, 4),
    ),
    "parts": _step(
        ((), (0,), (), (1,), (2, 3)),
        (2, 3, 0, 4, 1),
        (4, 6, 1, 5, 1),
        12,
        part_of=(-1, -1, 1, -1, -1),
    ),
    "there-from-the-start": _step(
        ((), (0,), (1,), (0, 2)), (0, 2, 3, 1), (7, 3, 3, 1), 13, at_start=(0,)
    ),
    "stays-to-the-end": _step(((), (0,), (1,), (2,)), (2, 3, 4, 1), (4, 4, 4, 1), 9, to_end=(0,)),
    "always-there": _step(_CHAIN, (5, 4, 3, 2, 9, 9, 9), (4,) * 7, 112, resident=100),
    "forward-and-backward": _step(
        ((), (0,), (1,), (), (2, 3), (1, 4), (0, 5)),
        (5, 4, 3, 0, 9, 9, 9),
        (4, 4, 4, 6, 4, 4, 4),
        14,
        forward=(0, 1, 2),
        backward=(4, 5, 6),
        at_boundary=(3,),
    ),
    "forward-listed-late": _step(
        ((), (0,), ()), (3, 2, 1), (4, 1, 8), 13, forward=(0, 2), backward=(1,), to_end=(2,)
    ),
}


def random_schedule_problem(seed: int, *, nodes: int = 6, plain: bool = False) -> ScheduleProblem:
    """Build a random schedule problem without a capacity; the same arguments give the same problem.

    Args:
        seed: seed of the random source.
        nodes: number of nodes that run, besides nodes that never run, such as inputs.
        plain: whether all fields but names, inputs, costs, sizes and ``unit`` keep their defaults.
    """
    draw = random.Random(seed)
    rich = not plain
    given = draw.randint(0, 2) if rich else 0
    late_given = draw.randint(0, 1) if rich else 0
    at_start, at_boundary = range(given), range(given, given + late_given)
    # Inputs, cost, size, and the node of which this node is a part.
    rows: list[tuple[tuple[int, ...], int, int, int]] = [
        ((), 0, draw.choice((1, 2, 5)), -1) for _ in range(given + late_given)
    ]
    backward: list[int] = []
    boundary = (
        draw.randint(nodes // 2, nodes) if rich and (late_given or draw.random() < 0.5) else nodes
    )
    for count in range(nodes):
        i = len(rows)
        late = count >= boundary
        near = [j for j in range(i) if late or j not in at_boundary][-6:]
        reads = draw.sample(near, min(len(near), draw.choice((0, 1, 1, 2, 2, 3))))
        cost, size = draw.choice((0, 1, 2, 3, 5, 8)), draw.choice((0, 1, 2, 3, 4, 8))
        rows.append((tuple(sorted(reads)), cost, size, -1))
        if late:
            backward.append(i)
        if rich and draw.random() < 0.15:
            rows.append(((), 0, draw.choice((1, 2, 3)), i))
    # `at_boundary` needs a node that runs in backward. Without one, draw again with another seed.
    if late_given and not backward:
        return random_schedule_problem(seed + 1_000_003, nodes=nodes, plain=plain)
    inputs, costs, sizes, part_of = zip(*rows, strict=True)
    n = len(rows)
    runs = [i for i in range(given + late_given, n) if part_of[i] < 0]
    early = [i for i in runs if i not in backward]

    def some(of: list[int], share: float) -> tuple[int, ...]:
        return tuple(i for i in of if rich and draw.random() < share)

    return ScheduleProblem(
        names=tuple(f"n{i}" for i in range(n)),
        inputs=inputs,
        cost=costs,
        size=sizes,
        part_of=part_of if max(part_of) >= 0 else (),
        extra=tuple(draw.choice((0, 0, 0, 2)) if i in runs else 0 for i in range(n))
        if rich
        else (),
        once=some(runs, 0.15),
        ordered=some(runs, 0.2),
        at_start=tuple(at_start),
        forward=some(early, 0.4) if backward else (),
        backward=tuple(backward),
        at_boundary=tuple(at_boundary) if backward else (),
        to_end=some(list(range(n)), 0.15),
        resident=draw.choice((0, 3)) if rich else 0,
        unit="ps",
    )


def layered(nodes: int, *, width: float, seed: int) -> ScheduleProblem:
    """Build a schedule problem on a random layered graph, as in published comparisons of solvers.

    The graph has about ``sqrt(nodes * (1 / width - 1))`` layers of varying size. An edge between
    nodes of neighbouring layers has probability 0.2, but each node reads at least one node of the
    layer before. With probability 0.14, a node also reads a node of a still earlier layer.

    The graphs are those of Gagrani et al., "Neural topological ordering for computation graphs", NeurIPS 2022, appendix
    A. Costs and bytes follow Bartan et al., "Moccasin", ICML 2023.

    Args:
        nodes: number of nodes.
        width: a number between 0 and 1; larger widths give fewer layers.
        seed: seed of the random source.
    """
    draw = random.Random(seed)
    count = math.ceil(math.sqrt(nodes * (1 / width - 1)))
    layers: list[list[int]] = []
    placed = 0
    while placed < nodes:
        mean = nodes / count
        wide = min(nodes - placed, max(1, round(draw.uniform(0.25 * mean, 1.75 * mean))))
        layers.append(list(range(placed, placed + wide)))
        placed += wide
    inputs: list[set[int]] = [set() for _ in range(nodes)]
    for k in range(1, len(layers)):
        for v in layers[k]:
            inputs[v] = {u for u in layers[k - 1] if draw.random() < 0.2}
            if not inputs[v]:
                inputs[v] = {draw.choice(layers[k - 1])}
            if k > 1 and draw.random() < 0.14:
                inputs[v].add(draw.choice(layers[draw.randrange(k - 1)]))
    size = [min(8_180, max(10, round(draw.gammavariate(1.56, 1_280)))) for _ in range(nodes)]
    return ScheduleProblem(
        names=tuple(f"n{i}" for i in range(nodes)),
        inputs=tuple(tuple(sorted(row)) for row in inputs),
        cost=tuple(draw.randint(0, 998) for _ in range(nodes)),
        size=tuple(size),
    )
