"""A sweep in a process of its own, which is killed: ``python -m tests.planning.sweep_child OUTPUT KILL_AFTER``."""

from __future__ import annotations

import os
import sys

import remat
from remat.planning.experiment_table import ExperimentRow
from tests.models import build

NAMES = ("randn_like", "mutated_buffer", "checkpointed")
BUDGETS = (0.2, 0.5, "peak:0.5")


def models() -> dict[str, remat.JointGraph]:
    found = {}
    for name in NAMES:
        step = build(name)
        found[name] = remat.capture(step.model, step.args, step.kwargs, lower="eager")
    return found


def main(output: str, kill_after: int) -> None:
    left = kill_after

    def on_row(row: ExperimentRow) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os._exit(9)

    remat.sweep(models(), budgets=BUDGETS, solvers=("auto", "greedy"), output=output, on_row=on_row)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
