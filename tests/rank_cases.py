"""Cases that several processes run together; what each comes to is left in files."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: What one rank does, and what it comes to: something that JSON can say.
Case = Callable[[int], Any]


def run_all(
    module: Mapping[str, Any],
    folder: Path,
    rank: int,
    world_size: int,
    run: Callable[[Case, int], dict[str, Any]],
) -> None:
    """Runs every case in a process group of its own, writes ``CASE.RANK.json``, and ends the process.

    Args:
        module: globals of the module with the cases: its functions called ``case_…``.
        folder: where the files and the groups' stores go.
        rank: which of the processes this is.
        world_size: how many there are.
        run: runs a case; usually `outcome` with something around it.
    """
    torch.set_num_threads(1)
    cases = {k[5:]: f for k, f in list(module.items()) if k.startswith("case_")}
    for name, case in cases.items():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store-{name}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        (folder / f"{name}.{rank}.part").write_text(json.dumps(run(case, rank)))
        (folder / f"{name}.{rank}.part").rename(folder / f"{name}.{rank}.json")
        dist.destroy_process_group()
    # PyTorch's own threads do not always end in good order; everything is on disk by now.
    os._exit(0)


def outcome(case: Case, rank: int) -> dict[str, Any]:
    """The result of a case, or the traceback of what it raised."""
    try:
        return {"result": case(rank)}
    except Exception:
        return {"traceback": traceback.format_exc()}
