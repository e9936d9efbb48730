"""Two processes that train under a plan; each writes its results to files.

``python -m tests.sac.sac_rank_worker FOLDER`` runs every case below in both processes, each case in a
process group of its own, and writes ``FOLDER/CASE.RANK.json``. A case that raises writes its traceback.
The tests that read the files are in ``test_distributed.py``.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from remat.errors import PolicyError
from remat.sac import SACPlan, apply
from tests.rank_cases import outcome, run_all
from tests.sac.planned import Block, Stack, plan_for

WORLD = 2
LAYERS = ("layers.0", "layers.1")
SHAPE = (4, 8)
Wrap = Callable[[Stack], nn.Module]


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Return the gradients after two forwards and backwards."""
    model.zero_grad()
    torch.manual_seed(7 + rank)
    for _ in range(2):
        model(inputs(rank)).sin().sum().backward()
    return [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


def compare(
    rank: int, plain: Wrap, planned: Wrap, make: Callable[[], Stack] = Stack
) -> dict[str, Any]:
    """Compare two steps under a plan with two steps without it, and count the runs of a part of each layer."""
    torch.manual_seed(0)
    model = make()
    found: dict[str, Any] = {}
    results = []
    for name, wrap in (("plain", plain), ("planned", planned)):
        wrapped = wrap(copy.deepcopy(model))
        part = next(m for m in wrapped.modules() if isinstance(m, nn.Linear))
        runs: list[int] = []
        part.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        results.append(gradients(wrapped, rank))
        found[name] = len(runs)
    one, other = results
    found["gradients"] = len(one)
    found["equal"] = len(one) == len(other) and all(map(torch.equal, one, other))
    return found


@functools.cache
def plan() -> SACPlan:
    return plan_for(Stack, LAYERS, SHAPE)


def with_plan(model: Stack) -> Stack:
    return apply(model, plan())


def shard(model: Stack) -> Stack:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def case_ddp(rank: int) -> Any:
    ddp = DistributedDataParallel
    return compare(rank, ddp, lambda m: ddp(with_plan(m)))


def case_shard_then_apply(rank: int) -> Any:
    return compare(rank, shard, lambda m: with_plan(shard(m)))


def case_apply_then_shard(rank: int) -> Any:
    return compare(rank, shard, lambda m: shard(with_plan(m)))


class Deep(Stack):
    """Model in which each layer has its block one level further down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.Tanh()) for _ in range(2))


def case_checkpointed_below(rank: int) -> Any:
    """The checkpointed modules lie within the sharded modules."""
    deep = plan_for(Deep, ["layers.0.0", "layers.1.0"], SHAPE)
    return compare(rank, shard, lambda m: apply(shard(m), deep), Deep)


def case_sharded_within(rank: int) -> Any:
    """A sharded module within a checkpointed module gathers its parameters there."""

    def shard_within(model: Stack) -> Stack:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.layers:
            assert isinstance(layer, Block)
            fully_shard(layer.up, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model = with_plan(shard_within(Stack()))
    try:
        model(inputs(rank))
    except PolicyError as error:
        return str(error)
    return "no error"


def main(folder: Path) -> None:
    """Fork one process for each rank, because imports and the plan take longer than the cases."""
    warnings.simplefilter("ignore")
    plan()
    ranks = []
    for rank in range(WORLD):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run_all(globals(), folder, rank, WORLD, outcome)
    for process in ranks:
        os.waitpid(process, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
