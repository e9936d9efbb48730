"""Bytes of parameters and gradients on one rank, by rules for a single rank, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from remat.graph.memory.storages import storage_bytes, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Bytes of parameters and gradients on one of N ranks, and bytes that the rank sends in a step.

    **DDP** (several ranks without FSDP): every rank has all parameters, all gradients, and buckets. Buckets are another
    copy of the gradients (``gradient_as_bucket_view=False``) and live as long as the model. In a step, a rank sends
    2·(N-1)/N times the bytes of the gradients.

    **FSDP2** (`fully_shard` of each block, then of the model): a block is a child of an outermost `nn.ModuleList`.
    Parameters outside of all blocks belong to the root (the model itself). Parameters, gradients and the optimizer's
    state are sharded along the first dimension, and shard sizes are rounded up. A *whole* tensor is one that is not
    sharded.

    - While forward and backward run, the root's parameters are whole. The parameters of two blocks are whole, too: the
      block that runs, and the block that is gathered next. Each of these two blocks is counted with the size of the
      largest block.
    - During backward, the root's gradients are whole as soon as they are computed. The gradients of the largest
      block count twice: as computed, and as laid out for the reduction.
    - At the end of backward, the root's gradients count twice (as computed, and as laid out for the reduction). At the
      end of backward, no block's gradients are whole.
    - A gradient belongs to the root if no parameter of a block has the gradient's size.
    - In each micro-batch, parameters of blocks are gathered twice (for forward and for backward), the root's parameters
      once, and gradients are reduced once. For each gathering and each reduction, a rank sends (N-1)/N of the whole
      tensors' bytes.

    Attributes:
        ranks: number of ranks.
        label: how the ranks train together, as text, such as ``"8 ranks by DDP"``; empty for one rank.
        shards: number of parts of each parameter and of its optimizer state; 1 without FSDP.
        parameter_bytes: bytes of the parameters that are on the rank all the time: the shards under FSDP2.
        gradient_bytes: bytes of the gradients that are on the rank after backward: the shards under FSDP2.
        gathered_bytes: bytes of whole parameters while forward and backward run, in addition to the shards.
        reduced_bytes: bytes of whole gradients of blocks while backward runs, in addition to the shards.
        final_bytes: bytes of the root's whole parameters and gradients at the end of backward, in addition to the
            shards.
        block_sizes: sizes in bytes of the parameters of blocks. A gradient of another size counts as the root's.
        bucket_bytes: bytes of buckets, which are on the rank all the time.
        sent_bytes: bytes that the rank sends in a step; under FSDP2, in each micro-batch.
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
        """Compute the bytes of a model's parameters and gradients on one rank, by the rules of `Sharding`.

        Args:
            model: a module, in which blocks are looked for; or any other callable, which has no blocks.
            parameters: the model's parameters, each once.
            trained: keys (`storage_key`) of the storages of parameters that get a gradient.
            ranks: number of ranks.
            fsdp: whether the ranks shard parameters, gradients and optimizer state.
        """
        parameter_bytes = _bytes_of(parameters)
        gradients = _bytes_of(parameters, lambda k: k in trained)
        share = (ranks - 1) / ranks
        if not fsdp:
            several = ranks > 1
            return cls(
                ranks=ranks,
                label=f"{ranks} ranks by DDP" if several else "",
                shards=1,
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradients,
                bucket_bytes=gradients if several else 0,
                sent_bytes=int(2 * share * gradients),
            )
        blocks = _blocks(model)
        in_blocks = {storage_key(p) for block in blocks for p in block}
        root = _bytes_of(parameters, lambda k: k not in in_blocks)
        root_gradients = _bytes_of(parameters, lambda k: k not in in_blocks and k in trained)
        block = max((_bytes_of(b) for b in blocks), default=0)
        block_gradients = max((_bytes_of(b, lambda k: k in trained) for b in blocks), default=0)
        return cls(
            ranks=ranks,
            label=f"{ranks} ranks by FSDP2, {len(blocks)} blocks",
            shards=ranks,
            parameter_bytes=_bytes_of([shard(p, ranks) for p in parameters]),
            gradient_bytes=_bytes_of(
                [shard(p, ranks) for p in parameters if storage_key(p) in trained]
            ),
            gathered_bytes=root + 2 * block,
            reduced_bytes=2 * block_gradients,
            final_bytes=root + 2 * root_gradients,
            block_sizes=frozenset(storage_bytes(p) for block in blocks for p in block),
            sent_bytes=int(share * (root + 2 * (parameter_bytes - root) + gradients)),
        )


def shard(parameter: torch.Tensor, shards: int) -> torch.Tensor:
    """Return rank 0's shard of a parameter, the largest one, as a meta tensor; with one shard, return the parameter."""
    if shards == 1:
        return parameter
    # A scalar parameter has no dimension to shard, so it counts as one row.
    first, *rest = parameter.shape or (1,)
    return torch.empty(-(-first // shards), *rest, dtype=parameter.dtype, device="meta")


def _blocks(model: Any) -> list[list[torch.Tensor]]:
    """Return one list of parameters for each FSDP2 block of a model; `Sharding` defines what a block is."""
    if not isinstance(model, torch.nn.Module):
        return []
    if isinstance(model, torch.nn.ModuleList):
        blocks: list[list[torch.Tensor]] = [list(child.parameters()) for child in model]
        return [parameters for parameters in blocks if parameters]
    return [block for child in model.children() for block in _blocks(child)]


def _bytes_of(
    tensors: Iterable[torch.Tensor], counts: Callable[[int], bool] = lambda _: True
) -> int:
    """Return the summed bytes of the tensors' distinct storages whose key the function ``counts`` accepts."""
    tensors = list(tensors)  # the key of a storage is valid only as long as a tensor holds it
    sizes = {storage_key(t): storage_bytes(t) for t in tensors}
    return sum(b for k, b in sizes.items() if k is not None and counts(k))
