"""Bytes of parameters and gradients on one rank, by rule: single rank, DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from remat.graph.storages import storage_bytes, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Bytes on one rank, and the bytes that it sends in a step.

    **DDP** (``ranks`` alone): every rank has all parameters and gradients, and buckets, which are one more
    copy of the gradients (``gradient_as_bucket_view=False``) and live as long as the model. The gradients
    are sent 2·(N-1)/N times.

    **FSDP2** (`fully_shard` of each block, then of the model): a block is a child of an outermost
    `nn.ModuleList`; what lies in none is the root's. Parameters, gradients and the optimizer's state are
    sharded along the first dimension, rounded up. While the step runs, the root's parameters are whole, and
    those of two blocks of the largest size: the one that runs and the one that is gathered for the next. In
    backward there are gradients of the root, whole from when they are made, and twice those of the largest
    block: as they are made, and as they are laid out to be reduced; at its end, the root's twice and no
    block's. A gradient of a size that no block's has is the root's. Parameters are sent twice (the
    root's once) and gradients once, each (N-1)/N times.

    Attributes:
        ranks: how many there are.
        label: how they share the work, for people.
        shards: how many parts parameters and the optimizer's state are in.
        parameter_bytes: bytes of the parameters that lie on the rank all the time.
        gradient_bytes: bytes of the gradients that lie on it when backward has run.
        gathered_bytes: further bytes of parameters while forward and backward run.
        reduced_bytes: further bytes of blocks' gradients while backward runs.
        final_bytes: further bytes of the root, parameters and gradients, at its end.
        block_sizes: bytes of each parameter of a block, of which its gradients are known.
        bucket_bytes: bytes of buckets, all the time.
        sent_bytes: bytes that the rank sends in a step.
    """

    ranks: int
    label: str
    shards: int
    parameter_bytes: int
    gradient_bytes: int
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    final_bytes: int = 0
    block_sizes: frozenset[int] = frozenset()
    bucket_bytes: int = 0
    sent_bytes: int = 0

    @classmethod
    def of(
        cls, model: Any, parameters: list[torch.Tensor], trained: set[int], ranks: int, fsdp: bool
    ) -> Sharding:
        """The bytes of a model's parameters.

        Args:
            model: a module, whose blocks are found; anything else has none.
            parameters: its parameters, each once.
            trained: storages of those that get a gradient.
            ranks: how many ranks there are.
            fsdp: whether they share the parameters, too.
        """
        whole, trains = _bytes_of(parameters), _bytes_of(parameters, lambda k: k in trained)
        share = (ranks - 1) / ranks
        if not fsdp:
            several = ranks > 1
            return cls(
                ranks=ranks,
                label=f"{ranks} ranks by DDP" if several else "",
                shards=1,
                parameter_bytes=whole,
                gradient_bytes=trains,
                bucket_bytes=trains if several else 0,
                sent_bytes=int(2 * share * trains),
            )
        blocks = _blocks(model)
        inside = {k for block in blocks for p in block for k in [storage_key(p)]}
        root = _bytes_of(parameters, lambda k: k not in inside)
        root_trains = _bytes_of(parameters, lambda k: k not in inside and k in trained)
        block = max((_bytes_of(b) for b in blocks), default=0)
        block_trains = max((_bytes_of(b, lambda k: k in trained) for b in blocks), default=0)
        return cls(
            ranks=ranks,
            label=f"{ranks} ranks by FSDP2, {len(blocks)} blocks",
            shards=ranks,
            parameter_bytes=_bytes_of([shard(p, ranks) for p in parameters]),
            gradient_bytes=_bytes_of(
                [shard(p, ranks) for p in parameters if storage_key(p) in trained]
            ),
            gathered_bytes=root + 2 * block,
            reduced_bytes=2 * block_trains,
            final_bytes=root + 2 * root_trains,
            block_sizes=frozenset(storage_bytes(p) for block in blocks for p in block),
            sent_bytes=int(share * (root + 2 * (whole - root) + trains)),
        )


def shard(parameter: torch.Tensor, shards: int) -> torch.Tensor:
    """What the first rank has of a parameter, without numbers: a part of its first dimension, rounded up."""
    if shards == 1:
        return parameter
    first, *rest = parameter.shape or (1,)
    return torch.empty(-(-first // shards), *rest, dtype=parameter.dtype, device="meta")


def _blocks(model: Any) -> list[list[torch.Tensor]]:
    """The parameters of each block: of the children of module lists that lie in no other."""
    if not isinstance(model, torch.nn.Module):
        return []
    if isinstance(model, torch.nn.ModuleList):
        found: list[list[torch.Tensor]] = [list(child.parameters()) for child in model]
        return [parameters for parameters in found if parameters]
    return [block for child in model.children() for block in _blocks(child)]


def _bytes_of(
    tensors: Iterable[torch.Tensor], counts: Callable[[int], bool] = lambda _: True
) -> int:
    """Bytes of distinct storages."""
    tensors = list(tensors)  # keys are good while they live
    found = {storage_key(t): storage_bytes(t) for t in tensors}
    return sum(b for k, b in found.items() if k is not None and counts(k))
