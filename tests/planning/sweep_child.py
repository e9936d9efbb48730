"""A sweep in a process of its own, which is killed: ``python -m tests.planning.sweep_child OUTPUT KILL_AFTER``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

import remat
from remat.planning.experiment_table import ExperimentRow

#: Three budgets and two solvers.
ASKED: dict[str, Any] = {"budgets": (0.2, 0.5, "peak:0.5"), "solvers": ("auto", "greedy")}


def models() -> dict[str, Any]:
    """A captured graph, and a function that is captured by the sweep."""

    def step() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())
        return model, (torch.randn(8, 16),), {}

    return {"captured": remat.capture(*step(), lower="eager"), "function": step}


def main(output: str, kill_after: int) -> None:
    left = kill_after

    def on_row(row: ExperimentRow) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os._exit(9)

    remat.sweep(models(), **ASKED, output=output, on_row=on_row)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
