"""Model the schedule problem for CP-SAT.

Each possible run of a node has a position in the schedule. Each value that a run makes has an interval
of positions during which the value is in memory.

The model follows Bartan et al., "Moccasin: Efficient tensor rematerialization for neural networks", ICML 2023. Moccasin
fixes the order of the nodes. In remat's model, CP-SAT also chooses the order of the nodes, as far as the problem
allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat.solvers.schedule.core import ScheduleCore

#: Largest number of runs of one node.
_RUNS = 2


def schedule_model(core: ScheduleCore, start: Sequence[int]) -> tuple[Any, list[Any]]:
    """Build the CP-SAT model of a schedule problem, with a legal schedule in the kernel's form as a hint.

    Returns the model, and a tuple ``(node, presence, position)`` for each possible run of a node. In each tuple, the
    presence is a Boolean variable, and the position is an integer variable.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    nodes = sorted(set(core.start))
    count = {v: 1 if core.once[v] else _RUNS for v in nodes}
    last = sum(count.values()) - 1
    at = {v: [model.new_int_var(0, last, "") for _ in range(count[v])] for v in nodes}
    there = {v: [model.new_bool_var("") for _ in range(count[v])] for v in nodes}
    memory, bytes_of, runs = [], [], []
    for v in nodes:
        model.add(there[v][0] == 1)
        for k in range(count[v]):
            program_point = model.new_optional_fixed_size_interval_var(at[v][k], 1, there[v][k], "")
            runs.append(program_point)
            if core.extra[v]:
                memory.append(program_point)
                bytes_of.append(core.extra[v])
            if k:  # order a node's runs: a permutation would be the same schedule
                model.add_implication(there[v][k], there[v][k - 1])
                model.add(at[v][k] > at[v][k - 1]).only_enforce_if(there[v][k])
    model.add_no_overlap(runs)
    model.add(at[core.start[0]][0] == 0)
    stays: dict[int, list[Any]] = {}
    for x, m in enumerate(core.maker):
        if m not in at:
            continue
        stays[x] = []
        for k in range(count[m]):
            gone = model.new_int_var(0, last + 1, "")
            length = model.new_int_var(1, last + 1, "")
            if core.size[x]:
                memory.append(
                    model.new_optional_interval_var(at[m][k], length, gone, there[m][k], "")
                )
                bytes_of.append(core.size[x])
            stays[x].append(gone)
    for w in nodes:
        for x in core.reads[w]:
            m = core.maker[x]
            for k in range(count[w]):
                reads = [model.new_bool_var("") for _ in range(count[m])]
                model.add(sum(reads) == 1).only_enforce_if(there[w][k])
                for j, read in enumerate(reads):
                    model.add_implication(read, there[m][j])
                    model.add(at[m][j] < at[w][k]).only_enforce_if(read)
                    if core.size[x]:
                        model.add(stays[x][j] > at[w][k]).only_enforce_if(read)
    # Values and extra bytes are intervals of positions, so this limits the bytes at every position.
    model.add_cumulative(memory, bytes_of, core.capacity)
    model.minimize(sum(core.cost[v] * p for v in nodes for p in there[v][1:]))
    seen = dict.fromkeys(nodes, 0)
    for program_point, v in enumerate(start):
        if seen[v] < count[v]:
            model.add_hint(at[v][seen[v]], program_point)
            model.add_hint(there[v][seen[v]], 1)
            seen[v] += 1
    rows = [(v, p, t) for v in nodes for p, t in zip(there[v], at[v], strict=True)]
    return model, rows
