#!/usr/bin/env bash
# PuLP 4 gives some proven optima of CBC the status GapLimit, without any option on gaps.
#
# Version: PuLP 4.2.0 with cbcbox 2.929 on Python 3.12; PuLP 3.3.2 gives all of them the status Optimal. Seen on 2026-11-29.
# Guess: without a limit on time, nodes or gaps, a small knapsack that CBC solves has the status Optimal.
# Seen: 17 of 20 knapsacks, all solved to the optimum, have the status GapLimit. CBC says "Optimal (within gap tolerance)" if the gap
# got to zero, and PuLP 4 tells this from "Optimal".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
PYENV_VERSION=3.12.1 python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'pulp[cbc]==4.2.0' cbcbox==2.929 numpy
"$folder/venv/bin/python" - <<'PY'
import random
from collections import Counter

import pulp


def solved(values, weights, capacity):
    model = pulp.LpProblem("knapsack", pulp.LpMaximize)
    picks = [model.add_variable(f"x{i}", cat=pulp.LpBinary) for i in range(len(values))]
    model += pulp.LpAffineExpression.from_list(list(zip(picks, values)))
    model += pulp.LpAffineExpression.from_list(list(zip(picks, weights))) <= capacity
    return model.solve(pulp.COIN_CMD(msg=False))


def optimum(values, weights, capacity):
    best = [0] * (capacity + 1)
    for value, weight in zip(values, weights):
        for room in range(capacity, weight - 1, -1):
            best[room] = max(best[room], best[room - weight] + value)
    return best[capacity]


statuses = Counter()
for seed in range(20):
    drawn = random.Random(seed)
    weights = [drawn.randint(1, 1_000) for _ in range(50)]
    values = [drawn.randint(1, 1_000_000) for _ in range(50)]
    problem = (values, weights, sum(weights) // 2)
    stats = solved(*problem)
    assert round(stats.objective) == optimum(*problem)
    statuses[stats.status.name] += 1
print(dict(statuses))
assert set(statuses) == {"Optimal", "GapLimit"}
PY
